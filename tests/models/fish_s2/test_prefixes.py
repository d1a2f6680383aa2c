"""A voice's prompt and earlier turns shared between requests, over a tiny checkpoint: the codes of each are those of an
engine that keeps nothing and speaks it alone.

In float64 on a CPU: rows that are prefilled beside others, or behind pages, round differently, and a near tie of some
thousand decisions in float32 would be decided otherwise on one processor or another.
"""

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_fish
import torch
from sine_engines import PAGE, Watched, assert_made, end, frames_alone, speak_at_once

from sonoro.core.types import Reference, SpeechRequest
from sonoro.models.base import SpeechModel
from sonoro.models.fish_s2.model import FAMILY

SHARED = 24
TURNS = "<|speaker:0|>One of them. " + "word " * 30 + "<|speaker:1|> Another one. " + "word " * 30


@functools.cache
def model_on(folder: Path, device: str, end_scale: float = 0.6) -> SpeechModel:
    tiny_fish.write_checkpoint(folder, end_scale=end_scale)
    dtype = torch.float64 if device == "cpu" else torch.float32
    model: Any = FAMILY.from_folder(folder, "tiny", torch.device(device), dtype).model
    # Of the same recording many engines are given the voice.
    model.encode_voice = functools.cache(model.encode_voice)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint") / "tiny-fish"


@pytest.fixture(scope="module")
def model(folder: Path) -> SpeechModel:
    return model_on(folder, "cpu")


def recording(number: int = 0) -> tuple[Reference, ...]:
    """Half a second of noise, which are 690 frames of the tiny codec."""
    samples = 0.1 * np.random.default_rng(number).standard_normal(22050)
    return (Reference(pcm=samples.astype("<f4").tobytes(), sample_rate=44100, text=f"This is number {number}."),)


def request(name: int, text: str, voice: int = 0, **fields: object) -> SpeechRequest:
    return SpeechRequest(id=str(name), text=text, references=recording(voice), seed=name, max_frames=24, **fields)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_voices_second_request_runs_only_its_own_rows(folder: Path, device: str) -> None:
    """Its rows after the last whole page of the system message; on a GPU by captured prefills."""
    model = model_on(folder, device)
    watched = Watched(model)
    first, second, other = request(1, "Hello you."), request(2, "And something else."), request(3, "Hi.", voice=1)
    for one in (first, second, other):
        watched.say(one)
    expected = frames_alone(model, first, second, other)
    assert len(expected) == 3
    assert_made(watched, expected)
    whole, own, third = watched.rows
    # All of a system message of some 780 rows but its last page; of another voice the words that both begin with.
    assert [len(pages) for pages in watched.shared] == [0, SHARED, 2]
    assert watched.positions == [whole, own + SHARED * PAGE, third + 2 * PAGE]
    assert own < PAGE + 50
    assert watched.engine.prefixes.tokens_prefilled == whole + own + third
    assert watched.engine.prefixes.tokens_cached == (SHARED + 2) * PAGE
    assert (watched.engine.prefixes.hits, watched.engine.prefixes.misses) == (2, 1)
    assert watched.engine.prefixes.kept_bytes == (2 * SHARED - 2) * PAGE * model.position_bytes


def test_a_voice_is_shared_by_name_by_content_and_while_it_is_spoken_with(model: SpeechModel) -> None:
    watched = Watched(model)
    me = {"voice": "me", "voice_digest": watched.engine.encode_voice(recording()).result(timeout=60).digest}
    first, named = request(1, "Hello you."), SpeechRequest(id="2", text="Like this.", seed=2, max_frames=24, **me)
    watched.engine.submit(first)
    for _ in range(3):
        watched.tick()
    assert watched.engine.scheduler.free_slots == 2
    watched.say(named)
    assert watched.engine.prefixes.tokens_cached == SHARED * PAGE
    assert_made(watched, frames_alone(model, first, request(2, "Like this.")))


def test_earlier_turns_are_run_once(tmp_path: Path) -> None:
    """The third segment goes on from the first turn and its answer, the fourth from those of the second as well."""
    model = model_on(tmp_path, "cpu", end_scale=1.5)
    watched, one = Watched(model), SpeechRequest(id="1", text=TURNS + TURNS, seed=1)
    events = watched.say(one)
    assert end(events, "1").reason == "stop"
    expected = frames_alone(model, one)
    assert watched.frames.keys() == expected.keys()
    assert_made(watched, expected)
    lengths = [len(shared) for shared in watched.shared]
    assert len(lengths) == 4
    assert lengths[0] == 0
    assert lengths[1] < lengths[2] < lengths[3]
    # What is left of each turn is the one before it, and less than a page.
    assert all(rows < 200 < positions for rows, positions in zip(watched.rows[2:], watched.positions[2:], strict=True))


def test_several_voices_at_once_say_what_each_says_alone(model: SpeechModel) -> None:
    """Sixteen requests of four voices in four slots; some are cancelled at any time. First pages, then bytes do for no
    more than three of the voices, so that some are given up; the second time padded, as a GPU runs them."""
    draw = random.Random(1)
    words = ["Hello you.", "And this is a longer one, which it is.", "Hm."]
    requests = [request(number, draw.choice(words), voice=draw.choice([0, 0, 1, 2, 3])) for number in range(16)]
    expected = frames_alone(model, *requests)
    padded = {"prefill_buckets": (64, 1024), "frame_batches": (1, 2, 4), "codec_batches": (1, 4)}
    for pages, kept, changes in ((110, 1000, {}), (300, 60, padded)):
        page_bytes = PAGE * model.position_bytes
        watched = Watched(model, slots=4, pages=pages, prefix_cache_bytes=kept * page_bytes, **changes)
        speak_at_once(watched, requests, expected, draw)
