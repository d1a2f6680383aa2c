"""A recording that is only sounded like, shared between requests, over a tiny checkpoint: the frames of each are those
of an engine that keeps nothing and speaks it frames_alone.

In float64: rows that are prefilled beside others, or behind pages, round differently, which feedback amplifies.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import tiny_vox
import torch
from parity import rounding_by_shape
from sine_engines import PAGE, Watched, assert_made, frames_alone, speak_at_once
from torch import Tensor

from sonoro.core.types import Reference, SpeechRequest
from sonoro.models.base import SpeechModel
from sonoro.models.voxcpm2.backbone import VoxLM
from sonoro.models.voxcpm2.model import FAMILY

__all__ = ["rounding_by_shape"]

TOLERANCE = 1e-9
"""Two float64 computations in another order, amplified by a dozen frames of feedback."""

SHARED = 6
"""Whole pages of 200 patches between their two marks."""


def model_in(folder: Path, **trained: str) -> SpeechModel:
    tiny_vox.write_checkpoint(folder, **trained)
    return FAMILY.from_folder(folder, "tiny", torch.device("cpu"), torch.float64).model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return model_in(tmp_path_factory.mktemp("checkpoint") / "tiny-vox")


def recording(number: int, **fields: object) -> Reference:
    """Half a second of noise, which are 200 patches of the tiny codec."""
    samples = 0.1 * np.random.default_rng(number).standard_normal(8000)
    return Reference(pcm=samples.astype("<f4").tobytes(), sample_rate=16000, **fields)


def request(name: int, text: str, *, like: int = 0, goes_on: bool = False, **fields: object) -> SpeechRequest:
    """One that sounds like recording number `like`, and continues another one if it `goes_on`."""
    references = [recording(like, use="reference")] + [recording(9, text="Once.")] * goes_on
    given = {"id": str(name), "text": text, "references": tuple(references), "seed": name, "max_frames": 12}
    return SpeechRequest(**given | {"ignore_eos": True} | fields)


def test_a_voices_second_request_runs_only_its_own_rows(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every mode of that recording, instructed or continuing another: what it says uncached."""
    encoded: list[int] = []
    embed = VoxLM.embed

    def counted(lm: VoxLM, ids: Tensor, patches: Tensor, is_audio: Tensor) -> Tensor:
        encoded.append(len(patches))
        return embed(lm, ids, patches, is_audio)

    requests = [
        request(1, "Hello you."),
        request(2, "And something else."),
        request(3, "Like this.", instructions="slowly"),
        request(4, "Both of them.", goes_on=True),
        request(5, "Hello you.", like=1),
    ]
    expected = frames_alone(model, *requests)
    monkeypatch.setattr(VoxLM, "embed", counted)
    watched = Watched(model)
    for one in requests:
        watched.say(one)
    assert [len(made) for made in expected.values()] == [12] * 5
    assert_made(watched, expected, TOLERANCE)
    assert [len(pages) for pages in watched.shared] == [0, SHARED, SHARED, SHARED, 0]
    # Nothing is made of what is there, neither by the local encoder nor by a language model.
    assert encoded == watched.rows
    cached = [0, *[SHARED * PAGE] * 3, 0]
    assert watched.rows == [whole - there for whole, there in zip(watched.positions, cached, strict=True)]
    assert watched.rows[1] < PAGE
    counts = watched.engine.prefixes
    assert (counts.hits, counts.misses, counts.tokens_cached) == (3, 2, 3 * SHARED * PAGE)
    assert counts.kept_bytes == 2 * SHARED * PAGE * model.position_bytes


def test_other_prompts_share_nothing(model: SpeechModel) -> None:
    """A recording that is continued stands behind the new text."""
    watched = Watched(model)
    for name in (1, 2):
        watched.say(request(name, "Hello you.", references=(recording(9, text="Once."),)))
        watched.say(request(name + 2, "Hello you.", references=()))
    assert not any(watched.shared)
    assert (watched.engine.prefixes.hits, watched.engine.prefixes.misses) == (0, 0)


def test_each_segment_shares_what_the_first_one_sounded_like(tmp_path: Path) -> None:
    model = model_in(tmp_path, stop="always")
    watched, one = Watched(model), request(1, "It is one of them. " * 20, ignore_eos=False, max_frames=None)
    watched.say(one)
    expected = frames_alone(model, one)
    assert [len(pages) for pages in watched.shared] == [0, *[SHARED] * (len(expected) - 1)]
    assert watched.frames.keys() == expected.keys() == {(1, index) for index in range(len(expected))}
    assert len(expected) >= 2
    assert_made(watched, expected, TOLERANCE)


@pytest.mark.usefixtures("rounding_by_shape")
def test_a_registered_voice_shares_with_its_recording(model: SpeechModel) -> None:
    watched = Watched(model)
    me = watched.engine.encode_voice((recording(0, use="reference"),)).result(timeout=60)
    watched.say(request(1, "Hello you."))
    named = request(2, "Like this.", references=(), voice="me", voice_digest=me.digest)
    watched.say(named)
    assert [len(pages) for pages in watched.shared] == [0, SHARED]
    assert_made(watched, frames_alone(model, request(2, "Like this.")), TOLERANCE)


def test_several_voices_at_once_say_what_each_says_alone(model: SpeechModel) -> None:
    """Sixteen requests of three recordings in four slots, padded as a GPU runs them; some are cancelled at any time,
    and pages are short."""
    draw, texts, likes = random.Random(1), ["Hello you.", "This is a longer one, which it is."], [0, 0, 1, 2]
    requests = [
        request(number, draw.choice(texts), like=draw.choice(likes), goes_on=draw.random() < 0.3)
        for number in range(16)
    ]
    expected = frames_alone(model, *requests)
    padded = {"prefill_buckets": (64, 512), "frame_batches": (1, 2, 4), "codec_batches": (1, 4)}
    watched = Watched(model, slots=4, max_positions=512, pages=24, **padded)
    speak_at_once(watched, requests, expected, draw, TOLERANCE)
