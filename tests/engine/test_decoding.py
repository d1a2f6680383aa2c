"""A codec on a stream or a device of its own: the audio is, to the bit, what it is on the stream of the model."""

import random

import msgspec
import pytest
import torch
from families import TinyFamily, tiny
from sine_engines import Clock, Engine, config_of, drain, tuned
from sine_models import VoicedSineModel

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.core.types import AudioChunk, Event, Reference, SpeechRequest
from sonoro.engine.runner import Runner
from sonoro.models.base import SpeechModel

__all__ = ["tiny"]

SIZES = {"slots": 4, "max_positions": 1024, "max_frames": 64, "segment_letters": 60, "chunk_frames": (1, 3, 8)}
PADDED = {"frame_batches": (1, 2, 4), "prefill_buckets": (32, 1024), "codec_batches": (1, 4)}
"""As a GPU runs them."""

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def spoken(model: SpeechModel, requests: list[SpeechRequest], **changes: object) -> list[Event]:
    """What an engine answers to 16 of `requests` that come and go, some of them paused for a while or cancelled; the
    same ones however often it is called.
    """
    engine = Engine(model, tuned(**SIZES | changes), Clock(), ticks_late=1)
    draw, events, sent = random.Random(7), list[Event](), list[str]()
    while len(sent) < 16:
        if draw.random() < 0.4:
            sent.append(str(len(sent)))
            engine.submit(msgspec.structs.replace(draw.choice(requests), id=sent[-1]))
        elif sent:
            draw.choice([engine.pause, engine.resume, engine.resume])(draw.choice(sent))
        if sent and draw.random() < 0.02:
            engine.cancel(draw.choice(sent))
        events += engine.tick()
    for name in sent:
        engine.resume(name)
    return events + drain(engine)


def facts(events: list[Event]) -> list[tuple[object, ...]]:
    """What was said, but for how long it took."""
    return [
        (event.request_id, event.index, event.pcm)
        if isinstance(event, AudioChunk)
        else (event.request_id, event.reason, event.frames, event.characters)
        for event in events
    ]


def test_audio_is_the_same_to_the_bit_wherever_the_codec_is(tiny: TinyFamily) -> None:
    requests = tiny.requests_of_all_kinds()
    together = spoken(tiny.load().model, requests, **PADDED)
    assert sum(isinstance(event, AudioChunk) for event in together) > 40
    assert facts(spoken(tiny.load().model, requests, codec_device="cpu", **PADDED)) == facts(together)


@pytest.mark.gpu
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("overlap", [2, 4])
def test_audio_is_the_same_to_the_bit_on_a_stream_beside(tiny: TinyFamily, overlap: int, is_eager: bool) -> None:
    requests = tiny.requests_of_all_kinds()
    together = spoken(tiny.load(torch.bfloat16, "cuda").model, requests, is_eager=is_eager, codec_overlap=0)
    model = tiny.load(torch.bfloat16, "cuda").model
    assert facts(spoken(model, requests, is_eager=is_eager, codec_overlap=overlap)) == facts(together)


def test_steps_of_few_and_of_nearly_all_do_not_wait_for_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of more than `codec_overlap` do, up to 15 of 16 slots; what is decoded always waits for its step."""
    waits: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            waits.append((self.name, other.name))

    engine = Engine(VoicedSineModel(), config_of(slots=8, codec_overlap=2), Clock(), ticks_late=1)
    engine.submit(SpeechRequest(id="0", text="Hello there.", max_frames=9))
    drain(engine)
    decoding = engine.runner._decoding
    decoding.beside = Stream("codec")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("model"))
    asked = []
    for stepped in range(1, 9):
        decoding.follow()
        assert waits.pop() == ("codec", "model")
        decoding.lead(stepped)
        asked += [stepped] if waits == [("model", "codec")] else []
        waits.clear()
    assert asked == [3, 4, 5, 6]


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("is_eager", [False, True])
def test_audio_is_the_same_to_the_bit_on_another_gpu(tiny: TinyFamily, is_eager: bool) -> None:
    requests = tiny.requests_of_all_kinds()
    together = spoken(tiny.load(torch.bfloat16, "cuda:0").model, requests, is_eager=is_eager)
    model = tiny.load(torch.bfloat16, "cuda:0").model
    apart = spoken(model, requests, is_eager=is_eager, codec_device="cuda:1")
    assert facts(apart) == facts(together)


@pytest.mark.gpu
@needs_two_gpus
def test_a_card_of_its_own_holds_what_the_codec_has(tiny: TinyFamily) -> None:
    engine = Engine(tiny.load(torch.bfloat16, "cuda:0").model, EngineConfig(**SIZES | {"codec_device": "cuda:1"}))
    report = engine.runner.graphs.report.splitlines()
    assert not any("codec histories" in line for line in report)
    assert any(line.startswith("codec on cuda:1:") for line in report)
    engine.submit(SpeechRequest(id="0", text="Hello there.", max_frames=9))
    drain(engine)
    counts = engine.runner.graphs.launches
    assert min(counts[kind]["graph"] for kind in ("frame", "codec", "transfer")) > 0
    assert sum(counts[kind]["eager"] for kind in ("frame", "codec", "transfer")) == 0


def test_a_voice_primes_a_codec_that_is_apart() -> None:
    reference = Reference(pcm=b"\0" * 16000, sample_rate=8000, text="Said before.", use="prompt")
    request = SpeechRequest(id="0", text="It goes on from there.", references=(reference,), max_frames=30)
    answers = []
    for where in ("", "cpu"):
        engine = Engine(VoicedSineModel(), config_of(codec_device=where), Clock())
        engine.submit(request)
        answers.append(facts(drain(engine)))
    assert answers[0] == answers[1]


def test_what_is_sent_over_is_counted_by_itself() -> None:
    engine = Engine(VoicedSineModel(), config_of(chunk_frames=(1, 4), codec_device="cpu"), Clock(), ticks_late=1)
    engine.submit(SpeechRequest(id="0", text="Hello there.", max_frames=9))
    drain(engine)
    counts = {name: kind["eager"] for name, kind in engine.runner.graphs.launches.items()}
    # Placed once, and nine frames sent.
    assert counts == {"admit": 1, "prefill": 1, "frame": 9, "codec": 4, "transfer": 10}


@pytest.mark.parametrize(
    ("where", "words"), [("cuda:0", "model's device, cpu"), ("gpu", "must be empty, cpu, or a GPU"), ("cuda", "cuda:1")]
)
def test_a_device_that_cannot_be_the_codecs_is_refused(where: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Runner(VoicedSineModel(), config_of(codec_device=where))
    assert "codec_device" in str(refused.value)
    assert where in str(refused.value)


@pytest.mark.gpu
@pytest.mark.parametrize(("where", "words"), [("cuda:0", "the model is on it"), ("cuda:99", "this process sees")])
def test_a_gpu_that_cannot_be_the_codecs_is_refused(tiny: TinyFamily, where: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Runner(tiny.load(torch.bfloat16, "cuda:0").model, EngineConfig(**SIZES | {"codec_device": where}))
