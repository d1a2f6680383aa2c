"""The loop of an engine process: messages of the link in, ticks of the engine, events out.

An error of one request becomes its `Failed`; an error of the engine ends the loop."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import MappingProxyType

import torch

from sonoro.core.errors import ErrorFacts, border
from sonoro.core.types import Failed
from sonoro.engine.engine import Engine
from sonoro.runtime.kernels import fallbacks
from sonoro.runtime.memory import reserved_mib
from sonoro.runtime.phases import percentiles_ms
from sonoro.transport.channel import WorkerLink
from sonoro.transport.encoded_voice import EncodedVoice
from sonoro.transport.messages import (
    AppendText,
    Cancel,
    EncodeVoice,
    EndText,
    LoadVoice,
    Pause,
    Ping,
    Pong,
    Ready,
    Resume,
    Shutdown,
    Stats,
    StatsRequest,
    Submit,
    ToEngine,
    VoiceEncoded,
    VoiceFailed,
    VoiceLost,
    VoiceWanted,
)

_IDLE_S = 1.0
_WINDOW = 4096
_WORTH_S = 0.002
"""The shortest wait for late messages: the link waits whole milliseconds, and a single request's ticks are as short."""

_POLL_S = 0.0003
"""How often to look whether late audio is there: every 2 ms, first packets come 4 ms later (simulated device)."""

_HANDLE_S = 0.005
_ENCODING_S = 0.002
_COMPILING_S = 0.05
"""How often to check whether the kernels of the graphs to come are compiled."""

_QUIET_S = 0.1
"""Idle time before background work: a client often sends its next request at once, which would wait for a capture."""


class Worker:
    """The loop of an engine process: handles messages of the link, ticks while there is work, sends events.
    `is_compiled` says whether the kernels compiled ahead of their launch are there; `compiled_at_launch` counts, by
    kernel, those that this process had to compile itself."""

    def __init__(
        self,
        engine: Engine,
        link: WorkerLink,
        device: torch.device,
        is_compiled: Callable[[], bool] = lambda: True,
        compiled_at_launch: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._engine, self._link, self._device = engine, link, device
        self._is_compiled, self._compiled_at_launch = is_compiled, compiled_at_launch
        self._is_compiling = True
        self._encoding: dict[int, Future[EncodedVoice]] = {}
        self._tick_s: deque[float] = deque(maxlen=_WINDOW)
        self._frame_s: deque[float] = deque(maxlen=_WINDOW)
        self._ticked_at_s: float | None = None
        self._is_stopping = False
        self._quiet_from_s = 0.0

    def ready(self, ready_s: float, phases: Mapping[str, float] = MappingProxyType({})) -> Ready:
        """The `Ready` message of an engine that took `ready_s` and `phases` (seconds by name) to start."""
        self._ready_s, self._phases = ready_s, dict(phases)
        return self._ready_now()

    def _ready_now(self) -> Ready:
        """`ready` with the memory and graphs as of now."""
        engine, graphs = self._engine, self._engine.runner.graphs
        return Ready(
            spec=engine.spec,
            ready_s=self._ready_s,
            report=graphs.report,
            gpu_memory_mib=reserved_mib(self._device),
            graph_memory_mib=graphs.memory_mib,
            graphs_to_come=graphs.to_come,
            fingerprint=engine.fingerprint,
            phases=self._phases,
        )

    def serve(self) -> None:
        """Serve until `Shutdown`. Raises what a tick raises, after which the engine is unusable."""
        waiting: deque[ToEngine] = deque()
        while not self._is_stopping:
            began_s = time.perf_counter()
            has_audio_to_come = self._engine.take_lengths()
            waited_s = time.perf_counter() - began_s
            waiting += self._link.receive(0.0 if waiting or self._engine.has_work else self._idle_s)
            self._handle_some(waiting)
            self._report_voices()
            if not self._engine.has_work:
                self._ticked_at_s = None
                if not waiting:
                    self._work_in_quiet()
                continue
            self._handle_late(waiting, began_s + waited_s if has_audio_to_come else None)
            started_at_s = time.perf_counter() - waited_s
            events = self._engine.tick()
            self._note_tick(started_at_s)
            if events:
                self._link.send(events)

    @property
    def _idle_s(self) -> float:
        """How long to wait for a message while the engine is idle, given voices being encoded and background work."""
        if self._engine.voices.awaiting or self._encoding:
            return _ENCODING_S
        if self._engine.has_quiet_work and not self._is_compiled():
            return _COMPILING_S
        return max(0.0, self._quiet_from_s - time.perf_counter()) if self._engine.has_quiet_work else _IDLE_S

    def _work_in_quiet(self) -> None:
        """After a moment without requests, capture one of the graphs to come and send a new `Ready`; when all are
        captured, advance the search for word heads."""
        if self._is_compiling:  # polled in any case: `is_compiled` also reaps the compiler process
            self._is_compiling = not self._is_compiled()
        is_too_early = time.perf_counter() < self._quiet_from_s
        if self._is_compiling or self._encoding or is_too_early or not self._engine.has_quiet_work:
            return
        runner = self._engine.runner
        if not runner.graphs.to_come:
            self._engine.found_heads.search(runner)
            return
        with runner.active():
            runner.graphs.capture_next()
        self._link.send([self._ready_now()])

    def _note_tick(self, started_at_s: float) -> None:
        ended_at_s = time.perf_counter()
        self._quiet_from_s = ended_at_s + _QUIET_S
        self._tick_s.append(ended_at_s - started_at_s)
        if self._ticked_at_s is not None:
            self._frame_s.append(ended_at_s - self._ticked_at_s)
        self._ticked_at_s = ended_at_s

    def _handle_some(self, waiting: deque[ToEngine]) -> None:
        """Handle messages for at most `_HANDLE_S`, so that a burst of requests does not stall the running ones."""
        until_s = time.perf_counter() + _HANDLE_S
        while waiting and (time.perf_counter() < until_s or not self._engine.has_work):
            self._handle(waiting.popleft())

    def _handle_late(self, waiting: deque[ToEngine], stepped_at_s: float | None) -> None:
        """Handle messages that arrive during `spare_s`, before the device needs the next tick. If a step whose audio is
        to come was done at `stepped_at_s`, send that once it is there."""
        until_s = (stepped_at_s or self._ticked_at_s or 0.0) + self._engine.spare_s
        least_s = _WORTH_S if stepped_at_s is None else _POLL_S
        while not self._is_stopping and (left_s := until_s - time.perf_counter()) >= least_s:
            if stepped_at_s is not None:
                if events := self._engine.late_audio():
                    self._link.send(events)
                time.sleep(_POLL_S)
            waiting += self._link.receive(0.0 if waiting or stepped_at_s is not None else left_s)
            self._handle_some(waiting)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                with border(lambda error: self._link.send([Failed.of(request.id, error)])):
                    self._engine.submit(request)
            case AppendText(request_id, text, said):
                self._engine.append(request_id, text, said)
            case EndText(request_id):
                self._engine.end_text(request_id)
            case Cancel(request_id):
                self._engine.cancel(request_id)
            case Pause(request_id):
                self._engine.pause(request_id)
            case Resume(request_id):
                self._engine.resume(request_id)
            case StatsRequest(resets):
                self._link.send([self._stats()])
                if resets:
                    self._tick_s.clear()
                    self._frame_s.clear()
            case Ping():
                self._link.send([Pong()])
            case EncodeVoice(number, references):
                with self._voice_border(number):
                    self._encoding[number] = self._engine.encode_voice(references)
            case LoadVoice(digest, data):
                self._engine.voices.load(digest, data)
            case VoiceLost(digest, facts):
                self._engine.voices.lose(digest, facts.error)
            case Shutdown():
                self._is_stopping = True

    def _report_voices(self) -> None:
        """Send the voices that were encoded or failed, and the digests of wanted ones."""
        for number in [number for number, future in self._encoding.items() if future.done()]:
            with self._voice_border(number):
                encoded = self._encoding.pop(number).result()
                self._link.send([VoiceEncoded(number, encoded.digest, encoded.data)])
        if self._engine.voices.asked:
            self._link.send([VoiceWanted(digest) for digest in self._engine.voices.take_wanted()])

    def _voice_border(self, number: int) -> AbstractContextManager[None]:
        """A context in which an exception is sent as `VoiceFailed` of request `number`."""
        return border(lambda error: self._link.send([VoiceFailed(number, ErrorFacts.of(error))]))

    def _stats(self) -> Stats:
        engine = self._engine
        return Stats(
            launches=engine.runner.graphs.launches,
            prefixes=engine.prefixes,
            running=engine.config.slots - engine.scheduler.free_slots,
            waiting=engine.waiting,
            paused=sum(request.is_paused for request in engine.lifecycle.requests.values()),
            free_slots=engine.scheduler.free_slots,
            free_pages=engine.scheduler.pages.free,
            tick_ms=percentiles_ms(self._tick_s),
            frame_ms=percentiles_ms(self._frame_s),
            gpu_memory_mib=reserved_mib(self._device),
            broken_samples=engine.output.broken_samples,
            preemptions=engine.lifecycle.preemptions,
            fallbacks=fallbacks(),
            compiled=dict(self._compiled_at_launch),
        )
