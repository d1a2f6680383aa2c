"""Requests into segments, and segments into prompts: what a model is asked to speak at once, and for how long at most.

Knows the protocols of `models.base` and no model, no queue and no tick.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import msgspec

from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidRequest
from sonoro.core.normalize import check_readable
from sonoro.core.text import (
    SECONDS_PER_LETTER,
    Segment,
    frames_bound,
    frames_expected,
    segment_ends,
    split_text,
    with_lead,
)
from sonoro.core.types import MAX_SEED, SpeechRequest
from sonoro.engine.live_text import LiveFeed
from sonoro.engine.request import RunningRequest
from sonoro.engine.words import RequestWords
from sonoro.models.base import LiveTextModel, Prompt, SpeechModel, Spoken
from sonoro.models.words import ShowsWords

__all__ = ["Prompts"]


class Prompts:
    """What `model` is given of a request, in slots of `config` that share `pages` pages."""

    def __init__(self, model: SpeechModel, config: EngineConfig, pages: int) -> None:
        self._model, self._config, self._spec = model, config, model.spec
        self._max_positions = min(config.max_positions, pages * config.page_positions)
        self._max_frames = min(config.max_frames, model.spec.max_frames)

    def cut_segments(self, running: RunningRequest) -> None:
        """Give `running`, which is new, the segments of its text, or where they will come from.

        Raises `InvalidRequest` for text that cannot be spoken, or not in so many frames.
        """
        request = running.request
        # What is to be spoken again where it went wrong is watched as well.
        is_watched = request.with_words or (request.attempts or 1) > 1
        if is_watched and isinstance(self._model, ShowsWords) and self._model.word_heads.places:
            running.words = RequestWords(self._model, self._spec, request.text)
        if request.is_live:
            running.live = self._feed(running)
            running.segments = running.live.segments
            running.live.append(request.text)
            return
        if self._spec.text_normalizer is not None:
            check_readable(request.text)
        pieces = self._split(request)(request.text)
        if not pieces:
            raise InvalidRequest("text", request.text, "nothing in it can be spoken")
        ends = segment_ends(request.text, pieces)
        running.segments = [Segment(*made) for made in zip(pieces, [0, *ends], ends, strict=False)]
        most = len(pieces) * self._max_frames
        if request.max_frames is not None and request.max_frames > most:
            limit = f"at most {most} for this text ({self._max_frames} for each segment)"
            raise InvalidRequest("max_frames", request.max_frames, limit)

    def prepare(self, running: RunningRequest, segment: Segment) -> None:
        """Make the prompt of the current segment. The model is told the segment's limit as `max_frames`, and may set a
        lower one. Earlier segments for which a slot has no room are left out, those first that were spoken first."""
        frames = self._most_frames(running, segment)
        seed = (running.request.seed + running.attempt) % (MAX_SEED + 1)
        limited = msgspec.structs.replace(running.request, max_frames=frames, seed=seed)
        if segment.ids is None:
            prompt = self._after_what_fits(running, limited, segment.text)
        else:
            assert isinstance(self._model, LiveTextModel)
            prompt = self._model.prepare_live(limited, segment.ids, running.index, running.voice)
            running.progress.given_ids = len(segment.ids)
        running.progress.prompt, running.progress.limit = prompt, prompt.controls.max_frames
        running.progress.expected = self._expected_frames(running, segment)
        if running.positions > self._max_positions:
            limit = (
                f"with its voice and instructions it needs {running.positions} positions; at most {self._max_positions}"
            )
            raise InvalidRequest("text", segment.text, limit)
        self._check_text_ids(segment, prompt.text_ids)
        running.progress.prefix = self._keys(prompt)
        if running.words is not None and isinstance(self._model, ShowsWords):
            begins_s = running.frames_before * self._spec.frame_s - self._spec.lead_in_s
            running.words.begin(segment, self._model.pointing(running.request, running.voice), begins_s)

    def _after_what_fits(self, running: RunningRequest, limited: SpeechRequest, text: str) -> Prompt:
        """The prompt of `text` after as many of the segments before it, the last ones, as fit into a slot."""
        # The segment itself, and those after it, have no frames yet.
        spoken = zip(running.segments, running.before, strict=False)
        # One that was broken off at its first word said nothing.
        before = [Spoken(said.text, frames) for said, frames in spoken if said.text.strip() and len(frames)]
        prompt = self._model.prepare(limited, text, running.index, before, running.voice)
        while before and (excess := prompt.positions + prompt.controls.max_frames - self._max_positions) > 0:
            while before and excess > 0:
                excess -= len(before.pop(0).frames)
            prompt = self._model.prepare(limited, text, running.index, before, running.voice)
        return prompt

    def extend_live(self, running: RunningRequest, segment: Segment) -> None:
        """Take the ids that have come for the current segment of a live request since its prompt was made."""
        if running.late_ids and segment.is_whole and running.allocation is None:
            # It waits for a slot: its prompt can still be that of the whole text.
            self.prepare(running, segment)
        elif running.late_ids:
            self._check_text_ids(segment, running.pending_ids + len(running.late_ids))
            if segment.is_whole:
                running.tighten(self._most_frames(running, segment))

    def _feed(self, running: RunningRequest) -> LiveFeed:
        split, model = self._split(running.request), self._model
        return LiveFeed(
            # Whom it speaks as may be known only later.
            lambda: model.live_text(running.request, running.voice) if isinstance(model, LiveTextModel) else None,
            # A piece begins with the white space behind the one before it.
            lambda text: split(text.lstrip()),
            running.request.language or "auto",
            min(self._config.max_characters, int(self._config.live_max_s / SECONDS_PER_LETTER)),
            self._config.max_live_characters,
        )

    def _split(self, request: SpeechRequest) -> Callable[[str], list[str]]:
        language = request.language or "auto"

        def split(text: str) -> list[str]:
            parts = self._model.segments(text, language)
            most = self._config.max_characters
            return [piece for part in parts for piece in with_lead(part, split_text(part, language, most))]

        return split

    def _most_frames(self, running: RunningRequest, segment: Segment) -> int:
        """Frames that `segment` may have: as the request says, or else as its text allows, as far as that is known."""
        if running.request.max_frames is not None:
            most = running.request.max_frames - running.frames_before
        elif segment.is_whole and self._config.bounds_by_text:
            most = frames_bound(segment.text, running.request.language or "auto", self._spec.frame_s)
        elif segment.is_whole:
            most = self._max_frames
        else:
            most = math.ceil(self._config.live_max_s / self._spec.frame_s)
        return min(most, self._max_frames)

    def _expected_frames(self, running: RunningRequest, segment: Segment) -> int:
        """Frames that `segment` is expected to have. One whose end is not known, or does not count, has all it may."""
        if running.request.ignore_eos or not segment.is_whole:
            return running.progress.limit
        return frames_expected(segment.text, running.request.language or "auto", self._spec.frame_s)

    def _check_text_ids(self, segment: Segment, count: int) -> None:
        if count > self._config.max_text:
            limit = f"it has {count} pending text ids; at most {self._config.max_text}"
            raise InvalidRequest("text", segment.text, limit)

    def _keys(self, prompt: Prompt) -> list[bytes]:
        """A key for each whole page of the prompt's prefix: the same for the same contents after the same pages."""
        prefix, page = prompt.prefix, self._config.page_positions
        if prefix is None or not self._config.prefix_cache_bytes:
            return []
        assert len(prefix) < prompt.positions, (len(prefix), prompt.positions)
        keys, digest = [], b""
        for end in range(page, len(prefix) + 1, page):
            digest = hashlib.sha256(digest + prefix[end - page : end].tobytes()).digest()
            keys.append(digest)
        return keys
