"""Splits requests into segments and makes the prompt of each, with its limit of frames and its prefix cache keys.

Depends on the protocols of `models.base`; knows no queue and no tick."""

import hashlib
import math
from collections.abc import Callable

import msgspec

from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidRequest
from sonoro.core.script import Line, Script
from sonoro.core.types import MAX_SEED, SpeechRequest
from sonoro.engine.played import Played
from sonoro.engine.request import Request
from sonoro.models.base import LiveTextModel, Prompt, SpeechModel, Spoken, Voice
from sonoro.models.words import ShowsWords
from sonoro.text.english.readable import check_readable
from sonoro.text.live_feed import LiveFeed
from sonoro.text.origins import Origins
from sonoro.text.script import Delivery
from sonoro.text.script.live import LiveScript
from sonoro.text.splitting import (
    SECONDS_PER_LETTER,
    Segment,
    SpokenText,
    frames_bound,
    frames_expected,
    placed,
    split_text,
)
from sonoro.words.request import RequestWords

_MAX_LIVE_CHARACTERS = 100_000
"""Characters of a live request."""

_LIVE_MAX_S = 60.0
"""Seconds of audio of a live segment, which bound its letters too."""


def spoken_as(params: SpeechRequest, line: Line | None) -> SpeechRequest:
    """`params` as `line` of its script is spoken."""
    if line is None or (line.voice is None and line.language is None and line.instructions is None):
        return params
    return msgspec.structs.replace(
        params,
        voice=line.voice or params.voice,
        language=line.language or params.language,
        instructions=". ".join(filter(None, (params.instructions, line.instructions))) or None,
    )


def voice_of(request: Request, line: Line | None) -> Voice | None:
    """The voice of `line` of the script of `request`; None if it is one of the model's own."""
    return request.voice if line is None or line.voice is None else request.cast.get(line.voice)


class Prompts:
    """Makes segments and prompts for `model`, for slots of `config` that share `pages` pages."""

    def __init__(self, model: SpeechModel, config: EngineConfig, pages: int) -> None:
        self._model, self._config, self._spec = model, config, model.spec
        self._page_positions, self._max_text = config.page_positions, config.max_text
        self._max_positions = min(config.max_positions, pages * self._page_positions)
        self._max_frames = min(config.max_frames, model.spec.max_frames)

    def cut_segments(self, request: Request) -> None:
        """Set the segments of a new request, or its `LiveScript` if it is live, and its `words` if they are needed.
        Raises `InvalidRequest` for text that cannot be spoken, and for `max_frames` beyond what the text can take."""
        params = request.params
        # Faults are found by word times too.
        is_watched = params.with_words or (params.attempts or 1) > 1
        written = params.text if params.script is None else params.script.text
        if is_watched and isinstance(self._model, ShowsWords) and self._model.word_heads.places:
            request.words = RequestWords(self._model, self._spec, "" if params.is_live else written)
        if params.is_live:
            request.live = self._feed(request)
            request.segments = request.live.segments
            spoken = request.live.append(params.text)
            if request.words is not None:
                request.words.append(spoken)
            self.note_markup(request)
            return
        if self._spec.text_normalizer is not None:
            check_readable(written)
        if params.script is not None:
            request.played = Played(params.script, self._spec.sample_rate)
            request.segments = self._lines(params, params.script)
        else:
            request.segments = placed(self._split(params)(written), 0, len(written))
        if not request.segments:
            raise InvalidRequest("text", params.text, "nothing in it can be spoken")
        most = len(request.segments) * self._max_frames
        if params.max_frames is not None and params.max_frames > most:
            limit = f"at most {most} for this text ({self._max_frames} for each segment)"
            raise InvalidRequest("max_frames", params.max_frames, limit)

    def _lines(self, params: SpeechRequest, script: Script) -> list[Segment]:
        """The segments of a request's `script`."""
        segments: list[Segment] = []
        for line in script.lines:
            asked = spoken_as(params, line)
            if script.is_plain and self._spec.text_normalizer is not None:
                asked = msgspec.structs.replace(asked, text_format="plain")
            origins = Origins(line.origins)
            parts = [part.through(origins) for part in self._split(asked)(line.text)]
            made = placed(parts, segments[-1].end if segments else 0, origins[-1][1]) if parts else []
            for segment in made:
                segment.line, segment.ends_line = line, segment is made[-1]
            segments += made
        if segments:
            segments[0].lead_s, segments[-1].end = script.lead_s, len(script.text)
        return segments

    def note_markup(self, request: Request) -> None:
        """Have the lines of live text played as its markup says, once there is any."""
        live, spec = request.live, self._spec
        if request.played is None and live is not None and live.is_marked:
            samples = max(request.audio_frames * spec.hop - spec.lead_in, 0)
            segment = request.segment if request.progress.decoded else None
            request.played = Played(live, spec.sample_rate, samples, segment)

    def prepare(self, request: Request, segment: Segment) -> None:
        """Make the prompt of the current segment of `request`. The model may lower the limit of frames.
        Earlier segments that do not fit into a slot are left out, oldest first. Raises `InvalidRequest` if even the
        segment alone does not fit, and what the model raises."""
        frames = self._most_frames(request, segment)
        seed = (request.params.seed + request.attempt) % (MAX_SEED + 1)
        limited = msgspec.structs.replace(spoken_as(request.params, segment.line), max_frames=frames, seed=seed)
        voice = request.progress.voice = voice_of(request, segment.line)
        if voice is not None:
            limited = msgspec.structs.replace(limited, voice=None)
        if segment.ids is None:
            prompt = self._after_what_fits(request, limited, segment)
        else:
            assert isinstance(self._model, LiveTextModel)
            prompt = self._model.prepare_live(limited, segment.ids, request.index, voice)
            request.progress.given_ids = len(segment.ids)
        request.progress.prompt, request.progress.limit = prompt, prompt.controls.max_frames
        request.progress.expected = self._expected_frames(request, segment)
        if (positions := request.progress.positions) > self._max_positions:
            limit = f"with its voice and instructions it needs {positions} positions; at most {self._max_positions}"
            raise InvalidRequest("text", segment.text, limit)
        self._check_text_ids(segment, prompt.text_ids)
        request.progress.prefix = self._keys(prompt)
        if request.words is not None and isinstance(self._model, ShowsWords):
            lead_in_s = self._spec.lead_in_s if request.whole is None else 0.0
            begins_s = request.frames_before * self._spec.frame_s - lead_in_s
            request.words.begin(segment, self._model.pointing(request.params, voice), begins_s)

    def _after_what_fits(self, request: Request, limited: SpeechRequest, segment: Segment) -> Prompt:
        """The prompt of `segment` with as many of the latest segments before it as fit into a slot."""
        number, text, voice = request.first + request.index, segment.text, request.progress.voice
        speaker = spoken_as(request.params, segment.line).voice
        # `before` is shorter: the current segment and later ones have no frames yet.
        spoken = zip(request.segments, request.before, strict=False)
        # A segment that was broken off at its first word has no text left.
        before = [
            Spoken(said.text, frames)
            for said, frames in spoken
            if said.text.strip() and len(frames) and spoken_as(request.params, said.line).voice == speaker
        ]
        prompt = self._model.prepare(limited, text, number, before, voice)
        while before and (excess := prompt.positions + prompt.controls.max_frames - self._max_positions) > 0:
            while before and excess > 0:
                excess -= len(before.pop(0).frames)
            prompt = self._model.prepare(limited, text, number, before, voice)
        return prompt

    def extend_live(self, request: Request, segment: Segment) -> None:
        """Take in ids that came for the current live segment after its prompt was made; raises as `prepare` does."""
        if request.late_ids and segment.is_whole and request.allocation is None:
            # It still waits for a slot, so its prompt can be remade from the whole text.
            self.prepare(request, segment)
        elif request.late_ids:
            self._check_text_ids(segment, request.pending_ids + len(request.late_ids))
            if segment.is_whole:
                limit = max(self._most_frames(request, segment), request.steps + 1)
                request.progress.limit = min(request.progress.limit, limit)

    def _feed(self, request: Request) -> LiveScript:
        model, params = self._model, request.params

        def feed(line: Line, segments: list[Segment], start: int) -> LiveFeed:
            asked = spoken_as(params, line)
            return LiveFeed(
                # Called later: the voice may not be known yet.
                lambda: model.live_text(asked, voice_of(request, line)) if isinstance(model, LiveTextModel) else None,
                self._split(asked),
                asked.language or "auto",
                min(self._config.segment_letters, int(_LIVE_MAX_S / SECONDS_PER_LETTER)),
                _MAX_LIVE_CHARACTERS,
                segments=segments,
                start=start,
            )

        delivery = Delivery(self._spec, self._spec.voice_aliases, params.on_markup, params.language or "auto")
        return LiveScript(params.markup, delivery, feed, _MAX_LIVE_CHARACTERS)

    def _split(self, params: SpeechRequest) -> Callable[[str], list[SpokenText]]:
        language, most = params.language or "auto", self._config.segment_letters
        return lambda text: [
            piece
            for part in self._model.segments(text, language, params.text_format, params.voice)
            for piece in split_text(part, language, most)
        ]

    def _most_frames(self, request: Request, segment: Segment) -> int:
        """Limit of frames for `segment`: from the request, else from its text if that is complete."""
        if request.params.max_frames is not None:
            most = request.params.max_frames - request.frames_before
        elif segment.is_whole and self._config.bounds_by_text:
            most = frames_bound(segment.text, self._spec.frame_s)
        elif segment.is_whole:
            most = self._max_frames
        else:
            most = math.ceil(_LIVE_MAX_S / self._spec.frame_s)
        return min(most, self._max_frames)

    def _expected_frames(self, request: Request, segment: Segment) -> int:
        """Expected frames of `segment`; its limit if its text is not complete or EOS is ignored."""
        if request.params.ignore_eos or not segment.is_whole:
            return request.progress.limit
        return frames_expected(segment.text, self._spec.frame_s)

    def _check_text_ids(self, segment: Segment, count: int) -> None:
        if count > self._max_text:
            limit = f"it has {count} pending text ids; at most {self._max_text}"
            raise InvalidRequest("text", segment.text, limit)

    def _keys(self, prompt: Prompt) -> list[bytes]:
        """Chained SHA-256 keys of the whole pages of the prompt's prefix: equal keys mean equal pages before, too."""
        prefix, page = prompt.prefix, self._page_positions
        if prefix is None or not self._config.prefix_cache_bytes:
            return []
        assert len(prefix) < prompt.positions, (len(prefix), prompt.positions)
        keys, digest = [], b""
        for end in range(page, len(prefix) + 1, page):
            digest = hashlib.sha256(digest + prefix[end - page : end].tobytes()).digest()
            keys.append(digest)
        return keys
