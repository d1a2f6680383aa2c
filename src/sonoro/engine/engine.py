"""Continuous batching of any `SpeechModel`: requests in, events out, one decode step of all running requests per tick.

The host runs one tick behind: it launches tick k before it reads the results of tick k-1, so the device never waits for
it. Depends on the protocols of `models.base` and on no model. Not thread-safe.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineBusy, EngineError, InvalidRequest, border
from sonoro.core.events import Word
from sonoro.core.types import AudioChunk, Event, Failed, Finished, FinishReason, Reference, SpeechRequest
from sonoro.engine.phases import Phases
from sonoro.engine.prompts import Prompts
from sonoro.engine.request import Playback, Progress, Request
from sonoro.engine.retry import Retry
from sonoro.engine.runner import Decoded, Launched, Runner
from sonoro.engine.scheduler import Plan, Scheduler
from sonoro.engine.voices import Inline, Voices
from sonoro.engine.word_heads import FoundHeads
from sonoro.models.base import SpeechModel, Voice
from sonoro.models.settings import configure
from sonoro.models.words import ShowsWords
from sonoro.runtime.slots import PagePool
from sonoro.transport.encoded_voice import EncodedVoice
from sonoro.transport.messages import PrefixCounts
from sonoro.words.heads import WordHeads

logger = logging.getLogger(__name__)

_TICK_WEIGHT = 0.2
"""Weight of the newest tick in the moving average of tick durations."""

_SPARE_GROWTH, _MAX_SPARE, _SPARE_DECAY = 0.01, 0.75, 0.8
"""`spare_s` grows by the first share of a tick, up to the second. The third multiplies it if the device was idle."""

_OPEN = nullcontext()


class Engine:
    """Serves a model: `submit` requests, then call `tick` while it `has_work`. Ready once constructed.

    `executor` encodes reference audio and must run one job at a time; the default runs it in the caller's thread,
    within `submit`. `phases` receives the durations of the start. `runner`, `scheduler` and `voices` are read-only to
    the caller. Raises `ConfigError` naming the field if the model does not fit the device under `config`.
    """

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
        self._found_heads = FoundHeads(model, config)
        self.runner = Runner(model, config, phases)
        pages = PagePool(self.runner.pages, self.runner.cached_pages)
        self.scheduler = Scheduler(self.runner.config, pages, self.spec.frame_s)
        self._prompts = Prompts(model, config, self.runner.pages)
        self.voices = Voices(model, config, executor or Inline(), self.runner.codec_device, self.runner.streams)
        self._requests: dict[str, Request] = {}
        self._awaiting_voice: dict[Request, Future[Voice]] = {}
        self._events: list[Event] = []
        self._in_flight: deque[Launched] = deque()
        self.broken_samples = 0
        """Non-finite samples so far; they are sent as silence."""
        self.preemptions = 0
        """Preemptions so far: requests that lost their slot for want of pages, before any audio was sent."""
        self._ticks_late = self.runner.ticks_late if ticks_late is None else ticks_late
        # Before the first measurement, assume that a tick is twice as fast as playback.
        self._tick_s, self._is_measured = self.spec.frame_s / 2, False
        self._ended_at_s = 0.0
        self.spare_s = 0.0
        """How long the next tick may be delayed while the device is still busy with the last one, so that requests
        that arrive meanwhile join it. Grows until the device was found idle, then shrinks; begins anew when the batch
        has more than halved. 0 if results are not late.
        """

    @property
    def has_work(self) -> bool:
        """Whether a `tick` would do anything."""
        has_new_voice = any(voice.done() for voice in self._awaiting_voice.values())
        return bool(self._events or self._in_flight) or has_new_voice or self.scheduler.has_work

    @property
    def is_idle(self) -> bool:
        """Whether there is no request at all, not even a paused one or one that waits for text."""
        return not (self._requests or self.has_work)

    @property
    def has_quiet_work(self) -> bool:
        """Whether the engine is idle and has background work: graphs to capture, or word heads to search for."""
        heads = self._found_heads
        return self.is_idle and (self.runner.graphs.to_come > 0 or (heads.wanted and heads.is_sought))

    @property
    def has_words(self) -> bool:
        """Whether the model gives word times."""
        return isinstance(self._model, ShowsWords) and bool(self._model.word_heads.places)

    @property
    def finds_faults(self) -> bool:
        """Whether the model's attention says what was not spoken as written."""
        return isinstance(self._model, ShowsWords) and self._model.word_heads.have_limits

    @property
    def is_encoding(self) -> bool:
        """Whether requests wait for their voices: work may then become due without a call to `submit`."""
        return bool(self._awaiting_voice)

    @property
    def waiting(self) -> int:
        """Requests without a slot: not admitted yet, or between two segments."""
        return self.scheduler.waiting + len(self._awaiting_voice)

    @property
    def paused(self) -> int:
        """Requests that are paused, with a slot or without."""
        return sum(request.is_paused for request in self._requests.values())

    @property
    def prefixes(self) -> PrefixCounts:
        """Counters of the prefix cache, and its size."""
        pages, page_bytes = self.scheduler.pages, self._model.position_bytes * self.config.page_positions
        kept_bytes = pages.cached * page_bytes
        return msgspec.structs.replace(self.scheduler.prefixes, evictions=pages.evictions, kept_bytes=kept_bytes)

    def submit(self, params: SpeechRequest) -> None:
        """Accept a resolved request, `params`; its events carry its id. It is queued once its voice is encoded.

        Raises `InvalidRequest` for what this model cannot speak, `EngineBusy` if too many requests are waiting.
        """
        assert params.is_resolved, "the caller resolves a request (ModelSpec.resolve)"
        if params.id in self._requests:
            raise InvalidRequest("id", params.id, "a request of that id is still running")
        self._check_room()
        self._found_heads.wanted |= params.with_words
        with self.runner.active():
            request = Request(params, [], None, Playback(self._clock_s()))
            self._prompts.cut_segments(request)
            if request.words is not None or params.attempts != 1:
                request.retry = Retry(request)
            voice = self.voices.of(params)
            if voice is not None:
                # The voice replaces these fields, and lets their audio be freed.
                request.params = msgspec.structs.replace(
                    params, voice=None, voice_digest=None, references=(), speaker_embedding=None
                )
            if voice is not None and not voice.done():
                self._awaiting_voice[request] = voice
            else:
                self._attach_voice(request, voice)
                self._continue(request)
        self._requests[params.id] = request

    def append(self, request_id: str, text: str) -> None:
        """Append `text` to a live request. Text that cannot be spoken fails the request; unknown ids are ignored."""
        if request_id in self._requests:
            self._take_text(self._requests[request_id], text, is_last=False)

    def end_text(self, request_id: str) -> None:
        """Mark the text of a live request as complete. Does nothing if it already is, or if the id is unknown."""
        request = self._requests.get(request_id)
        if request is not None and request.has_text_to_come:
            self._take_text(request, "", is_last=True)

    def find_heads(self) -> None:
        """Run one step of the search for attention heads that follow the text, about as long as an eager frame.

        The last step recaptures the frame graphs with those heads watched. Call it while the engine `has_quiet_work`
        and no graph is left to capture.
        """
        with self.runner.active():
            found = self._found_heads.search(self.runner.codec_device)
        if found is None or not found.places:
            return
        model = self._model
        assert isinstance(model, ShowsWords)

        def lose(error: Exception) -> None:
            logger.warning("event=word_heads_not_watched error=%r", error)
            model.word_heads = WordHeads()

        model.word_heads = found
        with border(lose):
            self.runner.watch()

    def encode_voice(self, references: tuple[Reference, ...]) -> Future[EncodedVoice]:
        """Encode `references` into a voice for the caller to store; it also enters this engine's cache of voices.

        Raises `EngineBusy` if too many requests are waiting, and as `Voices.encode` does; the future fails with
        `InvalidReference`.
        """
        self._check_room()
        return self.voices.encode(references)

    def cancel(self, request_id: str) -> None:
        """End a request with the reason `cancelled` at the next tick, or with an error if its words cannot be found.
        Unknown ids are ignored."""
        if request_id in self._requests:
            request = self._requests[request_id]
            with self._border_of_words(request):
                if request.words is not None and (request.retry is None or not request.retry.holds_back):
                    request.words.stop()
                self._abort(request)
                self._finish(request, "cancelled")

    def pause(self, request_id: str) -> None:
        """Make no audio of a request until `resume`, and no frames unless another waits for its pages. It keeps its
        slot, and audio already launched still arrives."""
        if request_id in self._requests:
            self._requests[request_id].is_paused = True

    def resume(self, request_id: str) -> None:
        """Continue a paused request. Does nothing for any other."""
        if request_id in self._requests:
            self._requests[request_id].is_paused = False

    def tick(self) -> list[Event]:
        """Plan and launch one tick: admissions, prefills, one decode step of all running requests, codec chunks.

        Returns the events of the tick launched `ticks_late` ticks before; there may be none. If it raises, all requests
        that hold a slot have failed.
        """
        started_s, is_collected, is_broken = self._clock_s(), False, True
        # A wait of up to `spare_s` since the last tick is hidden behind the device and counts as part of this one.
        began_s = max(self._ended_at_s, started_s - self.spare_s) if self._in_flight else started_s
        try:
            with self.runner.active():
                self._queue_with_voice()
                plan = self.scheduler.plan(started_s, self._tick_s)
                for request, slot in plan.preempted:
                    self._begin_anew(request, slot)
                if not plan.is_empty:
                    self._note_launch(plan, self.runner.run(plan))
                if len(self._in_flight) > (0 if plan.is_empty else self._ticks_late):
                    self._collect(self._in_flight.popleft())
                    is_collected = True
            is_broken = False
        finally:
            if is_broken:
                self._abandon(sys.exception())
        self._ended_at_s = self._clock_s()
        # A tick that only launches, or only collects, is shorter than the device's time for one.
        if is_collected and not plan.is_empty:
            self._measure(self._ended_at_s - began_s)
        events, self._events = self._events, []
        return events

    def _check_room(self) -> None:
        if self.scheduler.is_full(len(self._awaiting_voice) + self.voices.saving):
            raise EngineBusy(f"{self.config.tuning.max_queued} requests are waiting for a slot; try again later")

    def _queue_with_voice(self) -> None:
        """Queue one request whose voice has been encoded. One per tick: cutting a long reference takes milliseconds."""
        request = next((request for request, voice in self._awaiting_voice.items() if voice.done()), None)
        if request is None:
            return
        voice = self._awaiting_voice.pop(request)
        with self._border(request):
            self._attach_voice(request, voice)
            self._continue(request)

    def _attach_voice(self, request: Request, voice: Future[Voice] | None) -> None:
        """Give `request` its `voice`, which is done. Raises what the encoding raised."""
        if voice is not None:
            try:
                request.voice = voice.result(timeout=0)
            finally:
                self.voices.leave(voice)

    def _note_launch(self, plan: Plan, launched: Launched) -> None:
        """Note that `plan` was launched: adapt `spare_s`, fail requests whose launch raised, cache prompt prefixes."""
        stepped_before = len(self._in_flight[-1].stepped) if self._in_flight else 0
        self._in_flight.append(launched)
        # Capped at a frame: one tick that was held up for long must not delay the next ones.
        tick_s = min(self._tick_s, self.spec.frame_s)
        longer_s = min(self.spare_s + _SPARE_GROWTH * tick_s, _MAX_SPARE * tick_s)
        self.spare_s = _SPARE_DECAY * self.spare_s if launched.was_idle else longer_s
        if 2 * len(launched.stepped) < stepped_before:
            # The load has fallen: the device will be done much sooner than the average tick.
            self.spare_s = 0.0
        for request, error in launched.failed.items():
            self._fail(request, error)
        self.scheduler.cache_prefixes(request for request in plan.admit if request not in launched.failed)

    def _measure(self, tick_s: float) -> None:
        self._tick_s += (_TICK_WEIGHT if self._is_measured else 1.0) * (tick_s - self._tick_s)
        self._is_measured = True

    def _collect(self, launched: Launched) -> None:
        """Wait for a tick's results, apply lengths and audio, then advance the requests whose segment is drained."""
        try:
            launched.entry.wait()
            now_s = self._clock_s()
            # Plain Python numbers: reading numpy scalars one by one takes three times as long.
            lengths, done = launched.length.tolist(), launched.done.tolist()
            for at, (item, length, is_done) in enumerate(zip(launched.stepped, lengths, done, strict=True)):
                if item.is_current and not item.request.progress.is_broken_off:
                    attention = None if launched.attention is None else launched.attention[at]
                    with self._border_of_words(item.request):
                        self._apply(item.request, length, attention, is_over=is_done)
            for decoded in launched.decoded:
                for at, item in enumerate(decoded.items):
                    if item.is_current:
                        with self._border_of_words(item.request):
                            self._send(item.request, decoded, at, now_s)
        finally:
            launched.entry.release()
        for request in [request for request in self.scheduler.running if request.progress.is_drained]:
            with self._border_of_words(request):
                self._advance(request)

    def _apply(
        self, request: Request, length: int, attention: npt.NDArray[np.float32] | None, *, is_over: bool
    ) -> None:
        """Take the `length` of the segment of `request` in frames, and the `attention` [H, W] of the newest.

        `is_over`: the model has ended the segment.
        """
        progress = request.progress
        if request.words is not None and attention is not None and length > progress.length:
            request.words.see(attention, length)
        progress.length, progress.is_done = length, is_over or length >= progress.limit
        if request.retry is not None:
            request.retry.watch(self.spec.frame_s, is_over=is_over)

    def _send(self, request: Request, decoded: Decoded, at: int, now_s: float) -> None:
        """Send the audio of batch index `at` of a codec launch, without its padding columns.

        The audio is held back instead while its segment may still be spoken again.
        """
        progress = request.progress
        made = min(decoded.frames, progress.length - progress.decoded - progress.held_frames)
        assert made >= 0
        if not made:
            return
        self._count_broken(request, int(decoded.broken[at]))
        pcm = decoded.pcm_of(at, made)
        if request.words is not None:
            request.words.hear(pcm)
        if request.audio_frames + progress.held_frames == 0:
            pcm = pcm[2 * self.spec.lead_in :]
        progress.held.append((pcm, made))
        if request.words is not None and request.live is None and request.progress.is_drained:
            request.words.end()
        if request.keeps_frames:
            progress.frames.append(decoded.frames_of(at, made))
        if request.retry is None or not request.retry.holds_back:
            self._emit_held(request, now_s)

    def _count_broken(self, request: Request, samples: int) -> None:
        """Count non-finite `samples`; warn of the first, and again each time the total has doubled."""
        total = self.broken_samples + samples
        if total.bit_length() > self.broken_samples.bit_length():
            logger.warning("event=samples_not_finite request=%s samples=%d total=%d", request.params.id, samples, total)
        self.broken_samples = total

    def _emit_held(self, request: Request, now_s: float) -> None:
        """Emit the held chunks as `AudioChunk` events."""
        for pcm, frames in request.progress.held:
            index = request.playback.chunks
            request.count_sent(frames, now_s, len(pcm) / 2 / self.spec.sample_rate)
            characters = request.characters(self.spec.frame_s)
            until_s = request.audio_frames * self.spec.frame_s - self.spec.lead_in_s
            words = self._words(request, until_s)
            self._events.append(
                AudioChunk(request_id=request.params.id, index=index, pcm=pcm, characters=characters, words=words)
            )
        request.progress.held = []

    def _advance(self, request: Request) -> None:
        """Release the slot of a drained segment and queue the next segment or attempt, or finish the request."""
        if request.live is not None:
            request.live.close(request.index)
        if request.live is not None or request.progress.is_broken_off:
            # The device may still count the slot as running: it does not know a tightened limit or a broken-off end.
            self._abort(request)
        if request.words is not None:
            # `_send` has not ended the words of a live segment, of one broken off, or of one without a new frame.
            request.words.end()
        is_again = request.retry is not None and request.retry.settle()
        if not is_again:
            self._emit_held(request, self._clock_s())
            if (reason := request.finish_reason) is not None:
                self._finish(request, reason)
                return
        frames = self.runner.join(request.progress.frames)
        self.scheduler.release(request)
        with self._border(request):
            if is_again:
                request.progress = Progress()
            else:
                request.next_segment(frames)
            self._continue(request)

    def _begin_anew(self, request: Request, slot: int) -> None:
        """Queue the segment of `request` again after it was preempted from `slot`; none of its audio was sent."""
        request.progress = Progress()
        self.preemptions += 1
        with self._border(request):
            self.runner.reset([slot])
            self._continue(request)

    def _take_text(self, request: Request, text: str, *, is_last: bool) -> None:
        """Add `text` to live request `request`, or end its text if `is_last`. An error fails the request."""
        with self._border(request):
            if request.live is None:
                raise InvalidRequest("text", text, "only a live request takes more text")
            request.live.append(text)
            if request.words is not None:
                request.words.append(text)
            if is_last:
                request.live.end()
            if request not in self._awaiting_voice:
                with self.runner.active():
                    self._continue(request)

    def _continue(self, request: Request) -> None:
        """Queue the next segment of `request`, park it if the text has not come, or finish it if none is left.

        Raises `InvalidRequest` if nothing in the text can be spoken.
        """
        if request.live is not None:
            request.live.advance(request.index)
        segment = request.segment
        if segment is None and request.has_text_to_come:
            self.scheduler.park(request)
        elif segment is None and request.segments:
            self._finish(request, "stop")
        elif segment is None:
            raise InvalidRequest("text", f"{request.text_length} characters", "nothing in it can be spoken")
        elif request.progress.prompt is None:
            self._prompts.prepare(request, segment)
            self.scheduler.add(request)
        else:
            self._prompts.extend_live(request, segment)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._forget(request)
        timings = request.playback.timings(self._clock_s())
        characters = request.text_length if reason == "stop" else request.characters(self.spec.frame_s)
        self._events.append(
            Finished(
                request_id=request.params.id,
                reason=reason,
                frames=request.audio_frames,
                characters=characters,
                timings=timings,
                words=self._words(request),
                faults=() if request.words is None else tuple(request.words.faults),
            )
        )

    def _words(self, request: Request, until_s: float | None = None) -> tuple[Word, ...] | None:
        """The words to report next, up to `until_s`; None if the request does not ask for words."""
        is_told = request.params.with_words and request.words is not None
        return request.words.take(until_s) if is_told and request.words is not None else None

    def _border_of_words(self, request: Request) -> AbstractContextManager[None]:
        """The `_border` of a request whose words are followed, as mapping its text may raise; else nothing."""
        return _OPEN if request.words is None else self._border(request)

    def _border(self, request: Request) -> AbstractContextManager[None]:
        """A context in which an exception fails `request` alone."""
        return border(partial(self._fail, request))

    def _fail(self, request: Request, error: Exception) -> None:
        self._abort(request)
        self._forget(request)
        self._events.append(Failed.of(request.params.id, error))

    def _abort(self, request: Request) -> None:
        """Reset the slot of a request that ends before the device has set its done flag."""
        if request.allocation is not None:
            self.runner.reset([request.allocation.slot])

    def _forget(self, request: Request) -> None:
        voice = self._awaiting_voice.pop(request, None)
        if voice is None:
            self.scheduler.release(request)
        else:
            self.voices.leave(voice)
        del self._requests[request.params.id]

    def _abandon(self, cause: BaseException | None) -> None:
        """Fail every request that holds a slot: their device state is unknown after a tick that raised."""
        error = EngineError(f"the engine's tick was broken off by {type(cause).__name__}: {cause}")
        self.scheduler.pages.clear_cache()
        while self._in_flight:
            self._in_flight.popleft().entry.release()
        for request in list(self.scheduler.running):
            self._fail(request, error)
