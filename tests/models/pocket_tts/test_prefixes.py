"""A voice's keys and values, shared between requests: the frames of each are those of an engine that keeps nothing and
speaks it alone. In float64: rows behind pages round differently, which feedback amplifies."""

import random

import pytest
import tiny_pocket
import torch
from parity import rounding_by_shape
from sine_engines import PAGE, Watched, assert_made, frames_alone, speak_at_once

from sonoro.core.types import Reference, SpeechRequest
from sonoro.models.base import SpeechModel
from sonoro.models.pocket_tts.model import FAMILY

__all__ = ["rounding_by_shape"]

TOLERANCE = 1e-9
VOICES = ("alba", "anna", "azelma", "jean", "marius")
"""Of 19, 36, 53, 70 and 87 positions: one without a whole page, all with some positions beside."""

PAGES = {name: (19 + 17 * number) // PAGE for number, name in enumerate(VOICES)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    tiny_pocket.write_checkpoint(folder, voices=VOICES)
    return FAMILY.from_folder(folder, "tiny", torch.device("cpu"), torch.float64).model


def request(name: int, text: str, voice: str = "jean", **fields: object) -> SpeechRequest:
    given = {"id": str(name), "text": text, "voice": voice, "seed": name, "max_frames": 12, "ignore_eos": True}
    return SpeechRequest(**given | fields)


def test_a_voice_takes_no_tokens_and_its_second_request_shares_its_pages(model: SpeechModel) -> None:
    requests = [
        request(1, "Hello you."),
        request(2, "And something else."),
        request(3, "Hello you.", "alba"),
        request(4, "Hello you.", "marius"),
        request(5, "Hello you.", "marius"),
    ]
    expected, watched = frames_alone(model, *requests), Watched(model)
    for one in requests:
        watched.say(one)
    assert [len(made) for made in expected.values()] == [12] * 5
    assert_made(watched, expected, TOLERANCE)
    assert [len(pages) for pages in watched.shared] == [0, PAGES["jean"], 0, 0, PAGES["marius"]]
    stored = [70, 70, 19, 87, 87]
    assert watched.rows == [whole - known for whole, known in zip(watched.positions, stored, strict=True)]
    counts = watched.engine.prefixes
    # Pages are found whole: one voice has none.
    assert PAGES["alba"] == 0 < PAGES["jean"]
    assert (counts.hits, counts.misses) == (2, 2)
    assert counts.kept_bytes == (PAGES["jean"] + PAGES["marius"]) * PAGE * model.position_bytes


@pytest.mark.usefixtures("rounding_by_shape")
def test_each_chunk_is_spoken_from_the_voice_alone(model: SpeechModel) -> None:
    one = request(1, "It is one of them. " * 30, max_frames=None, options={"eos_threshold": -100.0}, ignore_eos=False)
    watched = Watched(model)
    watched.say(one)
    expected = frames_alone(model, one)
    assert len(expected) >= 3
    assert [len(pages) for pages in watched.shared] == [0, *[PAGES["jean"]] * (len(expected) - 1)]
    assert_made(watched, expected, TOLERANCE)


def test_a_registered_voice_shares_with_its_recording(model: SpeechModel) -> None:
    samples = 0.1 * torch.randn(48000, generator=torch.Generator().manual_seed(0))
    recording = Reference(pcm=samples.numpy().astype("<f4").tobytes(), sample_rate=24000, text="One.")
    watched = Watched(model)
    me = watched.engine.encode_voice((recording,)).result(timeout=60)
    # Of latents alone.
    assert len(me.data) < 4000
    watched.say(request(1, "Hello you.", voice=None, references=(recording,)))
    watched.say(request(2, "Hello you.", voice="me", voice_digest=me.digest))
    assert [len(pages) for pages in watched.shared] == [0, 27 // PAGE]


def test_several_voices_at_once_say_what_each_says_alone(model: SpeechModel) -> None:
    """Sixteen requests of five voices in four slots, padded as a GPU runs them; some are cancelled at any time, and
    pages are short."""
    draw, texts = random.Random(1), ["Hello you.", "This is a longer one, which it is."]
    requests = [request(number, draw.choice(texts), draw.choice(VOICES)) for number in range(16)]
    expected = frames_alone(model, *requests)
    padded = {"prefill_buckets": (64, 512), "frame_batches": (1, 2, 4), "codec_batches": (1, 4)}
    watched = Watched(model, slots=4, max_positions=160, pages=10, **padded)
    speak_at_once(watched, requests, expected, draw, TOLERANCE)
