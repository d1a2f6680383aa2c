"""Continuous batching of any `SpeechModel`: requests in, events out, one decode step of all running requests per tick.

The host runs one tick behind: it launches tick k before it reads the results of tick k-1, so the device never waits for
it. The audio of a large step may come a launch later still: its codec may run beside the next step. Depends on the
protocols of `models.base` and on no model. Not thread-safe."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

import msgspec

from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineBusy, InvalidRequest
from sonoro.core.script import Said
from sonoro.core.types import Event, Reference, SpeechRequest
from sonoro.engine.lifecycle import Lifecycle, Output
from sonoro.engine.pages import PagePool
from sonoro.engine.parallel import RequestParts
from sonoro.engine.prompts import Prompts
from sonoro.engine.request import Playback, Request, speaking
from sonoro.engine.retry import Retry
from sonoro.engine.runner import Launched, Runner
from sonoro.engine.scheduler import Scheduler
from sonoro.engine.voices import Voices
from sonoro.engine.word_heads import FoundHeads
from sonoro.models.base import SpeechModel
from sonoro.models.settings import configure
from sonoro.runtime.phases import Phases
from sonoro.runtime.threads import Inline
from sonoro.transport.encoded_voice import EncodedVoice
from sonoro.transport.messages import PrefixCounts

_LARGE_STEP = 48
"""The launch after a step of more requests does not wait for its audio: the device would wait for the host instead."""

_TICK_WEIGHT = 0.2
"""Weight of the newest tick in the moving average of tick durations."""

_SPARE_GROWTH, _MAX_SPARE, _SPARE_DECAY = 0.01, 0.75, 0.8
"""`spare_s` grows by the first share of a tick, up to the second. The third multiplies it if the device was idle."""


class Pace:
    """How long ticks take, `tick_s` on average, and how long the next one may be delayed, `spare_s`.
    `spare_s` grows until the device was found idle, then shrinks; it begins anew when the batch has more than halved.
    It is 0 if results are not late. `frame_s` is the duration of a frame."""

    def __init__(self, frame_s: float) -> None:
        self._frame_s = frame_s
        # Before the first measurement, assume that a tick is twice as fast as playback.
        self.tick_s, self._is_measured = frame_s / 2, False
        self.spare_s = self._began_s = self._ended_at_s = 0.0
        self._waited_s: float | None = None

    def note_wait(self, waited_s: float) -> None:
        """Note a wait of `waited_s` for the device. One between two ticks is part of the second."""
        self._waited_s = (self._waited_s or 0.0) + waited_s

    def begin(self, now_s: float, *, is_busy: bool) -> None:
        """Begin a tick. If the device `is_busy`, a wait of up to `spare_s` since the last tick is hidden behind it and
        counts as part of this one."""
        hidden_s = self.spare_s + (self._waited_s or 0.0)
        self._began_s = max(self._ended_at_s, now_s - hidden_s) if is_busy else now_s

    def note_launch(self, stepped: int, stepped_before: int, *, was_idle: bool) -> None:
        """Adapt `spare_s` to a tick just launched, which `stepped` so many requests and found the device idle or not;
        the one before it, if it is in flight, `stepped_before`."""
        # Capped at a frame: one tick that was held up for long must not delay the next ones.
        tick_s = min(self.tick_s, self._frame_s)
        longer_s = min(self.spare_s + _SPARE_GROWTH * tick_s, _MAX_SPARE * tick_s)
        self.spare_s = _SPARE_DECAY * self.spare_s if was_idle else longer_s
        if 2 * stepped < stepped_before:
            # The load has fallen: the device will be done much sooner than the average tick.
            self.spare_s = 0.0

    def end(self, now_s: float, *, is_launch: bool) -> None:
        """End the tick. It counts if it waited for the device and `is_launch`: one that only launches, or only
        collects, is shorter than the device's time for one."""
        is_whole = is_launch and self._waited_s is not None
        self._ended_at_s, self._waited_s = now_s, None
        if is_whole:
            tick_s = now_s - self._began_s
            self.tick_s += (_TICK_WEIGHT if self._is_measured else 1.0) * (tick_s - self.tick_s)
            self._is_measured = True


class Engine:
    """Serves a model: `submit` requests, then call `tick` while it `has_work`. Ready once constructed.
    `executor` encodes reference audio and must run one job at a time; the default runs it in the caller's thread,
    within `submit`. `phases` receives the durations of the start. The public attributes are read-only to the caller.
    Raises `ConfigError` naming the field if the model does not fit the device under `config`."""

    def __init__(
        self,
        model: SpeechModel,
        config: EngineConfig,
        clock_s: Callable[[], float] = time.perf_counter,
        ticks_late: int | None = None,
        executor: Executor | None = None,
        *,
        phases: Phases | None = None,
    ) -> None:
        configure(model, config.model_settings)
        self.fingerprint = model.fingerprint
        """The model's fingerprint; only voices encoded under the same one can be loaded. Taken before the codec
        settles: the dtype it computes in is no part of it."""
        self.config, self.spec = config, model.spec
        self._model, self._clock_s = model, clock_s
        self.found_heads = FoundHeads(model, config)
        self.runner = runner = Runner(model, config, phases)
        pages = PagePool(runner.pages, runner.cached_pages)
        self.scheduler = Scheduler(runner.config, pages, self.spec.frame_s)
        self.voices = Voices(model, config, executor or Inline(), runner.codec_device, runner.streams)
        self._prompts, self.output = Prompts(model, config, runner.pages), Output(self.spec, clock_s)
        self.lifecycle = Lifecycle(runner, self.scheduler, self._prompts, self.voices, self.output)
        self._requests = self.lifecycle.requests
        self._in_flight: deque[Launched] = deque()
        self._ticks_late = runner.ticks_late if ticks_late is None else ticks_late
        self._pace = Pace(self.spec.frame_s)

    @property
    def has_work(self) -> bool:
        """Whether a `tick` would do anything."""
        has_new_voice = any(voice.done() for voice in self.voices.awaiting.values())
        is_work = bool(self.output.events or self._in_flight) or has_new_voice or self.scheduler.has_work
        return is_work or bool(self.scheduler.overdue(self._clock_s()))

    @property
    def is_idle(self) -> bool:
        """Whether there is no request at all, not even a paused one or one that waits for text."""
        return not (self._requests or self.has_work)

    @property
    def has_quiet_work(self) -> bool:
        """Whether the engine is idle and has background work: graphs to capture, or word heads to search for."""
        heads = self.found_heads
        return self.is_idle and (self.runner.graphs.to_come > 0 or (heads.wanted and heads.is_sought))

    @property
    def waiting(self) -> int:
        """Requests without a slot: not admitted yet, or between two segments."""
        return self.scheduler.waiting + len(self.voices.awaiting)

    @property
    def spare_s(self) -> float:
        """How long the next tick may be delayed while the device is still busy with the last one, so that requests
        that arrive meanwhile join it."""
        return self._pace.spare_s

    @property
    def prefixes(self) -> PrefixCounts:
        """Counters of the prefix cache, and its size."""
        pages, page_bytes = self.scheduler.pages, self._model.position_bytes * self.config.page_positions
        kept_bytes = pages.cached * page_bytes
        return msgspec.structs.replace(self.scheduler.prefixes, evictions=pages.evictions, kept_bytes=kept_bytes)

    def submit(self, params: SpeechRequest) -> None:
        """Accept a resolved request, `params`; its events carry its id. It is queued once its voice is encoded.
        Raises `InvalidRequest` for what this model cannot speak, `EngineBusy` if too many requests are waiting."""
        assert params.is_resolved, "the caller resolves a request (ModelSpec.resolve)"
        if params.id in self._requests:
            raise InvalidRequest("id", params.id, "a request of that id is still running")
        self._check_room()
        self.found_heads.wanted |= params.with_words
        with self.runner.active():
            request = Request(params, [], None, Playback(self._clock_s()))
            self._prompts.cut_segments(request)
            if params.parallel > 1 and len(request.segments) > 1:
                request.parts = RequestParts(request)
            elif request.words is not None or params.attempts != 1:
                request.retry = Retry(request)
            own = params.references, params.voice_digest, params.speaker_embedding
            if any(own) or params.cast:
                self.voices.ask(request)
            if request not in self.voices.awaiting:
                self.lifecycle.queue(request)
        self._requests[params.id] = request

    def append(self, request_id: str, text: str, said: Sequence[Said] = ()) -> None:
        """Append `text` to a live request, of which is `said` what lexicons say. Text that cannot be spoken fails the
        request; unknown ids are ignored."""
        if request_id in self._requests:
            self.lifecycle.add_text(self._requests[request_id], text, said, is_last=False)

    def end_text(self, request_id: str) -> None:
        """Mark the text of a live request as complete. Does nothing if it already is, or if the id is unknown."""
        request = self._requests.get(request_id)
        if request is not None and request.has_text_to_come:
            self.lifecycle.add_text(request, "", is_last=True)

    def encode_voice(self, references: tuple[Reference, ...]) -> Future[EncodedVoice]:
        """Encode `references` into a voice for the caller to store; it also enters this engine's cache of voices.
        Raises `EngineBusy` if too many requests are waiting, and as `Voices.encode` does; the future fails with
        `InvalidReference`."""
        self._check_room()
        return self.voices.encode(references)

    def cancel(self, request_id: str) -> None:
        """End a request with the reason `cancelled` at the next tick, or with an error if its words cannot be found.
        Unknown ids are ignored."""
        if request_id in self._requests:
            self.lifecycle.cancel(self._requests[request_id])

    def pause(self, request_id: str) -> None:
        """Make no audio of a request until `resume`, and no frames unless another waits for its pages. It keeps its
        slot, and audio already launched still arrives."""
        if request_id in self._requests:
            self._set_paused(request_id, is_paused=True)

    def resume(self, request_id: str) -> None:
        """Continue a paused request. Does nothing for any other."""
        if request_id in self._requests:
            self._set_paused(request_id, is_paused=False)

    def tick(self) -> list[Event]:
        """Plan and launch one tick: admissions, prefills, one decode step of all running requests, codec chunks.
        Returns the events of the tick launched `ticks_late` ticks before, of a large step one more; there may be none.
        If it raises, all requests that hold a slot have failed."""
        self.take_lengths()
        started_s, in_flight = self._clock_s(), self._in_flight
        self._pace.begin(started_s, is_busy=bool(in_flight))
        with self.lifecycle.abandoning(in_flight), self.runner.active():
            self._collect_late(waits=False)
            if self.voices.awaiting:
                self.lifecycle.queue_with_voice()
            for request in self.scheduler.overdue(started_s):
                self.lifecycle.cut_off(request)
            if self.lifecycle.parallel:
                self.lifecycle.queue_parts()
            plan = self.scheduler.plan(started_s, self._pace.tick_s)
            for request, slot in plan.preempted:
                self.lifecycle.begin_anew(request, slot)
            if not plan.is_empty:
                launched = self.runner.run(plan)
                before = len(in_flight[-1].stepped) if in_flight else 0
                self._pace.note_launch(len(launched.stepped), before, was_idle=launched.was_idle)
                in_flight.append(launched)
                self.lifecycle.note_launch(plan, launched)
            self._collect_late(waits=True)
            is_late = len(in_flight) > (0 if plan.is_empty else self._ticks_late)
            if is_late and (plan.is_empty or not self._ticks_late or len(in_flight[0].stepped) <= _LARGE_STEP):
                self._pace.note_wait(0.0)
                self.lifecycle.collect(in_flight.popleft())
        self._pace.end(self._clock_s(), is_launch=not plan.is_empty)
        events, self.output.events = self.output.events, []
        return events

    def take_lengths(self) -> bool:
        """Wait for the older of two large steps in flight and take its lengths; returns whether there was one to take.
        Requests that arrive meanwhile join the next `tick`. An error fails all requests with a slot, as in that."""
        if len(self._in_flight) <= self._ticks_late or self._in_flight[0].has_lengths:
            return False
        started_s = self._clock_s()
        with self.lifecycle.abandoning(self._in_flight), self.runner.active():
            self.lifecycle.take_lengths(self._in_flight[0])
        self._pace.note_wait(self._clock_s() - started_s)
        return True

    def late_audio(self) -> list[Event]:
        """The events so far, with those of late audio that has come. Does not wait for the device; raises as `tick`."""
        with self.lifecycle.abandoning(self._in_flight), self.runner.active():
            self._collect_late(waits=False)
        events, self.output.events = self.output.events, []
        return events

    def _collect_late(self, *, waits: bool) -> None:
        """Collect a tick whose lengths were taken, if its audio has come or this `waits` for it."""
        if self._in_flight and (oldest := self._in_flight[0]).has_lengths and (waits or oldest.entry.is_ready):
            self.lifecycle.collect(self._in_flight.popleft())

    def _set_paused(self, request_id: str, *, is_paused: bool) -> None:
        for one in speaking(self._requests[request_id]):
            one.is_paused = is_paused

    def _check_room(self) -> None:
        if self.scheduler.is_full(len(self.voices.awaiting) + len(self.voices.saving)):
            raise EngineBusy(f"{self.config.tuning.max_queued} requests are waiting for a slot; try again later")
