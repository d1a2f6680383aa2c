"""Prompts against the official ones, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_fish
import torch
from tiny_dual_ar import builder, cases, controls, tiny_config, voice_of

from sonoro.core.errors import CheckpointError, CheckpointNotFound, InvalidRequest
from sonoro.models.base import Voice
from sonoro.models.fish_s2.config import model_config
from sonoro.models.fish_s2.prompt import ConversationBuilder, FishVoice, split_turns, stand_in
from sonoro.nn.tokenizer import TextTokenizer


def turns(text: str) -> list[str]:
    return [part.text for part in split_turns(text)]


@pytest.mark.parametrize("name", ["plain", "reference", "references", "turns", "turns_and_reference"])
def test_prompts_are_the_official_ones(reference_root: Path, name: str) -> None:
    """With and without references, several speakers, and turns that continue a conversation: every column."""
    case = cases("prompts", reference_root)[name]
    segments = turns(case.facts["text"])
    assert len(segments) == case.facts["batches"]
    assert ("turns" in name) == (len(segments) > 1)
    frames = [torch.from_numpy(case.tensors[f"frames_{index}"]).long() for index in range(len(segments))]
    for index, segment in enumerate(segments):
        earlier = list(zip(segments[:index], frames[:index], strict=True))
        prompt = builder().build(segment, controls(), earlier, voice_of(case))
        assert prompt.rows.tolist() == case.tensors[f"columns_{index}"].tolist()
        assert (prompt.positions, prompt.text_ids) == (len(prompt.rows), 0)


def test_turns_are_spoken_a_few_at_a_time() -> None:
    tag, other = "<|speaker:0|>", "<|speaker:1|>"
    assert turns("No tag: [laughing] as it is. ") == ["No tag: [laughing] as it is. "]
    assert turns(f"{tag} a {other}b\n") == [f"{tag} a\n{other}b"]
    assert turns(f"{tag}a" * 6) == ["\n".join([f"{tag}a"] * 5), f"{tag}a"]
    # 200 bytes, tags counted, line breaks not; one turn may be longer.
    fits = "ä" * ((200 - 2 * len(tag)) // 2)
    assert turns(f"{tag}{tag}{fits}") == [f"{tag}\n{tag}{fits}"]
    assert turns(f"{tag}{tag}{fits}ä") == [tag, f"{tag}{fits}ä"]
    assert turns(f"{tag}{'long ' * 90}") == [f"{tag}{'long ' * 90}".strip()]
    assert turns(f" Not lost. {tag}Found.") == ["Not lost.", f"{tag}Found."]


def test_what_was_cut_from_a_turn_keeps_its_speaker() -> None:
    frames = torch.zeros(1, tiny_fish.NUM_CODEBOOKS, dtype=torch.int64)
    cut = builder().build("and on.", controls(), [("<|speaker:0|>A\n<|speaker:3|>B goes on", frames), ("and", frames)])
    whole = builder().build(
        "<|speaker:3|>and on.",
        controls(),
        [("<|speaker:0|>A\n<|speaker:3|>B goes on", frames), ("<|speaker:3|>and", frames)],
    )
    assert cut.rows.tolist() == whole.rows.tolist()


def test_the_earliest_turns_are_left_out_where_there_are_too_many() -> None:
    frames = torch.ones(300, tiny_fish.NUM_CODEBOOKS, dtype=torch.int64)
    earlier = [(f"Turn {index}.", frames) for index in range(9)]
    prompt = builder().build("Now.", controls(), earlier)
    assert prompt.rows.tolist() == builder().build("Now.", controls(), earlier[-6:]).rows.tolist()
    # The tiny model has 4096 positions, of which the official code leaves 2048 to the frames.
    assert 1800 < prompt.positions <= 2048


def test_the_released_model_remembers_as_much_as_the_official_code() -> None:
    config = replace(tiny_config(), text_config=replace(tiny_config().text_config, max_seq_len=32768))
    conversations = ConversationBuilder(config, stand_in(config))
    earlier = [("Again.", torch.ones(1024, tiny_fish.NUM_CODEBOOKS, dtype=torch.int64))] * 40
    longest = conversations.build("Now.", controls(), earlier)
    assert 32768 - 2048 - 1100 < longest.positions <= 32768 - 2048
    fits = earlier[:20]
    assert conversations.build("Now.", controls(), fits).positions > 20 * 1024


@pytest.mark.parametrize("text", ["An end<|im_end|> within.", "<|semantic:3|>", "A<|voice|>B"])
def test_control_tokens_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"text.*must not hold the control token <\|"):
        builder().build(text, controls())
    voice = Voice(data=FishVoice((text,), torch.zeros(2, tiny_fish.NUM_CODEBOOKS, dtype=torch.int64)))
    with pytest.raises(InvalidRequest, match=r"ref_text.*must not hold"):
        builder().build("Fine.", controls(), voice=voice)


def test_phonemes_are_allowed_and_what_cannot_be_spoken_is_refused() -> None:
    special = tiny_fish.special_tokens()
    ids = builder().build("<|phoneme_start|>HH AH0<|phoneme_end|>", controls()).rows[:, 0].tolist()
    assert special["<|phoneme_start|>"] in ids
    with pytest.raises(InvalidRequest, match="UTF-8"):
        builder().build("lone \ud800", controls())
    with pytest.raises(InvalidRequest, match="the model has 4096"):
        builder().build("Long.", controls(max_frames=4090))


def test_a_tokeniser_of_another_model_is_refused(tmp_path: Path) -> None:
    tiny_fish.write_checkpoint(tmp_path)
    file = tmp_path / "tokenizer.json"
    with pytest.raises(CheckpointNotFound, match=r"tokenizer\.json does not exist"):
        TextTokenizer.from_folder(tmp_path / "nowhere")
    for field, change, reason in (
        ("eos_token_id", 3, r"<\|im_end\|> is \d+; it must be 3"),
        ("semantic_start_token_id", 5, r"<\|semantic:0\|> is \d+; it must be 5"),
    ):
        values = tiny_fish.config() | {field: change}
        if field != "eos_token_id":
            values["semantic_end_token_id"] = change + tiny_fish.NUM_CODES - 1
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=reason):
            ConversationBuilder(model_config(tmp_path), TextTokenizer.from_folder(tmp_path))
    file.write_text(file.read_text().replace("<|voice|>", "<|noise|>"))
    with pytest.raises(CheckpointError, match=r"<\|voice\|> is None; it must be there"):
        ConversationBuilder(tiny_config(), TextTokenizer.from_folder(tmp_path))
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="is no tokeniser"):
        TextTokenizer.from_folder(tmp_path)
