"""Splits requests into segments and makes the prompt of each, with its limit of frames and its prefix cache keys.

Depends on the protocols of `models.base`; knows no queue and no tick.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import msgspec

from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidRequest
from sonoro.core.types import MAX_SEED, SpeechRequest
from sonoro.engine.request import RunningRequest
from sonoro.engine.words import RequestWords
from sonoro.models.base import LiveTextModel, Prompt, SpeechModel, Spoken
from sonoro.models.words import ShowsWords
from sonoro.text.english.normalize import check_readable
from sonoro.text.live_feed import LiveFeed
from sonoro.text.splitting import (
    SECONDS_PER_LETTER,
    Segment,
    frames_bound,
    frames_expected,
    segment_ends,
    split_text,
    with_lead,
)


class Prompts:
    """Makes segments and prompts for `model`, for slots of `config` that share `pages` pages."""

    def __init__(self, model: SpeechModel, config: EngineConfig, pages: int) -> None:
        self._model, self._config, self._spec = model, config, model.spec
        self._max_positions = min(config.max_positions, pages * config.page_positions)
        self._max_frames = min(config.max_frames, model.spec.max_frames)

    def cut_segments(self, running: RunningRequest) -> None:
        """Set the segments of a new request, or its `LiveFeed` if it is live, and its `words` if they are needed.

        Raises `InvalidRequest` for text that cannot be spoken, and for `max_frames` beyond what the text can take.
        """
        request = running.request
        # Faults are found by word times too.
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
        """Make the prompt of the current segment of `running`. The model may lower the limit of frames.

        Earlier segments that do not fit into a slot are left out, oldest first. Raises `InvalidRequest` if even the
        segment alone does not fit, and what the model raises.
        """
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
        """The prompt of `text` with as many of the latest segments before it as fit into a slot."""
        # `before` is shorter: the current segment and later ones have no frames yet.
        spoken = zip(running.segments, running.before, strict=False)
        # A segment that was broken off at its first word has no text left.
        before = [Spoken(said.text, frames) for said, frames in spoken if said.text.strip() and len(frames)]
        prompt = self._model.prepare(limited, text, running.index, before, running.voice)
        while before and (excess := prompt.positions + prompt.controls.max_frames - self._max_positions) > 0:
            while before and excess > 0:
                excess -= len(before.pop(0).frames)
            prompt = self._model.prepare(limited, text, running.index, before, running.voice)
        return prompt

    def extend_live(self, running: RunningRequest, segment: Segment) -> None:
        """Take in ids that came for the current live segment after its prompt was made; raises as `prepare` does."""
        if running.late_ids and segment.is_whole and running.allocation is None:
            # It still waits for a slot, so its prompt can be remade from the whole text.
            self.prepare(running, segment)
        elif running.late_ids:
            self._check_text_ids(segment, running.pending_ids + len(running.late_ids))
            if segment.is_whole:
                running.tighten(self._most_frames(running, segment))

    def _feed(self, running: RunningRequest) -> LiveFeed:
        split, model = self._split(running.request), self._model
        return LiveFeed(
            # Called later: the voice may not be known yet.
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
        """Limit of frames for `segment`: from the request, else from its text if that is complete."""
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
        """Expected frames of `segment`; its limit if its text is not complete or EOS is ignored."""
        if running.request.ignore_eos or not segment.is_whole:
            return running.progress.limit
        return frames_expected(segment.text, running.request.language or "auto", self._spec.frame_s)

    def _check_text_ids(self, segment: Segment, count: int) -> None:
        if count > self._config.max_text:
            limit = f"it has {count} pending text ids; at most {self._config.max_text}"
            raise InvalidRequest("text", segment.text, limit)

    def _keys(self, prompt: Prompt) -> list[bytes]:
        """Chained SHA-256 keys of the whole pages of the prompt's prefix: equal keys mean equal pages before, too."""
        prefix, page = prompt.prefix, self._config.page_positions
        if prefix is None or not self._config.prefix_cache_bytes:
            return []
        assert len(prefix) < prompt.positions, (len(prefix), prompt.positions)
        keys, digest = [], b""
        for end in range(page, len(prefix) + 1, page):
            digest = hashlib.sha256(digest + prefix[end - page : end].tobytes()).digest()
            keys.append(digest)
        return keys
