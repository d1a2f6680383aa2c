"""What comes out of an engine over sine waves, by request: its audio, its end, and whether a listener ever waited."""

from collections.abc import Callable, Sequence

import numpy as np
from fakes.voiced_sine import VoicedSineModel
from resolving import Engine

from sonoro.audio.pcm import from_pcm16
from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.types import AudioChunk, Event, Failed, Finished, Reference, SpeechRequest

HOP = 80


def config_of(**changes: object) -> EngineConfig:
    """Three slots and short segments, but for `changes`."""
    return tuned(**{"slots": 3, "max_positions": 600, "max_frames": 512, "segment_letters": 40} | changes)


def tuned(**values: object) -> EngineConfig:
    """A configuration of `values`, of which some are fields of `Tuning`."""
    tuning = {name: values.pop(name) for name in Tuning.__dataclass_fields__ if name in values}
    return EngineConfig(**values, tuning=Tuning(**tuning))


def engine_of(ticks_late: int = 1, **changes: object) -> Engine:
    """Reads results one tick late, as on a GPU, unless told otherwise."""
    return Engine(VoicedSineModel(), config_of(**changes), ticks_late=ticks_late)


def drain(engine: Engine) -> list[Event]:
    """Tick until nothing is left to do; nothing must be left behind."""
    events = []
    while engine.has_work:
        events += engine.tick()
    assert_empty(engine)
    return events


def assert_empty(engine: Engine) -> None:
    """No slot, page, ring entry or place in the queue is held."""
    assert (engine.scheduler.free_slots, engine.waiting) == (engine.config.slots, 0)
    assert (engine.scheduler.pages.free, engine.runner.ring.free) == (engine.runner.pages, engine.runner.ring.depth)


def audio(events: Sequence[Event], request_id: str) -> np.ndarray:
    """All audio of one request, its chunks numbered without a gap."""
    chunks = [event for event in events if isinstance(event, AudioChunk) and event.request_id == request_id]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    return from_pcm16(b"".join(chunk.pcm for chunk in chunks))


def end(events: Sequence[Event], request_id: str) -> Finished | Failed:
    """The last event of one request, which must be its only end."""
    mine = [event for event in events if event.request_id == request_id]
    assert isinstance(mine[-1], Finished | Failed)
    assert all(isinstance(event, AudioChunk) for event in mine[:-1])
    return mine[-1]


def speak(request: SpeechRequest, engine: Engine | None = None) -> tuple[np.ndarray, Finished | Failed]:
    """The audio and the end of a request that an engine, a fresh one if none is given, serves alone."""
    engine = engine or engine_of()
    engine.submit(request)
    events = drain(engine)
    return audio(events, request.id), end(events, request.id)


def reference(use: str = "prompt", pitch: float = 0.1) -> Reference:
    """A second of a tone to speak like."""
    tone = np.sin(np.arange(8000) * pitch).astype("<f4")
    return Reference(pcm=tone.tobytes(), sample_rate=8000, text="hm" if use == "prompt" else None, use=use)


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowModel(VoicedSineModel):
    """Its frames and its audio take as long as `frame_cost_s` and `codec_cost_s` say, on `clock`."""

    def __init__(self, clock: Clock, frame_cost_s: Callable[[], float], codec_cost_s: Callable[[int], float]) -> None:
        super().__init__()
        step, decode = self.frame, self.codec.decode

        def frame(state, slots):
            clock.now_s += frame_cost_s()
            step(state, slots)

        def slow_decode(frames, slots=None, history=None):
            clock.now_s += codec_cost_s(frames.shape[0] * frames.shape[1])
            return decode(frames, slots, history)

        self.frame, self.codec.decode = frame, slow_decode


def underruns(heard: Sequence[tuple[float, int]], frame_s: float) -> int:
    """How often somebody who plays chunks (arrival in seconds, frames) from the first one on had nothing left."""
    until_s, count = heard[0][0], 0
    for at_s, frames in heard:
        count += at_s > until_s + 1e-9
        until_s = max(until_s, at_s) + frames * frame_s
    return count
