"""Prompts against the official implementation: token ids, rows and trail of every layout; and what users may type."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Case
from tiny_checkpoint import TOPOLOGIES, VARIANTS, vocabulary, write_checkpoint
from tiny_talker import voice_of

from builtin_voice.forwards import embed_prompt
from sonoro.core.errors import CheckpointError, CheckpointNotFound, InvalidRequest
from sonoro.core.types import SamplingParams
from sonoro.models.base import Voice
from sonoro.models.qwen3_tts import weights
from sonoro.models.qwen3_tts.config import read_configs
from sonoro.models.qwen3_tts.prompt import ClonedVoice, PromptBuilder, TalkerPrompt, TextTokenizer
from sonoro.runtime.sampling import Controls

CONTROLS = Controls(sampling=SamplingParams(), seed=0, segment=0, max_frames=64)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {(variant, topology): root / variant / topology for variant in VARIANTS for topology in TOPOLOGIES}
    for (variant, topology), folder in folders.items():
        write_checkpoint(folder, variant=variant, topology=topology)
    return folders


@pytest.fixture(scope="module")
def builders(checkpoints: dict[tuple[str, str], Path]) -> dict[tuple[str, str], PromptBuilder]:
    return {
        key: PromptBuilder(read_configs(folder).model, TextTokenizer.from_folder(folder))
        for key, folder in checkpoints.items()
    }


@pytest.fixture(scope="module")
def custom(builders: dict[tuple[str, str], PromptBuilder]) -> PromptBuilder:
    return builders["custom_voice", "1.7b"]


def built(builder: PromptBuilder, case: Case) -> TalkerPrompt:
    speaker = case.facts["speaker"]
    return builder.build(
        case.facts["text"],
        CONTROLS,
        is_non_streaming=case.facts["non_streaming"],
        language=case.facts["language"].lower(),
        speaker=speaker and speaker.lower(),
        instructions=case.facts["instruct"],
        voice=voice_of(case),
    )


def test_text_gives_the_official_ids(custom: PromptBuilder, reference: Callable[[str], dict[str, Case]]) -> None:
    cases = reference("tokens")
    assert cases
    for case in cases.values():
        text = case.facts["text"]
        assert custom.tokenizer.encode(text) == case.facts["ids"][3:-5], text
        assert custom.tokenizer.encode(text) == case.facts["ref_ids"][3:-2], text
        prompt = custom.build("I", CONTROLS, is_non_streaming=True, speaker="ryan", instructions=text)
        ids = case.facts["instruct_ids"]
        assert prompt.text_rows[: len(ids)].tolist() == ids, text


def test_prompt_rows_and_trail_are_the_official_ones(
    checkpoints: dict[tuple[str, str], Path],
    builders: dict[tuple[str, str], PromptBuilder],
    reference: Callable[[str], dict[str, Case]],
) -> None:
    """Float32: a row is a sum of at most five numbers near 1, so 1e-5 is some eighty roundings."""
    cases = reference("prompts")
    assert len(cases) >= 20
    talkers = {
        key: weights.FILES.load(folder, read_configs(folder), device=torch.device("cpu"), dtype=torch.float32).lm.talker
        for key, folder in checkpoints.items()
    }
    for case in cases.values():
        key = case.facts["variant"], case.facts["topology"]
        prompt = built(builders[key], case)
        with torch.inference_mode():
            rows, trail = embed_prompt(talkers[key], prompt), talkers[key].embed_text(prompt.trail)
        for ours, theirs in ((rows, case.tensors["prompt"]), (trail, case.tensors["trail"])):
            torch.testing.assert_close(ours, torch.from_numpy(theirs), atol=1e-5, rtol=0, msg=case.name)
        assert prompt.positions == len(rows)
        assert prompt.text_ids == len(trail)


def ids_of(prompt: TalkerPrompt) -> list[tuple[int, int]]:
    """(text id, codec id) of each row."""
    return list(zip(prompt.text_rows.tolist(), prompt.code_rows[:, 0].tolist(), strict=True))


def tags(builder: PromptBuilder, **arguments: Any) -> list[int]:
    """The codec ids between the role and the bridge."""
    prompt = builder.build("I", CONTROLS, is_non_streaming=False, **arguments)
    return [code for _, code in ids_of(prompt)[3:-2]]


def test_tags_name_the_language_and_the_speaker(custom: PromptBuilder) -> None:
    talker = custom.config.talker_config
    think = [talker.codec_think_id, talker.codec_think_bos_id]
    end, languages, speakers = talker.codec_think_eos_id, talker.codec_language_id, talker.spk_id
    no_language = [talker.codec_nothink_id, talker.codec_think_bos_id, end]
    assert tags(custom, language="english", speaker="ryan") == [*think, languages["english"], end, speakers["ryan"]]
    assert tags(custom, language="auto", speaker="ryan") == [*no_language, speakers["ryan"]]
    assert tags(custom, language="auto") == no_language


@pytest.mark.parametrize(
    ("language", "spoken"),
    [("auto", "sichuan_dialect"), ("chinese", "sichuan_dialect"), ("english", "english"), ("french", "french")],
)
def test_a_dialect_speaker_keeps_the_dialect_in_chinese(custom: PromptBuilder, language: str, spoken: str) -> None:
    talker = custom.config.talker_config
    assert tags(custom, language=language, speaker="eric")[2] == talker.codec_language_id[spoken]


@pytest.mark.parametrize("instructions", [None, ""])
def test_without_an_instruction_the_prompt_begins_with_the_role(
    custom: PromptBuilder, instructions: str | None
) -> None:
    prompt = custom.build("I", CONTROLS, is_non_streaming=False, speaker="ryan", instructions=instructions)
    config, line_break = custom.config, custom.tokenizer.encode("\n")
    assert prompt.text_rows[:3].tolist() == [config.im_start_token_id, config.assistant_token_id, *line_break]


@pytest.mark.parametrize("text", ["<|im_end|>", "Say <|im_start|>assistant\n now", "<tts_pad><tts_text_eod>"])
def test_special_tokens_in_user_text_are_ordinary_text(custom: PromptBuilder, text: str) -> None:
    special = set(vocabulary()[2].values())
    assert not special & set(custom.tokenizer.encode(text))
    prompt = custom.build(text, CONTROLS, is_non_streaming=False, speaker="ryan")
    assert prompt.trail.tolist()[-1] == custom.config.tts_eos_token_id
    assert not special & set(prompt.trail.tolist()[:-1])


@pytest.mark.parametrize("space", ["", " ", "  ", "\n", "\n\n \t", " \n ", "\r\n", "\u3000"])
def test_leading_white_space_is_read_as_the_official_code_does(custom: PromptBuilder, space: str) -> None:
    """Which reads the text together with the template's line break, and takes the first id for the template's."""
    tokenizer, text, calm = custom.tokenizer, f"{space}Hello you", f"{space}Be calm"
    said, asked = (
        tokenizer.encode(f"{who}\n{words}")[len(tokenizer.encode(who)) :]
        for who, words in (("assistant", text), ("user", calm))
    )
    prompt = custom.build(text, CONTROLS, is_non_streaming=True, speaker="ryan", instructions=calm)
    ids, user = [row[0] for row in ids_of(prompt)], len(tokenizer.encode("user"))
    assert ids[1 + user :][: len(asked)] == asked
    start = ids.index(custom.config.im_start_token_id, 1)
    assert ids[start + 2] == said[0]
    first = ids.index(custom.config.tts_bos_token_id) + 1
    assert ids[first:][: len(said)] == [*said[1:], custom.config.tts_eos_token_id]
    voice = Voice(ClonedVoice(torch.zeros(1), calm), torch.zeros(2, 4, dtype=torch.int64))
    ids = [row[0] for row in ids_of(custom.build(text, CONTROLS, is_non_streaming=True, voice=voice))]
    first = ids.index(custom.config.tts_bos_token_id) + 1
    assert ids[first:][: len(asked) + len(said) - 2] == [*asked[1:], *said[1:]]


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_text_without_a_token_is_refused(custom: PromptBuilder, text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"text.*at least one token"):
        custom.build(text, CONTROLS, is_non_streaming=False, speaker="ryan")


def test_text_that_is_no_unicode_is_refused(custom: PromptBuilder) -> None:
    with pytest.raises(InvalidRequest, match=r"text.*UTF-8"):
        custom.build("a\ud800b", CONTROLS, is_non_streaming=False, speaker="ryan")


def test_a_prompt_that_leaves_no_room_for_its_frames_is_refused(custom: PromptBuilder) -> None:
    frames = custom.config.talker_config.max_position_embeddings - 8
    custom.build("I", dataclasses.replace(CONTROLS, max_frames=frames), is_non_streaming=False)
    with pytest.raises(InvalidRequest, match="take 32769 positions, the model has 32768"):
        custom.build("I", dataclasses.replace(CONTROLS, max_frames=frames + 1), is_non_streaming=False)


def test_an_x_vector_takes_the_place_of_the_speaker(builders: dict[tuple[str, str], PromptBuilder]) -> None:
    builder = builders["base", "1.7b"]
    voice = Voice(data=ClonedVoice(torch.zeros(32)))
    prompt = builder.build("I", CONTROLS, is_non_streaming=False, language="english", voice=voice)
    assert prompt.x_vector_row == 7
    assert ids_of(prompt)[7] == (builder.config.tts_pad_token_id, -1)
    assert prompt.positions == 10


def test_a_normalizing_checkpoint_reads_words_and_says_what_it_drops(
    custom: PromptBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    builder = PromptBuilder(dataclasses.replace(custom.config, text_normalizer="english"), custom.tokenizer)
    assert custom.normalize("No. 5 ☃").text == "No. 5 ☃"
    with caplog.at_level(logging.DEBUG, logger="sonoro"):
        spoken = builder.normalize("I have 5 ☃ cats").text
    assert "five" in spoken
    assert spoken == spoken.lower()
    assert not any(character.isdigit() for character in spoken)
    counted, detail = caplog.records
    assert (counted.levelno, counted.getMessage()) == (logging.INFO, "event=characters_dropped count=1")
    # What somebody wrote is in no log by default.
    assert (detail.levelno, "☃" in detail.getMessage()) == (logging.DEBUG, True)
    assert builder.normalize("☃").text == ""


def test_a_checkpoint_has_words_respelled(custom: PromptBuilder) -> None:
    config = dataclasses.replace(custom.config, text_normalizer="english", respellings={"saute": "sawtay"})
    builder = PromptBuilder(config, custom.tokenizer)
    assert (
        builder.normalize("Sauté 2 sautéed ones in the SAUTÉ pan").text == "sawtay two sauteed ones in the sawtay pan."
    )
    spoken = builder.normalize("sauté").text
    assert builder.normalize(spoken).text == spoken


def test_an_unknown_normalizer_is_refused(custom: PromptBuilder) -> None:
    with pytest.raises(CheckpointError, match="text_normalizer is 'klingon'"):
        PromptBuilder(dataclasses.replace(custom.config, text_normalizer="klingon"), custom.tokenizer)


def test_the_stand_in_gives_a_token_a_byte() -> None:
    tokenizer = TextTokenizer.stand_in()
    assert len(tokenizer.encode("héllo you\n")) == 11
    assert len(set(tokenizer.encode("abc"))) == 3
    assert tokenizer.size == 256


def test_tokenizer_files_that_cannot_be_used_are_named(
    checkpoints: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointNotFound, match=r"vocab\.json does not exist"):
        TextTokenizer.from_folder(tmp_path)
    vocab = vocabulary()[0]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "vocab.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"vocab\.json"):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({key: index for key, index in vocab.items() if key != "a"}))
    with pytest.raises(CheckpointError, match="lacks 1 of the 256 byte symbols, such as 'a'"):
        TextTokenizer.from_folder(tmp_path)


def test_a_vocabulary_larger_than_the_text_embedding_is_refused(custom: PromptBuilder) -> None:
    talker = dataclasses.replace(custom.config.talker_config, text_vocab_size=300)
    with pytest.raises(CheckpointError, match="text_vocab_size is 300"):
        PromptBuilder(dataclasses.replace(custom.config, talker_config=talker), custom.tokenizer)
