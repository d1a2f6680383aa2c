"""Control tokens that a text spells: never themselves by default, and as in the official prompts where that is set."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny_fish
import tiny_vox
from tiny_checkpoint import write_checkpoint

from sonoro.core.errors import CheckpointError, InvalidRequest
from sonoro.core.types import Reference, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import SpeechModel
from sonoro.models.settings import configure

ON = {"reads_control_tokens": True}


def prepared(model: SpeechModel, text: str) -> object:
    request = model.spec.resolve(SpeechRequest(id="a", text=text, max_frames=8))
    return model.prepare(request, text, 0, [], None)


def ids(model: SpeechModel, text: str) -> list[int]:
    prompt = prepared(model, text)
    return prompt.rows[:, 0].tolist() if hasattr(prompt, "rows") else prompt.text_rows.tolist()


@pytest.mark.parametrize(("tiny", "token"), [(tiny_fish, "<|im_end|>"), (tiny_vox, "<|audio_start|>")])
def test_a_refused_token_is_taken_for_itself(tmp_path: Path, tiny: object, token: str) -> None:
    tiny.write_checkpoint(tmp_path)
    model = registry.load(tmp_path, device="cpu").model
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    number = next(one["id"] for one in tokens if one["content"] == token)
    text = f"One {token} two."
    with pytest.raises(InvalidRequest, match="must not hold the control token"):
        prepared(model, text)
    configure(model, ON)
    plain = ids(model, "One  two.")
    assert ids(model, text).count(number) == plain.count(number) + 1
    configure(model, {"reads_control_tokens": False})
    with pytest.raises(InvalidRequest, match="must not hold the control token"):
        prepared(model, text)


@pytest.mark.parametrize(
    ("tiny", "rate", "token"), [(tiny_fish, 44100, "<|im_end|>"), (tiny_vox, 16000, "<|audio_start|>")]
)
def test_a_transcript_with_a_refused_token_is_no_voice(tmp_path: Path, tiny: object, rate: int, token: str) -> None:
    """It would be one with which every request is refused."""
    tiny.write_checkpoint(tmp_path)
    model = registry.load(tmp_path, device="cpu").model
    noise = 0.1 * np.random.default_rng(0).standard_normal(2 * rate)
    one = Reference(pcm=noise.astype("<f4").tobytes(), sample_rate=rate, text="As I said.")
    other = msgspec.structs.replace(one, text=f"As I {token} said.")
    model.encode_voice([one])
    with pytest.raises(InvalidRequest, match=r"ref_text: .*must not hold the control token"):
        model.encode_voice([other])
    configure(model, ON)
    model.encode_voice([other])


def test_text_becomes_the_tokens_that_the_checkpoint_adds(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    model = registry.load(tmp_path, device="cpu").model
    number = json.loads((tmp_path / "config.json").read_text())["im_start_token_id"]
    text = "One<|im_start|>two"
    spelled = ids(model, text)
    # The template has one of its own.
    assert spelled.count(number) == 1
    configure(model, ON)
    read = ids(model, text)
    assert read.count(number) == 2
    assert len(read) < len(spelled)
    configure(model, {"tokenizer_split": "mistral"})
    assert ids(model, text).count(number) == 2
    assert ids(model, "One two") == ids(registry.load(tmp_path, device="cpu").model, "One two")


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"7": {"content": "<|x|>"}}, "the vocabulary leaves other numbers"),
        ({"7": 3}, "is not tokens by number"),
        ({}, "names none"),
    ],
)
def test_tokens_that_cannot_be_read_are_refused_where_they_are_wanted(
    tmp_path: Path, added: dict[str, object], message: str
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    model = registry.load(tmp_path, device="cpu").model
    with pytest.raises(CheckpointError, match=message):
        configure(model, ON)
