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
from sonoro.core.types import AudioChunk, Event, Failed, Finished, FinishReason, Reference, SpeechRequest
from sonoro.core.words import Word
from sonoro.engine.found_heads import FoundHeads
from sonoro.engine.phases import Phases
from sonoro.engine.prompts import Prompts
from sonoro.engine.request import Playback, Progress, RunningRequest
from sonoro.engine.runner import Decoded, Launched, Runner
from sonoro.engine.scheduler import Plan, Scheduler
from sonoro.engine.voices import Inline, Voices
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

_SPARE_STEP, _SPARE_MOST, _SPARE_KEPT = 0.01, 0.75, 0.8
"""`spare_s` as shares of a tick: what each tick adds, and the maximum; then the factor after it was too long."""

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
        self._running: dict[str, RunningRequest] = {}
        self._awaiting_voice: dict[RunningRequest, Future[Voice]] = {}
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
        return not (self._running or self.has_work)

    @property
    def has_quiet_work(self) -> bool:
        """Whether the engine is idle and has background work: graphs to capture, or word heads to search for."""
        heads = self._found_heads
        return self.is_idle and (self.runner.to_come > 0 or (heads.wanted and heads.is_sought))

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
        return sum(running.is_paused for running in self._running.values())

    @property
    def prefixes(self) -> PrefixCounts:
        """Counters of the prefix cache, and its size."""
        pages, page_bytes = self.scheduler.pages, self._model.position_bytes * self.config.page_positions
        kept_bytes = pages.cached * page_bytes
        return msgspec.structs.replace(self.scheduler.prefixes, evictions=pages.evictions, kept_bytes=kept_bytes)

    def submit(self, request: SpeechRequest) -> None:
        """Accept a resolved `request`; its events carry its id. It is queued once its voice is encoded.

        Raises `InvalidRequest` for what this model cannot speak, `EngineBusy` if `max_waiting` requests are waiting.
        """
        assert request.is_resolved, "the caller resolves a request (ModelSpec.resolve)"
        if request.id in self._running:
            raise InvalidRequest("id", request.id, "a request of that id is still running")
        self._check_room()
        self._found_heads.wanted |= request.with_words
        with self.runner.active():
            running = RunningRequest(request, [], None, Playback(self._clock_s()))
            self._prompts.cut_segments(running)
            voice = self.voices.of(request)
            if voice is not None:
                # The voice replaces these fields, and lets their audio be freed.
                running.request = msgspec.structs.replace(
                    request, voice=None, voice_digest=None, references=(), speaker_embedding=None
                )
            if voice is not None and not voice.done():
                self._awaiting_voice[running] = voice
            else:
                self._attach_voice(running, voice)
                self._continue(running)
        self._running[request.id] = running

    def append(self, request_id: str, text: str) -> None:
        """Append `text` to a live request. Text that cannot be spoken fails the request; unknown ids are ignored."""
        if request_id in self._running:
            self._take_text(self._running[request_id], text, is_last=False)

    def end_text(self, request_id: str) -> None:
        """Mark the text of a live request as complete. Does nothing if it already is, or if the id is unknown."""
        running = self._running.get(request_id)
        if running is not None and running.has_text_to_come:
            self._take_text(running, "", is_last=True)

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

        Raises `EngineBusy` if `max_waiting` requests are waiting, and as `Voices.encode` does; the future fails with
        `InvalidReference`.
        """
        self._check_room()
        return self.voices.encode(references)

    def cancel(self, request_id: str) -> None:
        """End a request with the reason `cancelled` at the next tick, or with an error if its words cannot be found.
        Unknown ids are ignored."""
        if request_id in self._running:
            running = self._running[request_id]
            with self._border_of_words(running):
                if running.words is not None and not running.holds_back:
                    running.words.stop()
                self._abort(running)
                self._finish(running, "cancelled")

    def pause(self, request_id: str) -> None:
        """Make no audio of a request until `resume`, and no frames unless another waits for its pages. It keeps its
        slot, and audio already launched still arrives."""
        if request_id in self._running:
            self._running[request_id].is_paused = True

    def resume(self, request_id: str) -> None:
        """Continue a paused request. Does nothing for any other."""
        if request_id in self._running:
            self._running[request_id].is_paused = False

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
                for running, slot in plan.preempted:
                    self._begin_anew(running, slot)
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
            raise EngineBusy(
                f"{self.config.max_waiting} requests (max_waiting) are waiting for a slot; try again later"
            )

    def _queue_with_voice(self) -> None:
        """Queue one request whose voice has been encoded. One per tick: cutting a long reference takes milliseconds."""
        running = next((running for running, voice in self._awaiting_voice.items() if voice.done()), None)
        if running is None:
            return
        voice = self._awaiting_voice.pop(running)
        with self._border(running):
            self._attach_voice(running, voice)
            self._continue(running)

    def _attach_voice(self, running: RunningRequest, voice: Future[Voice] | None) -> None:
        """Give `running` its `voice`, which is done. Raises what the encoding raised."""
        if voice is not None:
            try:
                running.voice = voice.result(timeout=0)
            finally:
                self.voices.leave(voice)

    def _note_launch(self, plan: Plan, launched: Launched) -> None:
        """Note that `plan` was launched: adapt `spare_s`, fail requests whose launch raised, cache prompt prefixes."""
        stepped_before = len(self._in_flight[-1].stepped) if self._in_flight else 0
        self._in_flight.append(launched)
        # Capped at a frame: one tick that was held up for long must not delay the next ones.
        tick_s = min(self._tick_s, self.spec.frame_s)
        longer_s = min(self.spare_s + _SPARE_STEP * tick_s, _SPARE_MOST * tick_s)
        self.spare_s = _SPARE_KEPT * self.spare_s if launched.was_idle else longer_s
        if 2 * len(launched.stepped) < stepped_before:
            # The load has fallen: the device will be done much sooner than the average tick.
            self.spare_s = 0.0
        for running, error in launched.failed.items():
            self._fail(running, error)
        self.scheduler.cache_prefixes(running for running in plan.admit if running not in launched.failed)

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
                if item.is_current and not item.running.progress.is_broken_off:
                    attention = None if launched.attention is None else launched.attention[at]
                    with self._border_of_words(item.running):
                        self._apply(item.running, length, attention, is_over=is_done)
            for decoded in launched.decoded:
                for at, item in enumerate(decoded.items):
                    if item.is_current:
                        with self._border_of_words(item.running):
                            self._send(item.running, decoded, at, now_s)
        finally:
            launched.entry.release()
        for running in [running for running in self.scheduler.running if running.is_drained]:
            with self._border_of_words(running):
                self._advance(running)

    def _apply(
        self, running: RunningRequest, length: int, attention: npt.NDArray[np.float32] | None, *, is_over: bool
    ) -> None:
        """Take the `length` of the segment of `running` in frames, and the `attention` [H, W] of the newest.

        `is_over`: the model has ended the segment. A request that is continued after faults is broken off after its
        last good word if the attention shows one.
        """
        progress, words = running.progress, running.words
        if words is not None and attention is not None and length > progress.length:
            words.see(attention, length)
        progress.length, progress.is_done = length, is_over or length >= progress.limit
        # Reaching the caller's own limit is no fault; a runaway is.
        if words is None or not running.is_continued or running.finish_reason == "length" or not running.has_attempts:
            return
        trouble = None if words.clock is None else words.clock.trouble(is_over=is_over)
        if trouble is not None:
            running.break_off(min(int(trouble.at_s / self.spec.frame_s), length), words.break_off(trouble))

    def _send(self, running: RunningRequest, decoded: Decoded, at: int, now_s: float) -> None:
        """Send the audio of batch index `at` of a codec launch, without its padding columns.

        The audio is held back instead while its segment may still be spoken again.
        """
        progress = running.progress
        made = min(decoded.frames, progress.length - progress.decoded - running.held_frames)
        assert made >= 0
        if not made:
            return
        self._count_broken(running, int(decoded.broken[at]))
        pcm = decoded.pcm_of(at, made)
        if running.words is not None:
            running.words.hear(pcm)
        if running.audio_frames + running.held_frames == 0:
            pcm = pcm[2 * self.spec.lead_in :]
        progress.held.append((pcm, made))
        if running.words is not None and running.live is None and running.is_drained:
            running.words.end()
        if running.keeps_frames:
            progress.made.append(decoded.frames_of(at, made))
        if not running.holds_back:
            self._emit_held(running, now_s)

    def _count_broken(self, running: RunningRequest, samples: int) -> None:
        """Count non-finite `samples`; warn of the first, and again each time the total has doubled."""
        total = self.broken_samples + samples
        if total.bit_length() > self.broken_samples.bit_length():
            logger.warning(
                "event=samples_not_finite request=%s samples=%d total=%d", running.request.id, samples, total
            )
        self.broken_samples = total

    def _emit_held(self, running: RunningRequest, now_s: float) -> None:
        """Emit the held chunks as `AudioChunk` events."""
        for pcm, frames in running.progress.held:
            index = running.playback.chunks
            running.count_sent(frames, now_s, len(pcm) / 2 / self.spec.sample_rate)
            characters = running.characters(self.spec.frame_s)
            until_s = running.audio_frames * self.spec.frame_s - self.spec.lead_in_s
            words = self._words(running, until_s)
            self._events.append(
                AudioChunk(request_id=running.request.id, index=index, pcm=pcm, characters=characters, words=words)
            )
        running.progress.held = []

    def _advance(self, running: RunningRequest) -> None:
        """Release the slot of a drained segment and queue the next segment or attempt, or finish the request."""
        if running.live is not None:
            running.live.close(running.index)
        if running.live is not None or running.progress.is_broken_off:
            # The device may still count the slot as running: it does not know a tightened limit or a broken-off end.
            self._abort(running)
        if running.words is not None:
            # `_send` has not ended the words of a live segment, of one broken off, or of one without a new frame.
            running.words.end()
        is_again = running.may_try_again
        running.note_fault(spoken_again=is_again)
        if not is_again:
            self._emit_held(running, self._clock_s())
        reason = running.finish_reason
        if reason is not None and not is_again:
            self._finish(running, reason)
            return
        frames = self.runner.join(running.progress.made)
        self.scheduler.release(running)
        with self._border(running):
            if is_again:
                # Inside the border: it splits sentences again, which may raise.
                running.try_again()
            else:
                running.next_segment(frames)
            self._continue(running)

    def _begin_anew(self, running: RunningRequest, slot: int) -> None:
        """Queue the segment of `running` again after it was preempted from `slot`; none of its audio was sent."""
        running.progress = Progress()
        self.preemptions += 1
        with self._border(running):
            self.runner.reset([slot])
            self._continue(running)

    def _take_text(self, running: RunningRequest, text: str, *, is_last: bool) -> None:
        """Add `text` to live request `running`, or end its text if `is_last`. An error fails the request."""
        with self._border(running):
            if running.live is None:
                raise InvalidRequest("text", text, "only a live request takes more text")
            running.live.append(text)
            if running.words is not None:
                running.words.append(text)
            if is_last:
                running.live.end()
            if running not in self._awaiting_voice:
                with self.runner.active():
                    self._continue(running)

    def _continue(self, running: RunningRequest) -> None:
        """Queue the next segment of `running`, park it if the text has not come, or finish it if none is left.

        Raises `InvalidRequest` if nothing in the text can be spoken.
        """
        if running.live is not None:
            running.live.advance(running.index)
        segment = running.segment
        if segment is None and running.has_text_to_come:
            self.scheduler.park(running)
        elif segment is None and running.segments:
            self._finish(running, "stop")
        elif segment is None:
            raise InvalidRequest("text", f"{running.text_length} characters", "nothing in it can be spoken")
        elif running.progress.prompt is None:
            self._prompts.prepare(running, segment)
            self.scheduler.add(running)
        else:
            self._prompts.extend_live(running, segment)

    def _finish(self, running: RunningRequest, reason: FinishReason) -> None:
        self._forget(running)
        timings = running.timings(self._clock_s())
        characters = running.text_length if reason == "stop" else running.characters(self.spec.frame_s)
        self._events.append(
            Finished(
                request_id=running.request.id,
                reason=reason,
                frames=running.audio_frames,
                characters=characters,
                timings=timings,
                words=self._words(running),
                faults=() if running.words is None else tuple(running.words.faults),
            )
        )

    def _words(self, running: RunningRequest, until_s: float | None = None) -> tuple[Word, ...] | None:
        """The words to report next, up to `until_s`; None if the request does not ask for words."""
        is_told = running.request.with_words and running.words is not None
        return running.words.take(until_s) if is_told and running.words is not None else None

    def _border_of_words(self, running: RunningRequest) -> AbstractContextManager[None]:
        """The `_border` of a request whose words are followed, as mapping its text may raise; else nothing."""
        return _OPEN if running.words is None else self._border(running)

    def _border(self, running: RunningRequest) -> AbstractContextManager[None]:
        """A context in which an exception fails `running` alone."""
        return border(partial(self._fail, running))

    def _fail(self, running: RunningRequest, error: Exception) -> None:
        self._abort(running)
        self._forget(running)
        self._events.append(Failed.of(running.request.id, error))

    def _abort(self, running: RunningRequest) -> None:
        """Reset the slot of a request that ends before the device has set its done flag."""
        if running.allocation is not None:
            self.runner.reset([running.allocation.slot])

    def _forget(self, running: RunningRequest) -> None:
        voice = self._awaiting_voice.pop(running, None)
        if voice is None:
            self.scheduler.release(running)
        else:
            self.voices.leave(voice)
        del self._running[running.request.id]

    def _abandon(self, cause: BaseException | None) -> None:
        """Fail every request that holds a slot: their device state is unknown after a tick that raised."""
        error = EngineError(f"the engine's tick was broken off by {type(cause).__name__}: {cause}")
        self.scheduler.pages.clear_cache()
        while self._in_flight:
            self._in_flight.popleft().entry.release()
        for running in list(self.scheduler.running):
            self._fail(running, error)
