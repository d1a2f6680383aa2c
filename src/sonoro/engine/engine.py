"""Requests in, events out: continuous batching of any `SpeechModel`, one frame of every running request per tick.

Knows the protocols of `models.base` and no model. Not thread-safe: its owner calls it from one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from sonoro.core.audio import to_pcm16
from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineError, InvalidRequest, SonoroError
from sonoro.core.text import frames_bound, split_text
from sonoro.core.types import AudioChunk, Event, Failed, Finished, FinishReason, SpeechRequest, Timings
from sonoro.engine.request import RunningRequest
from sonoro.engine.scheduler import Scheduler
from sonoro.engine.voices import VoiceCache
from sonoro.models.base import Capacity, SpeechModel

__all__ = ["Engine"]


class Engine:
    """A model and its slots. `submit` requests, then call `tick` while there `has_work`."""

    def __init__(
        self, model: SpeechModel, config: EngineConfig, clock_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self.config, self.spec = config, model.spec
        self._model, self._codec, self._clock_s = model, model.codec, clock_s
        self._scheduler = Scheduler(config)
        self._voices = VoiceCache(model, config.max_voices)
        self._rows: dict[str, RunningRequest] = {}
        self._events: list[Event] = []
        with torch.inference_mode():
            capacity = Capacity(config.slots, config.max_positions, config.max_frames, config.max_text)
            self._state = model.allocate(capacity)
            self._history = self._codec.allocate(config.slots)
        self._device = self._state.done.device

    @property
    def has_work(self) -> bool:
        """Whether a `tick` would do anything."""
        return bool(self._events) or self._scheduler.has_work

    @property
    def free_slots(self) -> int:
        """Slots that no request holds."""
        return self._scheduler.free_slots

    def submit(self, request: SpeechRequest) -> None:
        """Accept `request`; its events carry its id. Raises `InvalidRequest` for what this model cannot speak."""
        if request.id in self._rows:
            raise InvalidRequest("id", request.id, "a request of that id is still running")
        request = self.spec.resolve(request)
        with torch.inference_mode():
            voice = self._voices.get(request.references) if request.references else None
            row = RunningRequest(request, self._segments(request), voice, accepted_at_s=self._clock_s())
            _check_max_frames(request, len(row.segments), self._max_segment_frames)
            self._prepare(row)
        self._rows[request.id] = row
        self._scheduler.add(row)

    def cancel(self, request_id: str) -> None:
        """End a request with the reason `cancelled` at the next tick; one that has ended already stays as it is."""
        if request_id in self._rows:
            self._finish(self._rows[request_id], "cancelled")

    def tick(self) -> list[Event]:
        """One frame for every running request, with the prefills and the decoding that are due; what came of it."""
        with torch.inference_mode():
            plan = self._scheduler.plan()
            self._prefill(plan.admit)
            self._step([row for row in plan.frame if row.slot is not None])
            for frames, rows in plan.codec.items():
                self._decode([row for row in rows if row.slot is not None], frames)
            self._collect()
        events, self._events = self._events, []
        return events

    def _segments(self, request: SpeechRequest) -> list[str]:
        language = request.language or "auto"
        parts = self._model.segments(request.text, language)
        segments = [piece for part in parts for piece in split_text(part, language, self.config.max_characters)]
        if not segments:
            raise InvalidRequest("text", request.text, "nothing in it can be spoken")
        return segments

    @property
    def _max_segment_frames(self) -> int:
        return min(self.config.max_frames, self.spec.max_frames)

    def _prepare(self, row: RunningRequest) -> None:
        """Make the prompt of the current segment. The model is told the segment's own limit as `max_frames`."""
        request, segment = row.request, row.segments[row.index]
        if request.max_frames is None:
            allowed = frames_bound(segment, request.language or "auto", self.spec.frame_s)
        else:
            allowed = request.max_frames - row.frames_before
        row.limit = min(allowed, self._max_segment_frames)
        limited = msgspec.structs.replace(request, max_frames=row.limit)
        row.prompt = self._model.prepare(limited, segment, row.index, row.before, row.voice)
        positions, most = row.prompt.positions + row.limit, self.config.max_positions
        if positions > most:
            raise InvalidRequest(
                "text", segment, f"with its voice and instructions it needs {positions} positions; at most {most}"
            )
        if row.prompt.text_ids > self.config.max_text:
            raise InvalidRequest(
                "text", segment, f"it has {row.prompt.text_ids} pending text ids; at most {self.config.max_text}"
            )

    def _prefill(self, rows: list[RunningRequest]) -> None:
        """Fill the slots of `rows`. When that fails for several together, the one at fault fails alone."""
        if not rows:
            return
        slots = self._slots(rows)
        try:
            self._model.prefill(self._state, [row.prompt for row in rows if row.prompt is not None], slots)
            self._codec.reset(self._history, slots)
            for row in rows:
                if row.voice is not None and row.voice.reference_frames is not None:
                    self._codec.prime(self._history, self._slots([row]), row.voice)
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows[0], error)
                return
            for row in rows:
                self._prefill([row])

    def _step(self, rows: list[RunningRequest]) -> None:
        """Make one frame for each of `rows` and read how far they are."""
        if not rows:
            return
        slots = self._slots(rows)
        self._model.frame(self._state, slots)
        lengths, flags = self._state.length[slots].tolist(), self._state.done[slots].tolist()
        for row, length, is_done in zip(rows, lengths, flags, strict=True):
            row.length, row.is_done = length, is_done

    def _decode(self, rows: list[RunningRequest], frames: int) -> None:
        """Turn the next `frames` frames of each of `rows` into audio, less what the last of them did not make."""
        if not rows:
            return
        slots = self._slots(rows)
        first = torch.tensor([row.decoded for row in rows], device=self._device)
        columns = first[:, None] + torch.arange(frames, device=self._device)
        codes = self._state.frames[slots[:, None], columns]
        audio = self._codec.decode(codes, slots, self._history).float().cpu().numpy()
        for row, samples in zip(rows, audio, strict=True):
            made = min(frames, row.length - row.decoded)
            row.decoded += made
            if made:
                self._send(row, to_pcm16(samples[: made * self._codec.hop]))

    def _collect(self) -> None:
        """Take drained segments out of their slots: on to the next segment, or to the end."""
        for row in [row for row in self._scheduler.running if row.is_drained]:
            reason = row.finish_reason
            if reason is not None:
                self._finish(row, reason)
                continue
            frames = self._state.frames[row.slot, : row.length].cpu().clone()
            self._scheduler.release(row)
            row.next_segment(frames)
            self._scheduler.add(row)
            try:
                self._prepare(row)
            except Exception as error:
                self._fail(row, error)

    def _slots(self, rows: list[RunningRequest]) -> Tensor:
        return torch.tensor([row.slot for row in rows], dtype=torch.int64, device=self._device)

    def _send(self, row: RunningRequest, pcm: bytes) -> None:
        if row.first_audio_at_s is None:
            row.first_audio_at_s = self._clock_s()
        self._events.append(AudioChunk(request_id=row.request.id, index=row.chunks, pcm=pcm))
        row.chunks += 1

    def _finish(self, row: RunningRequest, reason: FinishReason) -> None:
        self._release(row)
        now_s = self._clock_s()
        first_audio_at_s = now_s if row.first_audio_at_s is None else row.first_audio_at_s
        timings = Timings(first_audio_s=first_audio_at_s - row.accepted_at_s, total_s=now_s - row.accepted_at_s)
        self._events.append(
            Finished(request_id=row.request.id, reason=reason, frames=row.audio_frames, timings=timings)
        )

    def _fail(self, row: RunningRequest, error: Exception) -> None:
        self._release(row)
        if isinstance(error, SonoroError):
            code, message = error.code, str(error)
        else:
            code, message = EngineError.code, f"{type(error).__name__}: {error}"
        self._events.append(Failed(request_id=row.request.id, code=code, message=message))

    def _release(self, row: RunningRequest) -> None:
        self._scheduler.release(row)
        del self._rows[row.request.id]


def _check_max_frames(request: SpeechRequest, segments: int, max_segment_frames: int) -> None:
    most = segments * max_segment_frames
    if request.max_frames is not None and request.max_frames > most:
        raise InvalidRequest(
            "max_frames", request.max_frames, f"at most {most} for this text ({max_segment_frames} for each segment)"
        )
