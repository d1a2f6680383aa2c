"""A stand-in for an engine process at a GPU's pace, without model, torch or GPU: to measure the server in front of it.

It speaks noise. A tick takes `FIRST_MS` plus `EACH_MS` for each running request (the 1.7B model on an H100: 3 ms for
one, 13 for 256) and makes a frame of each; chunks are of 1, 4 and then 12 frames, as those of an engine that is faster
than playback. `use` lets `sonoro serve` start it in place of its own. In its statistics the time of ticks is that
from a request's arrival to its first audio."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

import msgspec
import numpy as np

from sonoro.core.events import Timings
from sonoro.core.types import AudioChunk, Finished, ModelSpec, SamplingParams, SpeechRequest
from sonoro.transport import channel, launch, messages
from sonoro.transport.shared_link import SharedWorkerLink

FIRST_MS, EACH_MS = 3.0, 0.04
CHUNKS = (1, 4, 12)
HOP, RATE = 1920, 24_000
SAMPLING = SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)
SPEC = ModelSpec(
    name="paced",
    sample_rate=RATE,
    hop=HOP,
    max_frames=1024,
    voice_modes=("named",),
    voices=("low", "high"),
    languages=("auto", "english"),
    sampling=SAMPLING,
)
NOISE = np.random.default_rng(0).integers(-3000, 3000, HOP * CHUNKS[-1], np.int16).tobytes()


class Spoken:
    """A request with a slot; its next chunk is due at the tick `due`."""

    def __init__(self, request: SpeechRequest) -> None:
        self.id, self.text = request.id, request.text
        self.total = request.max_frames or max(4, len(request.text))
        self.made, self.count, self.due, self.began_s = 0, 0, 0, time.perf_counter()

    @property
    def next_frames(self) -> int:
        return min(CHUNKS[min(self.count, len(CHUNKS) - 1)], self.total - self.made)


class PacedEngine:
    """The loop: messages in, ticks, events out."""

    def __init__(self, link: channel.WorkerLink, slots: int) -> None:
        self._link, self._slots, self._tick = link, slots, 0
        self._waiting: deque[Spoken] = deque()
        self._running: dict[str, Spoken] = {}
        self._live: dict[str, Spoken] = {}
        self._first_ms: deque[float] = deque(maxlen=4096)
        self._begun_s: list[float] = []
        self._due: dict[int, list[Spoken]] = defaultdict(list)
        self._is_over = False

    def serve(self) -> None:
        next_s = time.perf_counter()
        while not self._is_over:
            now_s = time.perf_counter()
            if not self._running and not self._waiting:
                self._take(1.0)
                next_s = time.perf_counter()
                continue
            self._take(0.0)
            events = self._step()
            next_s = max(next_s, now_s - 0.05) + (FIRST_MS + EACH_MS * len(self._running)) / 1000
            while (left_s := next_s - time.perf_counter()) > 0.0005:
                self._take(left_s)
            if events:
                self._link.send(events)
                sent_s = time.perf_counter()
                self._first_ms.extend(1000 * (sent_s - began_s) for began_s in self._begun_s)
                self._begun_s.clear()

    def _step(self) -> list[messages.FromEngine]:
        self._tick += 1
        events: list[messages.FromEngine] = []
        for spoken in self._due.pop(self._tick, ()):
            if spoken.id in self._running:
                events += self._chunk(spoken)
        while self._waiting and len(self._running) < self._slots:
            spoken = self._waiting.popleft()
            self._running[spoken.id] = spoken
            self._plan(spoken)
        return events

    def _plan(self, spoken: Spoken) -> None:
        self._due[self._tick + spoken.next_frames].append(spoken)

    def _chunk(self, spoken: Spoken) -> list[messages.FromEngine]:
        frames = spoken.next_frames
        spoken.made += frames
        at = len(spoken.text) * spoken.made // spoken.total
        pcm = NOISE[: 2 * HOP * frames]
        events: list[messages.FromEngine] = [
            AudioChunk(request_id=spoken.id, index=spoken.count, pcm=pcm, characters=at)
        ]
        if not spoken.count:
            self._begun_s.append(spoken.began_s)
        spoken.count += 1
        if spoken.made >= spoken.total:
            del self._running[spoken.id]
            events.append(self._end(spoken, "stop"))
        else:
            self._plan(spoken)
        return events

    def _end(self, spoken: Spoken, reason: str) -> Finished:
        timings = Timings(first_audio_s=0.0, total_s=time.perf_counter() - spoken.began_s)
        at = len(spoken.text) * spoken.made // spoken.total
        return Finished(request_id=spoken.id, reason=reason, frames=spoken.made, characters=at, timings=timings)

    def _take(self, timeout_s: float) -> None:
        for message in self._link.receive(max(0.0, timeout_s)):
            if isinstance(message, messages.Submit):
                self._submit(Spoken(message.request), is_live=message.request.is_live)
            elif isinstance(message, messages.AppendText):
                self._live[message.request_id].text += message.text
            elif isinstance(message, messages.EndText):
                live = self._live.pop(message.request_id)
                self._waiting.append(live)
                live.total = max(4, len(live.text))
            elif isinstance(message, messages.Cancel):
                self._cancel(message.request_id)
            elif isinstance(message, messages.Ping):
                self._link.send([messages.Pong()])
            elif isinstance(message, messages.StatsRequest):
                self._link.send([self._stats()])
            elif isinstance(message, messages.Shutdown):
                self._is_over = True

    def _submit(self, spoken: Spoken, *, is_live: bool) -> None:
        """Live text is spoken once it is whole."""
        if is_live:
            self._live[spoken.id] = spoken
        else:
            self._waiting.append(spoken)

    def _cancel(self, name: str) -> None:
        found = self._running.pop(name, None) or self._live.pop(name, None)
        found = found or next((one for one in self._waiting if one.id == name), None)
        if found is not None:
            if found in self._waiting:
                self._waiting.remove(found)
            self._link.send([self._end(found, "cancelled")])

    def _stats(self) -> messages.Stats:
        return messages.Stats(
            launches={},
            prefixes=messages.PrefixCounts(),
            running=len(self._running),
            waiting=len(self._waiting),
            paused=0,
            free_slots=self._slots - len(self._running),
            free_pages=0,
            tick_ms={f"p{part}": float(np.percentile(self._first_ms or [0.0], part)) for part in (50, 95, 99)},
            frame_ms={},
            gpu_memory_mib=0.0,
            broken_samples=0,
        )


def use() -> None:
    """Let engine processes that this one starts be these."""
    folder = str(Path(__file__).parent)
    launch._CODE = f"import sys; sys.path[:0] = [{folder!r}]; import paced_engine; paced_engine.main()"


def serve(engines: int, slots: int, *options: str) -> None:
    """Be `sonoro serve` with `options` over so many of these engines."""
    from sonoro.cli.main import main as sonoro  # noqa: PLC0415

    use()
    sonoro(["serve", "--port", "0", "--devices", ",".join(["cpu"] * engines), "--slots", str(slots), *options])


def main() -> None:
    endpoint, _, started_s, settings = sys.argv[1:]
    wanted = msgspec.json.decode(settings, type=messages.WorkerSettings)
    link = (SharedWorkerLink if wanted.has_fronts else channel.WorkerLink)(endpoint)
    ready_s = time.monotonic() - float(started_s)
    link.send([messages.Ready(spec=SPEC, ready_s=ready_s, report="", gpu_memory_mib=0.0, graph_memory_mib=0.0)])
    PacedEngine(link, wanted.config.slots).serve()
    link.close()
    os._exit(0)
