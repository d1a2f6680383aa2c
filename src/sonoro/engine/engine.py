"""Requests in, events out: continuous batching of any `SpeechModel`, one frame of every running request per tick.

The host is one tick late: a tick is planned and launched before the results of the one before are read, so the device
never waits for the host. Knows the protocols of `models.base` and no model. Not thread-safe: its owner calls it from
one thread at a time.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from functools import partial

import msgspec

from sonoro.core.config import EngineConfig
from sonoro.core.encoded_voice import EncodedVoice
from sonoro.core.errors import EngineBusy, EngineError, InvalidRequest, border
from sonoro.core.phases import Phases
from sonoro.core.types import AudioChunk, Event, Failed, Finished, FinishReason, Reference, SpeechRequest
from sonoro.core.words import Word
from sonoro.engine.found_heads import FoundHeads
from sonoro.engine.prompts import Prompts
from sonoro.engine.request import Playback, Progress, RunningRequest
from sonoro.engine.runner import Decoded, Launched, Runner
from sonoro.engine.scheduler import Plan, Scheduler
from sonoro.engine.voices import Inline, Voices
from sonoro.models.base import SpeechModel, Voice
from sonoro.models.settings import configure
from sonoro.models.words import ShowsWords
from sonoro.runtime.slots import PagePool
from sonoro.transport.messages import PrefixCounts
from sonoro.words.heads import WordHeads

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

_TICK_WEIGHT = 0.2
"""How much the newest tick counts in the average of what a tick takes."""

_SPARE_STEP, _SPARE_MOST, _SPARE_KEPT = 0.01, 0.75, 0.8
"""By how much of a tick `spare_s` grows, up to how much of it, and how much of it is kept when it was too long."""


class Engine:
    """A model and its slots, ready once constructed. `submit` requests, then call `tick` while there `has_work`.

    Reference audio is encoded wherever `executor` runs what it is given, one thing at a time: by default in the
    caller's thread, and then within `submit`. `runner`, `scheduler` and `voices` may be asked about themselves.
    What the start takes is noted in `phases`.
    Raises `ConfigError` naming the field if the model does not fit the device as `config` asks.
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
        """Samples that were not finite, and were sent as silence."""
        self.put_back = 0
        """Times that a request was put back for want of pages, before anybody heard it."""
        self._ticks_late = self.runner.ticks_late if ticks_late is None else ticks_late
        # Until one has been measured, a tick is thought to keep up with playback, but not by much.
        self._tick_s, self._is_measured = self.spec.frame_s / 2, False
        self._ended_at_s = 0.0
        self.spare_s = 0.0
        """How long after a tick the next may begin, as the device has enough to do until then: whoever asks by then is
        heard a tick sooner. Found by trying: it grows until the device was idle once. 0 where results are not late."""

    @property
    def has_work(self) -> bool:
        """Whether a `tick` would do anything."""
        has_new_voice = any(voice.done() for voice in self._awaiting_voice.values())
        return bool(self._events or self._in_flight) or has_new_voice or self.scheduler.has_work

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything, not even for a request that is paused or lacks text."""
        return not (self._running or self.has_work)

    @property
    def has_quiet_work(self) -> bool:
        """Whether there is something to do while nobody waits for anything: graphs to capture, or heads to find."""
        heads = self._found_heads
        return self.is_idle and (self.runner.to_come > 0 or (heads.wanted and heads.is_sought))

    @property
    def has_words(self) -> bool:
        """Whether the model shows when its words are spoken."""
        return isinstance(self._model, ShowsWords) and bool(self._model.word_heads.places)

    @property
    def is_encoding(self) -> bool:
        """Whether requests wait for their voices: then there may be work soon, though nobody sends anything."""
        return bool(self._awaiting_voice)

    @property
    def waiting(self) -> int:
        """Requests that hold no slot yet, or none between two segments."""
        return self.scheduler.waiting + len(self._awaiting_voice)

    @property
    def fingerprint(self) -> str:
        """Whose encoded voices this engine can load."""
        return self._model.fingerprint

    @property
    def prefixes(self) -> PrefixCounts:
        """Counters of the prefix cache, and its size."""
        pages, page_bytes = self.scheduler.pages, self._model.position_bytes * self.config.page_positions
        kept_bytes = pages.cached * page_bytes
        return msgspec.structs.replace(self.scheduler.prefixes, evictions=pages.evictions, kept_bytes=kept_bytes)

    def submit(self, request: SpeechRequest) -> None:
        """Accept resolved `request`; its events carry its id. One whose voice must be encoded waits outside the queue.

        Raises `InvalidRequest` for what this model cannot speak, `EngineBusy` while too many are waiting.
        """
        assert request.is_resolved, "whoever takes a request in resolves it (ModelSpec.resolve)"
        if request.id in self._running:
            raise InvalidRequest("id", request.id, "a request of that id is still running")
        self._check_room()
        self._found_heads.wanted |= request.with_words
        with self.runner.active():
            running = RunningRequest(request, [], None, Playback(self._clock_s()))
            self._prompts.cut_segments(running)
            voice = self.voices.of(request)
            if voice is not None:
                # From here on the voice stands for them.
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
        """More text for a live request; one that has ended stays so. What cannot be spoken fails it."""
        if request_id in self._running:
            self._take_text(self._running[request_id], text, is_last=False)

    def end_text(self, request_id: str) -> None:
        """A live request has all of its text now; one that has ended, or knows that, stays as it is."""
        running = self._running.get(request_id)
        if running is not None and running.has_text_to_come:
            self._take_text(running, "", is_last=True)

    def find_heads(self) -> None:
        """A step of the search for heads that point at the text, about as long as a frame without a graph; the last one
        has frames captured that watch them. To be called while there `has_quiet_work` and no graph is to come."""
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
        """Encode `references` for others to keep; it stays at hand for requests that name its digest or are the same.

        Raises `EngineBusy` while too many are waiting, and as `Voices.encode` does; the future fails with
        `InvalidReference`.
        """
        self._check_room()
        return self.voices.encode(references)

    def cancel(self, request_id: str) -> None:
        """End a request with the reason `cancelled` at the next tick; one that has ended already stays as it is."""
        if request_id in self._running:
            running = self._running[request_id]
            if running.words is not None and not running.holds_back:
                running.words.stop()
            self._abort(running)
            self._finish(running, "cancelled")

    def pause(self, request_id: str) -> None:
        """Make no more of a request until `resume`; it keeps its slot. What was launched for it still comes."""
        if request_id in self._running:
            self._running[request_id].is_paused = True

    def resume(self, request_id: str) -> None:
        """Go on with a request that was paused; any other stays as it is."""
        if request_id in self._running:
            self._running[request_id].is_paused = False

    def tick(self) -> list[Event]:
        """One frame for every running request, with the prefills and the decoding that are due.

        Returns what came of the tick `ticks_late` before, so a tick may return nothing. One that raises fails all
        requests that hold a slot.
        """
        started_s, is_collected, is_broken = self._clock_s(), False, True
        # While nobody needs the next tick the device goes on with the one before; for longer it waits for the caller.
        began_s = max(self._ended_at_s, started_s - self.spare_s) if self._in_flight else started_s
        try:
            with self.runner.active():
                self._queue_with_voice()
                plan = self.scheduler.plan(started_s, self._tick_s)
                for running, slot in plan.put_back:
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
        # Others are shorter than what the device takes: they launch without waiting, or wait without launching.
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
        """Queue a request whose voice is encoded by now. One a tick: cutting a long reference takes milliseconds."""
        running = next((running for running, voice in self._awaiting_voice.items() if voice.done()), None)
        if running is None:
            return
        voice = self._awaiting_voice.pop(running)
        with self._border(running):
            self._attach_voice(running, voice)
            self._continue(running)

    def _attach_voice(self, running: RunningRequest, voice: Future[Voice] | None) -> None:
        """Give `running` the voice that is there now. Raises what its encoding raised."""
        if voice is not None:
            try:
                running.voice = voice.result(timeout=0)
            finally:
                self.voices.leave(voice)

    def _note_launch(self, plan: Plan, launched: Launched) -> None:
        """`plan` was launched; requests whose launch raised fail here."""
        self._in_flight.append(launched)
        # After a tick that was held up for long, the next are not.
        tick_s = min(self._tick_s, self.spec.frame_s)
        longer_s = min(self.spare_s + _SPARE_STEP * tick_s, _SPARE_MOST * tick_s)
        self.spare_s = _SPARE_KEPT * self.spare_s if launched.was_idle else longer_s
        for running, error in launched.failed.items():
            self._fail(running, error)
        self.scheduler.cache_prefixes(running for running in plan.admit if running not in launched.failed)

    def _measure(self, tick_s: float) -> None:
        self._tick_s += (_TICK_WEIGHT if self._is_measured else 1.0) * (tick_s - self._tick_s)
        self._is_measured = True

    def _collect(self, launched: Launched) -> None:
        """Read the results of a tick, lengths and audio, then advance the requests whose segment is drained."""
        try:
            launched.entry.wait()
            now_s = self._clock_s()
            # As Python's own numbers: numpy's take three times as long to look at.
            lengths, done = launched.length.tolist(), launched.done.tolist()
            for at, (item, length, is_done) in enumerate(zip(launched.stepped, lengths, done, strict=True)):
                progress, words = item.running.progress, item.running.words
                if item.is_current and not progress.is_broken_off:
                    if words is not None and launched.attention is not None and length > progress.length:
                        words.see(launched.attention[at], length)
                    progress.length, progress.is_done = length, is_done or length >= progress.limit
                    # A caller's own limit is no fault; a runaway is.
                    if item.running.is_continued and item.running.finish_reason != "length":
                        self._break_off_if_wrong(item.running, is_over=is_done)
            for decoded in launched.decoded:
                for at, item in enumerate(decoded.items):
                    if item.is_current:
                        self._send(item.running, decoded, at, now_s)
        finally:
            launched.entry.release()
        for running in [running for running in self.scheduler.running if running.is_drained]:
            self._advance(running)

    def _break_off_if_wrong(self, running: RunningRequest, *, is_over: bool) -> None:
        """End the segment of `running` after its last good word if it has gone wrong. It `is_over` if it has ended."""
        clock = None if running.words is None else running.words.clock
        trouble = None if clock is None or not running.has_attempts else clock.trouble(is_over=is_over)
        if trouble is not None and running.words is not None:
            frames = min(int(trouble.at_s / self.spec.frame_s), running.progress.length)
            running.break_off(frames, running.words.break_off(trouble))

    def _send(self, running: RunningRequest, decoded: Decoded, at: int, now_s: float) -> None:
        """Send the audio of batch index `at` of a launch, less the columns that turned out not to be frames.

        Where the segment may be spoken again it is held back.
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
        """Count `samples` that were not finite. It warns of the first, and then whenever there are twice as many."""
        total = self.broken_samples + samples
        if total.bit_length() > self.broken_samples.bit_length():
            logger.warning(
                "event=samples_not_finite request=%s samples=%d total=%d", running.request.id, samples, total
            )
        self.broken_samples = total

    def _emit_held(self, running: RunningRequest, now_s: float) -> None:
        """Send what is held back."""
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
        """Take a drained segment out of its slot: on to the next segment, or to the end."""
        if running.live is not None:
            running.live.close(running.index)
        if running.live is not None or running.progress.is_broken_off:
            # The device does not know of a limit that was tightened, nor of an end that is not its own.
            self._abort(running)
        if running.words is not None:
            # One that was ended in mid-sound, or made no frame that was not heard yet.
            running.words.end()
        reason, is_again = running.finish_reason, running.may_try_again
        if running.words is not None and running.is_faulty:
            running.words.note_fault(running.attempt, spoken_again=is_again)
        if not is_again:
            self._emit_held(running, self._clock_s())
        if reason is not None and not is_again:
            self._finish(running, reason)
            return
        frames = self.runner.join(running.progress.made)
        self.scheduler.release(running)
        with self._border(running):
            if is_again:
                # Which looks for sentences again.
                running.try_again()
            else:
                running.next_segment(frames)
            self._continue(running)

    def _begin_anew(self, running: RunningRequest, slot: int) -> None:
        """Queue the segment of `running` again, which nobody has heard and others took the pages and `slot` of."""
        running.progress = Progress()
        self.put_back += 1
        with self._border(running):
            self.runner.reset([slot])
            self._continue(running)

    def _take_text(self, running: RunningRequest, text: str, *, is_last: bool) -> None:
        """Take more text of `running`. What goes wrong ends it."""
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
        """Bring `running` as far as its text goes: into the queue with its next segment, or to its end."""
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
        """Those of its words that are told next, if it is to be told of them."""
        is_told = running.request.with_words and running.words is not None
        return running.words.take(until_s) if is_told and running.words is not None else None

    def _border(self, running: RunningRequest) -> AbstractContextManager[None]:
        """Within, what goes wrong ends `running`, and the others go on."""
        return border(partial(self._fail, running))

    def _fail(self, running: RunningRequest, error: Exception) -> None:
        self._abort(running)
        self._forget(running)
        self._events.append(Failed.of(running.request.id, error))

    def _abort(self, running: RunningRequest) -> None:
        """Reset the slot of a request that ends early, which the device may not know."""
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
        """Fail every request that holds a slot: how far they are is not known after a tick was broken off."""
        error = EngineError(f"the engine's tick was broken off by {type(cause).__name__}: {cause}")
        self.scheduler.pages.clear_cache()
        while self._in_flight:
            self._in_flight.popleft().entry.release()
        for running in list(self.scheduler.running):
            self._fail(running, error)
