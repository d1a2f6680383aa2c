"""The requests of an engine: moves each on from segment to segment, and turns the results of ticks into events.

Depends on no model; makes no plan."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt

from sonoro.core.errors import EngineError, InvalidRequest, border
from sonoro.core.events import Fault, Mark, Word
from sonoro.core.script import Said
from sonoro.core.types import AudioChunk, Event, Failed, Finished, FinishReason, ModelSpec
from sonoro.engine.prompts import Prompts
from sonoro.engine.request import Progress, Request, speaking
from sonoro.engine.runner import Decoded, Launched, Runner
from sonoro.engine.scheduler import Plan, Scheduler
from sonoro.engine.voices import Voices

logger = logging.getLogger(__name__)

_QUEUE_S = 0.005


class Output:
    """The `events` of requests: takes frames and audio, and makes chunks, words and ends of them."""

    def __init__(self, spec: ModelSpec, clock_s: Callable[[], float]) -> None:
        self.spec, self.clock_s = spec, clock_s
        self.events: list[Event] = []
        self.broken_samples = 0
        """Non-finite samples so far; they are sent as silence."""

    def take_step(
        self, request: Request, length: int, attention: npt.NDArray[np.float32] | None, *, is_over: bool
    ) -> None:
        """Take the `length` of the segment of `request` in frames, and the `attention` [H, W] of the newest.
        `is_over`: the model has ended the segment."""
        progress = request.progress
        if request.words is not None and attention is not None and length > progress.length:
            request.words.add_attention(attention, length)
        progress.length, progress.is_done = length, is_over or length >= progress.limit
        if request.retry is not None:
            request.retry.watch(self.spec.frame_s, is_over=is_over)

    def take_audio(self, request: Request, decoded: Decoded, at: int, now_s: float) -> None:
        """Send the audio of batch index `at` of a codec launch, without its padding columns.
        The audio is held back instead while its segment may still be spoken again."""
        progress = request.progress
        count = min(decoded.frames, progress.length - progress.decoded - progress.held_frames)
        assert count >= 0
        if not count:
            return
        self._count_broken(request, int(decoded.broken[at]))
        pcm = decoded.pcm_of(at, count)
        if request.words is not None:
            request.words.add_audio(pcm)
        if request.first == 0 and request.audio_frames + progress.held_frames == 0:
            pcm = pcm[2 * self.spec.lead_in :]
        progress.held.append((pcm, count))
        if request.words is not None and request.live is None and progress.is_drained:
            request.words.end()
        if request.keeps_frames:
            progress.frames.append(decoded.frames_of(at, count))
        if request.whole is None and (request.retry is None or not request.retry.holds_back):
            self.send_held(request, now_s)

    def send_held(self, request: Request, now_s: float) -> None:
        """Send the held chunks."""
        spec, played, segment = self.spec, request.played, request.segment
        for pcm, frames in request.progress.held:
            if played is None or segment is None:
                self._send(request, pcm, frames, now_s)
                continue
            if lead_s := played.lead_s(segment):
                self._send_pause(request, lead_s, now_s)
            begins_s = max(request.frames_before * spec.frame_s - spec.lead_in_s, 0.0)
            self._send(request, played.feed(segment, pcm, begins_s), frames, now_s)
        request.progress.held = []

    def end_segment(self, request: Request) -> None:
        """Send what follows the audio of a segment that has ended: of a line of a script, its end and its pause."""
        segment, played = request.segment, request.played
        if played is None or segment is None or segment.line is None:
            return
        now_s = self.clock_s()
        rest, pause_s = played.end(segment)
        if rest:
            self._send(request, rest, 0, now_s)
        if pause_s:
            self._send_pause(request, pause_s, now_s)

    def _send_pause(self, request: Request, pause_s: float, now_s: float) -> None:
        self._send(request, bytes(2 * round(pause_s * self.spec.sample_rate)), 0, now_s, pause_s)

    def _send(self, request: Request, pcm: bytes, frames: int, now_s: float, pause_s: float = 0.0) -> None:
        spec, index, segment = self.spec, request.playback.chunks, request.segment
        request.count_sent(frames, now_s, len(pcm) / 2 / spec.sample_rate)
        chunk = AudioChunk(
            request_id=request.params.id,
            index=index,
            pcm=pcm,
            characters=self._characters(request),
            words=self._words(request, request.audio_frames * spec.frame_s - spec.lead_in_s),
            pause_s=pause_s,
            marks=() if request.played is None else request.played.marks(),
            voice=None if segment is None or segment.line is None else segment.line.voice,
        )
        self.events.append(chunk)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Send the end of `request`."""
        characters = request.text_length if reason == "stop" else self._characters(request)
        self.events.append(
            Finished(
                request_id=request.params.id,
                reason=reason,
                frames=request.audio_frames,
                characters=characters,
                timings=request.playback.timings(self.clock_s()),
                words=self._words(request),
                faults=self._faults(request),
                warnings=_warnings(request),
                marks=self._last_marks(request),
            )
        )

    def _last_marks(self, request: Request) -> tuple[Mark, ...]:
        has_words = request.params.with_words and request.words is not None
        return () if request.played is None else request.played.last_marks(has_words=has_words)

    def _characters(self, request: Request) -> int:
        """Characters of the text, as it was sent, spoken by the end of the audio sent so far."""
        characters = request.characters(self.spec.frame_s)
        return characters if request.played is None else request.played.position(characters)

    def _faults(self, request: Request) -> tuple[Fault, ...]:
        faults = () if request.words is None else tuple(request.words.faults)
        return faults if request.played is None else request.played.faults(faults)

    def _count_broken(self, request: Request, samples: int) -> None:
        """Count non-finite `samples`; warn of the first, and again each time the total has doubled."""
        total = self.broken_samples + samples
        if total.bit_length() > self.broken_samples.bit_length():
            logger.warning("event=samples_not_finite request=%s samples=%d total=%d", request.params.id, samples, total)
        self.broken_samples = total

    def _words(self, request: Request, until_s: float | None = None) -> tuple[Word, ...] | None:
        """The words to report next, up to `until_s`; None if the request does not ask for words."""
        if not request.params.with_words or request.words is None:
            return None
        words = request.words.take(until_s)
        return words if request.played is None else request.played.words(words, request.segments)


def _warnings(request: Request) -> tuple[str, ...]:
    """What markup of the text was not honoured."""
    script = request.params.script if request.live is None else request.live
    return () if script is None else script.warnings


class Lifecycle:
    """The `requests` of an engine by id: queues their segments, takes the results, and ends them.
    An error of one request fails that request alone. Call it with the runner `active`, except `cancel`."""

    def __init__(self, runner: Runner, scheduler: Scheduler, prompts: Prompts, voices: Voices, output: Output) -> None:
        self._runner, self._scheduler, self._prompts, self._voices = runner, scheduler, prompts, voices
        self._output = output
        self.requests: dict[str, Request] = {}
        self.parallel: set[Request] = set()
        """Those whose segments are spoken side by side. Read-only to the caller."""
        self.preemptions = 0
        """Preemptions so far: requests that lost their slot for want of pages, before any audio was sent."""

    def queue(self, request: Request) -> None:
        """Queue the next segment of `request`, park it if the text has not come, or finish it if none is left. Of one
        with parts, queue the next part.
        Raises `InvalidRequest` if nothing in the text can be spoken, and what making the prompt raises."""
        if request.parts is not None:
            request = request.parts.begin()
        if request.live is not None:
            request.live.advance(request.index)
        segment = request.segment
        if segment is None and request.has_text_to_come:
            self._scheduler.park(request)
        elif segment is None and request.segments:
            self._finish(request, "stop")
        elif segment is None:
            raise InvalidRequest("text", f"{request.text_length} characters", "nothing in it can be spoken")
        elif request.progress.prompt is None:
            self._prompts.prepare(request, segment)
            self._scheduler.add(request)
            request.playback.reached_at_s.setdefault("queued", self._output.clock_s())
            self.parallel.update([request.whole] if request.whole is not None else ())
        else:
            self._prompts.extend_live(request, segment)

    def queue_with_voice(self) -> None:
        """Queue one request whose voice has been encoded. One per tick: cutting a long reference takes milliseconds."""
        request = next((request for request, voice in self._voices.awaiting.items() if voice.done()), None)
        if request is not None:
            with self._border(request):
                self._voices.attach(request)
                self.queue(request)

    def queue_parts(self) -> None:
        """Queue further parts of requests, one of each in turn, for the slots that nobody waits for.
        For at most `_QUEUE_S`, so that the running requests are not delayed."""
        until_s, idle_slots = self._output.clock_s() + _QUEUE_S, self._scheduler.idle_slots
        while idle_slots > 0 and self._output.clock_s() < until_s:
            waiting = [whole for whole in self.parallel if whole.parts is not None and whole.parts.may_begin]
            for whole in waiting[:idle_slots]:
                with self._border(whole):
                    self.queue(whole)
            idle_slots -= len(waiting) or idle_slots

    def add_text(self, request: Request, text: str, said: Sequence[Said] = (), *, is_last: bool) -> None:
        """Add `text` to a live request, of which is `said` what lexicons say, or end its text if `is_last`. An error
        fails the request."""
        with self._border(request):
            if request.live is None:
                raise InvalidRequest("text", text, "only a live request takes more text")
            spoken = request.live.append(text, said) + (request.live.end() if is_last else "")
            if request.words is not None:
                request.words.append(spoken)
            self._prompts.note_markup(request)
            if request not in self._voices.awaiting:
                with self._runner.active():
                    self.queue(request)

    def cut_off(self, request: Request) -> None:
        """End the live segment of `request` with the text that has come, so that its slot comes free."""
        with self._border(request):
            segment = request.segment
            assert request.live is not None
            assert segment is not None
            request.live.cut_off(request.index)
            request.cut_off = request.index
            self._prompts.extend_live(request, segment)

    def cancel(self, request: Request) -> None:
        """End `request` with the reason `cancelled`, or with an error if its words cannot be found."""
        with self._border_of_words(request):
            if request.words is not None and (request.retry is None or not request.retry.holds_back):
                request.words.stop()
            self._reset(request)
            self._finish(request, "cancelled")

    def begin_anew(self, request: Request, slot: int) -> None:
        """Queue the segment of `request` again after it was preempted from `slot`; none of its audio was sent."""
        request.progress = Progress()
        self.preemptions += 1
        with self._border(request):
            self._runner.reset([slot])
            self.queue(request)

    def note_launch(self, plan: Plan, launched: Launched) -> None:
        """Fail the requests of `plan` whose launch raised, and cache the prompt prefixes of the others."""
        for request, error in launched.failed.items():
            self._fail(request, error)
        for request in plan.admit:
            request.playback.reached_at_s.setdefault("slot", self._output.clock_s())
        # Those of other parts of a failed request have lost their slots too.
        self._scheduler.cache_prefixes(request for request in plan.admit if request.allocation is not None)

    def take_lengths(self, launched: Launched) -> None:
        """Wait for a tick's step and take its lengths."""
        launched.entry.wait_until_split()
        launched.has_lengths = True
        # Plain Python numbers: reading numpy scalars one by one takes three times as long.
        lengths, done = launched.length.tolist(), launched.done.tolist()
        for at, (item, length, is_done) in enumerate(zip(launched.stepped, lengths, done, strict=True)):
            if item.is_current and not item.request.progress.is_broken_off:
                attention = None if launched.attention is None else launched.attention[at]
                with self._border_of_words(item.request):
                    self._output.take_step(item.request, length, attention, is_over=is_done)

    def collect(self, launched: Launched) -> None:
        """Wait for a tick's results, take those not taken yet, then advance the requests whose segment is drained."""
        try:
            if not launched.has_lengths:
                self.take_lengths(launched)
            launched.entry.wait()
            now_s = self._output.clock_s()
            for decoded in launched.decoded:
                for at, item in enumerate(decoded.items):
                    if item.is_current:
                        with self._border_of_words(item.request):
                            self._output.take_audio(item.request, decoded, at, now_s)
        finally:
            launched.entry.release()
        for request in [request for request in self._scheduler.running if request.progress.is_drained]:
            # A part loses its slot when another one fails or ends their request.
            if request.allocation is not None:
                with self._border_of_words(request):
                    self._advance(request)

    @contextmanager
    def abandoning(self, in_flight: deque[Launched]) -> Iterator[None]:
        """A context in which an error fails every request that holds a slot and drops the results `in_flight`: the
        state of the device is unknown."""
        try:
            yield
        except BaseException as cause:
            error = EngineError(f"the engine's tick was broken off by {type(cause).__name__}: {cause}")
            self._scheduler.pages.clear_cache()
            while in_flight:
                in_flight.popleft().entry.release()
            for request in list(self._scheduler.running):
                self._fail(request, error)
            raise

    def _advance(self, request: Request) -> None:
        """Release the slot of a drained segment and queue the next segment or attempt, or finish the request."""
        if request.live is not None:
            request.live.close(request.index)
        if request.live is not None or request.progress.is_broken_off:
            # The device may still count the slot as running: it does not know a tightened limit or a broken-off end.
            self._reset(request)
        if request.words is not None:
            # `take_audio` has not ended the words of a live segment, of one broken off, or of one without a new frame.
            request.words.end()
        is_again = request.retry is not None and request.retry.settle()
        if not is_again:
            if request.whole is None:
                self._output.send_held(request, self._output.clock_s())
                self._output.end_segment(request)
            elif request.whole.parts is not None:
                request.whole.parts.end_segment(request)
            if (reason := request.finish_reason) is not None:
                self._finish(request, reason)
                return
        frames = self._runner.join(request.progress.frames)
        self._scheduler.release(request)
        with self._border(request):
            if is_again:
                request.progress = Progress()
            else:
                request.next_segment(frames)
            self.queue(request)

    def _end_part(self, part: Request, whole: Request) -> None:
        """End `part` of `whole`, send what can be sent in order, and go on with the next part."""
        assert whole.parts is not None
        self._scheduler.release(part)
        for _ in whole.parts.end(part, self._output.spec.frame_s, self._output.spec.lead_in_s):
            self._output.send_held(whole, self._output.clock_s())
            self._output.end_segment(whole)
            if (reason := whole.finish_reason) is not None:
                self._reset(whole)
                self._finish(whole, reason)
                return
            whole.next_segment(self._runner.join([]))
        if not whole.parts.running:
            # It goes on like a request of one slot, whose next segment comes before new requests.
            with self._border(whole):
                self.queue(whole)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.whole is not None:
            self._end_part(request, request.whole)
            return
        self._forget(request)
        self._output.finish(request, reason)

    def _fail(self, request: Request, error: Exception) -> None:
        """End `request`, or that of which it is a part, with `error`. Does nothing if another part has done so."""
        request = request.whole or request
        if self.requests.get(request.params.id) is not request:
            return
        self._reset(request)
        self._forget(request)
        self._output.events.append(Failed.of(request.params.id, error))

    def _reset(self, request: Request) -> None:
        """Reset the slots of a request that ends before the device has set its done flag."""
        if slots := [one.allocation.slot for one in speaking(request) if one.allocation is not None]:
            self._runner.reset(slots)

    def _forget(self, request: Request) -> None:
        if request in self._voices.awaiting:
            self._voices.forget(request)
        for one in speaking(request):
            self._scheduler.release(one)
        self.parallel.discard(request)
        del self.requests[request.params.id]

    def _border(self, request: Request) -> AbstractContextManager[None]:
        """A context in which an exception fails `request` alone."""
        return border(partial(self._fail, request))

    def _border_of_words(self, request: Request) -> AbstractContextManager[None]:
        """The `_border` of a request whose words are followed, as mapping its text may raise; else nothing."""
        return nullcontext() if request.words is None else self._border(request)
