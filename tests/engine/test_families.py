"""The engine over every family: any mix of requests gives each the answer it gets alone, and leaves nothing behind."""

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from families import TinyFamily, tiny
from sine_engines import Clock, Engine, audio, drain, end, tuned

from sonoro.core.types import AudioChunk, Event, Finished, SpeechRequest
from sonoro.models.base import PackingModel, SpeechModel

__all__ = ["tiny"]

PADDED = {"frame_batches": (1, 2, 4), "prefill_buckets": (32, 512, 1024), "codec_batches": (1, 4)}
"""As a GPU runs them."""


@pytest.fixture(scope="module")
def model(tiny: TinyFamily) -> SpeechModel:
    """In float64, so that no frame hangs on who else speaks; its codec is in float32."""
    return tiny.load(torch.float64).model


def engine_of(model: SpeechModel, **changes: object) -> Engine:
    sizes = {"slots": 3, "max_positions": 1024, "max_frames": 64, "segment_letters": 60, "chunk_frames": (1, 3, 8)}
    return Engine(model, tuned(**sizes | changes), Clock(), ticks_late=1)


@pytest.fixture(scope="module")
def said_alone(tiny: TinyFamily, model: SpeechModel) -> list[tuple[np.ndarray, Finished]]:
    """What a fresh engine says to each of the requests of all kinds."""
    answers = []
    for request in tiny.requests_of_all_kinds():
        engine = engine_of(model)
        engine.submit(request)
        events = drain(engine)
        answers.append((audio(events, request.id), end(events, request.id)))
    assert all(isinstance(finished, Finished) for _, finished in answers), answers
    return answers


def assert_as_alone(events: Sequence[Event], request: SpeechRequest, expected: tuple[np.ndarray, Finished]) -> None:
    """The whole answer, or a beginning of it if it was cancelled. Chunks and batches round by a step of 16 bits."""
    samples, finished = expected
    got, ended = audio(events, request.id), end(events, request.id)
    assert isinstance(ended, Finished), ended
    if ended.reason != "cancelled":
        assert (ended.reason, ended.frames, len(got)) == (finished.reason, finished.frames, len(samples))
    np.testing.assert_allclose(got, samples[: len(got)], atol=1.01 / 32768, rtol=0)


def test_any_mix_of_requests_gives_each_the_answer_it_gets_alone(
    tiny: TinyFamily, model: SpeechModel, said_alone: list[tuple[np.ndarray, Finished]]
) -> None:
    engine, events = engine_of(model), list[Event]()
    for request in tiny.requests_of_all_kinds():
        engine.submit(request)
        events += engine.tick() + engine.tick()
    events += drain(engine)
    for request, expected in zip(tiny.requests_of_all_kinds(), said_alone, strict=True):
        samples, finished = expected
        assert len(samples) == finished.frames * model.codec.hop > 0
        assert samples.std() > 0.001
        assert_as_alone(events, request, expected)


def test_saved_voices_are_of_a_checkpoint_whatever_its_codec_computes_in(tiny: TinyFamily) -> None:
    """And whether word heads are searched for, which are kept under the same fingerprint."""
    settings = [("float32", True), ("bfloat16", True), ("bfloat16", False)]
    made = [engine_of(tiny.load().model, codec_dtype=dtype, finds_word_heads=finds) for dtype, finds in settings]
    assert len({engine.fingerprint for engine in made}) == 1


@pytest.mark.parametrize(("is_eager", "least_packed"), [(False, 256), (True, 256), (True, 2)])
def test_requests_that_come_and_go_leave_nothing_behind(
    tiny: TinyFamily,
    model: SpeechModel,
    said_alone: list[tuple[np.ndarray, Finished]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_eager: bool,
    least_packed: int,
) -> None:
    """Twenty in four slots, some of them paused for a while or cancelled; padded, and with a third of the pages that
    all could need. Eager, some prompts run within a step, as from graphs on a GPU: of four requests, or of two too."""
    monkeypatch.setattr("sonoro.engine.device_state._LEAST_PACKED", least_packed)
    draw, kinds = random.Random(5), tiny.requests_of_all_kinds()
    engine = engine_of(model, slots=4, pages=43, is_eager=is_eager, **PADDED)
    events: dict[str, list[Event]] = {}
    kind_of: dict[str, int] = {}
    live: list[str] = []
    while len(events) < 20 or live:
        if len(events) < 20 and draw.random() < 0.4:
            name, kind = str(len(events)), draw.randrange(len(kinds))
            engine.submit(msgspec.structs.replace(kinds[kind], id=name))
            events[name], kind_of[name] = [], kind
            live.append(name)
        if live:
            draw.choice([engine.pause, engine.resume, engine.resume])(draw.choice(live))
        if live and draw.random() < 0.03:
            engine.cancel(draw.choice(live))
        if not engine.has_work:
            for name in live:
                engine.resume(name)
        for event in engine.tick():
            events[event.request_id].append(event)
            if not isinstance(event, AudioChunk):
                live.remove(event.request_id)
    assert drain(engine) == []
    for name, mine in events.items():
        request = msgspec.structs.replace(kinds[kind_of[name]], id=name)
        assert_as_alone(mine, request, said_alone[kind_of[name]])
    packed = engine.runner.graphs.steps.packed_sets
    assert all(graphs.sizes == ((2, 4) if least_packed == 2 else (4,)) for graphs in packed)
    assert any(graphs.eager_launches for graphs in packed) == (is_eager and isinstance(model, PackingModel))
    reasons = [end(mine, name).reason for name, mine in events.items()]
    assert 0 < reasons.count("cancelled") < 15
