"""Prompt rows of all modes against the official ones; Chinese, limits, what is left out and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_vox
import torch
from tiny_vox_lm import builder, cases, controls, prompt_of, tiny_config

from sonoro.core.errors import CheckpointError, InvalidRequest
from sonoro.models.base import Spoken, Voice
from sonoro.models.voxcpm2.prompt import PromptBuilder, VoxVoice, stand_in
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.text.splitting import SpokenText, split_text

MODES = ["zero_shot", "zero_shot_chinese", "zero_shot_controlled", "continuation", "continuation_chinese", "reference",
         "reference_controlled", "both", "zero_shot_chained", "continuation_chained", "both_chained"]  # fmt: skip


def patches(seed: int, count: int) -> torch.Tensor:
    return torch.from_numpy(tiny_vox.recording(seed, count))


def voice(prompt: int = 0, reference: int = 0, transcript: str = "One.") -> Voice:
    return Voice(VoxVoice(transcript if prompt else "", patches(1, prompt), patches(2, reference)))


def ids_of(text: str) -> list[int]:
    """Of a zero-shot prompt, without the mark of audio at its end."""
    rows = builder().build(text, controls()).rows
    assert rows[-1, 0] == 101
    return rows[:-1, 0].tolist()


@pytest.mark.parametrize("name", MODES)
def test_rows_masks_and_limits_are_the_official_ones(reference_root: Path, name: str) -> None:
    case = cases("prompts", reference_root)[name]
    prompt = prompt_of(case, controls(max_frames=1000))
    rows, stored = prompt.rows, case.tensors
    assert rows[:, 0].tolist() == stored["ids"].tolist()
    assert rows[:, 1].tolist() == stored["audio_mask"].tolist()
    assert (1 - rows[:, 1]).tolist() == stored["text_mask"].tolist()
    heard = [stored[key] for key in ("reference", "prompt", "earlier_0", "earlier_1") if key in stored]
    made = np.ascontiguousarray(rows[:, 2:]).view(np.float32).reshape(-1, tiny_vox.PATCH, tiny_vox.LATENTS)
    assert np.array_equal(made[rows[:, 1] == 1], np.concatenate([made[:0], *heard]))
    assert not made[rows[:, 1] == 0].any()
    assert prompt.controls.max_frames == case.facts["limit"]
    # What may be shared: the reference between its marks.
    if "reference" in stored:
        assert prompt.prefix is not None
        assert np.array_equal(prompt.prefix, rows[: len(stored["reference"]) + 2])
        assert prompt.prefix[[0, -1], 0].tolist() == [103, 104]
    else:
        assert prompt.prefix is None


def test_every_mode_was_stored(reference_root: Path) -> None:
    assert list(cases("prompts", reference_root)) == MODES


def test_a_limit_of_the_request_counts_where_it_is_lower() -> None:
    assert builder().build("Hello world.", controls(max_frames=7)).controls.max_frames == 7
    # Whoever lets speech run on has its length in mind.
    assert builder().build("Hello.", controls(max_frames=300, ignore_eos=True)).controls.max_frames == 300


def test_chinese_is_spoken_by_single_characters() -> None:
    """A token of one character keeps the space before it; longer ones are taken apart and lose it."""
    vocabulary, _ = tiny_vox.tokens()
    whole = builder()._tokenizer.encode("你好")
    assert whole == [vocabulary["▁你好"]]
    assert ids_of("你好") == [vocabulary["你"], vocabulary["好"]]
    assert ids_of("a 你好") == [*ids_of("a"), vocabulary["你"], vocabulary["好"]]
    assert ids_of("请世界")[1:] == [vocabulary["世"], vocabulary["界"]]
    assert ids_of("请") == [vocabulary["▁请"]]


def test_instructions_stand_before_the_first_text() -> None:
    plain = builder().build("(a slow voice)Hello.", controls())
    told = builder().build("Hello.", controls(), instructions=" (a slow（\n voice） ")
    assert np.array_equal(plain.rows, told.rows)
    for nothing in ("()", "（ ）"):
        with pytest.raises(InvalidRequest, match=r"instructions: .*more than parentheses"):
            builder().build("Hello.", controls(), instructions=nothing)
    assert plain.controls == told.controls
    # Once spoken they stay where they were, and bound the text that follows no more.
    earlier = [Spoken("Hello.", patches(3, 2))]
    later = builder().build("You.", controls(max_frames=1000), earlier, instructions="a slow voice")
    expected = builder().build("(a slow voice)Hello. You.", controls(max_frames=1000))
    assert np.array_equal(later.rows[:-2], expected.rows)
    assert later.controls == builder().build("You.", controls(max_frames=1000)).controls
    with pytest.raises(InvalidRequest, match=r"instructions: .*recording as a reference alone"):
        builder().build("You.", controls(), voice=voice(prompt=2), instructions="slow")
    assert len(builder().build("You.", controls(), voice=voice(reference=2), instructions="slow").rows) > 4


def test_earlier_segments_are_left_out_once_they_are_many() -> None:
    """30 s of audio; without a voice, the last one stays in any case."""
    earlier = [Spoken(f"Number {index}.", patches(index, 60)) for index in range(5)]

    def heard(said: list[Spoken], given: Voice | None) -> int:
        return int(builder().build("You.", controls(), said, given).rows[:, 1].sum())

    assert heard(earlier, None) == 3 * 60
    assert heard(earlier, voice(prompt=20)) == 20 + 2 * 60
    assert heard(earlier, voice(reference=20)) == 20 + 3 * 60
    long = [Spoken("Long.", patches(1, 200))]
    assert heard(long, None) == 200
    assert heard(long, voice(reference=20)) == 20
    kept = builder().build("You.", controls(), earlier).rows[:, 0].tolist()
    assert kept[: -3 * 60] == [*ids_of("Number 2. Number 3. Number 4. You."), 101]


def test_the_codec_goes_on_from_what_was_heard_last() -> None:
    """Also where the model is not given it any more."""
    said = [Spoken("One.", patches(3, 200)), Spoken("Two.", patches(4, 2))]
    for given in (None, voice(reference=20), voice(prompt=187)):
        primed = builder().build("You.", controls(), said, given).voice
        assert primed is not None
        assert torch.equal(primed.reference_frames[-202:], torch.cat([frames for _, frames in said]))
    assert builder().build("You.", controls(), (), voice(prompt=3)).voice is None


def test_sentences_are_joined_as_they_were_cut() -> None:
    said = [Spoken("你好。", patches(1, 2)), Spoken("Hello.", patches(2, 2))]
    rows = builder().build("You.", controls(), said).rows
    assert rows[:-4, 0].tolist() == [*ids_of("你好。Hello. You."), 101]


@pytest.mark.parametrize(
    "text",
    [
        "He said “go now.” Then she left the house at once.",
        "Он шёл по дороге и думал о том что будет завтра",
        "그는 길을 걸으며 내일 무슨 일이 있을지를 오래도록 생각했다",
        "他说：“这是第一句话，我们走吧。”然后她就离开了那个房子，再也没有回来过一次。",
        "これは最初の文です。二番目の、もう少し長い文。",
    ],
)
def test_cuts_are_where_they_were_in_any_script(text: str) -> None:
    pieces = [part.text for part in split_text(SpokenText(text), "auto", 30)]
    assert len(pieces) > 1
    rows = builder().build(pieces[-1], controls(), [Spoken(piece, patches(1, 2)) for piece in pieces[:-1]]).rows
    assert rows[rows[:, 1] == 0, 0].tolist() == [*ids_of(text), 101]


@pytest.mark.parametrize("text", ["Hello <|audio_start|>", "<s>", "so </s> it"])
def test_control_tokens_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"text: .*must not hold the control token"):
        builder().build(text, controls())
    with pytest.raises(InvalidRequest, match=r"instructions: .*must not hold the control token"):
        builder().build("Hello.", controls(), instructions=text)
    with pytest.raises(InvalidRequest, match=r"ref_text: .*must not hold the control token"):
        builder().build("Hello.", controls(), voice=voice(prompt=2, transcript=text))


def test_a_prompt_too_long_for_the_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"text: .* positions, the model has 4096"):
        builder().build("Hello.", controls(max_frames=3900, ignore_eos=True), voice=voice(reference=200))
    with pytest.raises(InvalidRequest, match="UTF-8"):
        builder().build("Hello \ud800", controls())


def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    config = tiny_config()
    small = replace(config, lm_config=replace(config.lm_config, vocab_size=300))
    with pytest.raises(CheckpointError, match=r"tokenizer.json holds id \d+; lm_config.vocab_size is 300"):
        PromptBuilder(small, TextTokenizer.stand_in({}, first=100))


def test_a_stand_in_speaks_bytes_and_no_control_token() -> None:
    prompt = PromptBuilder(tiny_config(), stand_in(tiny_config())).build("Hello.", controls())
    assert prompt.rows[-1, 0] == 101
    assert ((prompt.rows[:-1, 0] >= 107) & (prompt.rows[:-1, 0] < 363)).all()
