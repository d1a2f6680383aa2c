"""The text of a live request: what has come, and how it is cut into segments. Pure Python: knows no slot and no tick.

A model that takes its text word by word is handed ids as soon as they are certain; for any other, each sentence is a
segment of its own once it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sonoro.core.errors import InvalidRequest
from sonoro.core.text import Segment, cut_live, cut_sentence, segment_ends
from sonoro.core.types import is_speakable

if TYPE_CHECKING:
    from sonoro.models.base import LiveText

__all__ = ["LiveFeed"]


class LiveFeed:
    """Text in, `segments` out, the last of which may still grow.

    At most `max_characters` are taken; a segment has at most `max_letters`, or as many as the model takes at once.
    `begin` makes what encodes a segment, or None where only whole sentences can be spoken, which `split` then turns
    into segments as it would a whole text.
    """

    def __init__(
        self,
        begin: Callable[[], LiveText | None],
        split: Callable[[str], list[str]],
        language: str,
        max_letters: int,
        max_characters: int,
    ) -> None:
        self.segments: list[Segment] = []
        self.characters = 0
        self.is_ended = False
        self._begin, self._split = begin, split
        self._language, self._max_letters, self._max_characters = language, max_letters, max_characters
        # Of the text from the beginning of the segment that grows: how much the model was given, and its ids.
        self._text, self._start, self._given = "", 0, 0
        self._encoder: LiveText | None = None
        self._ids: list[int] = []
        self._growing: Segment | None = None

    def append(self, text: str) -> None:
        """Take `text`. Raises `InvalidRequest` if there was to be no more, or if it is too much."""
        if self.is_ended:
            raise InvalidRequest("text", text, "the text had been ended")
        self.characters += len(text)
        if self.characters > self._max_characters:
            limit = f"at most {self._max_characters} characters for a live request (max_live_characters)"
            raise InvalidRequest("text", f"{self.characters} characters", limit)
        self._text += text

    def end(self) -> None:
        """There is no more text."""
        self.is_ended = True

    @property
    def has_more(self) -> bool:
        """Whether text may come, or is there, for segments beyond those that are whole."""
        return not self.is_ended or bool(self._text)

    def advance(self, index: int) -> None:
        """Bring segment `index`, and those before it, to what has come; whatever is left waits, for that takes time.

        Raises what the model raises for text it cannot take.
        """
        while self._text and (index >= len(self.segments) or self._growing is self.segments[index]):
            self._encoder = self._encoder or self._begin()
            if not (self._take_sentence() if self._encoder is None else self._take_words(self._encoder)):
                return

    def close(self, index: int) -> None:
        """The model has ended segment `index`: what that was not given of a text still coming is for the next one."""
        if self._growing is self.segments[index]:
            self._cut(self._given)

    def _take_words(self, encoder: LiveText) -> bool:
        """Give the growing segment what it may have; whether it is whole now."""
        most = min(self._max_letters, encoder.max_letters)
        cut, is_cut = cut_live(
            self._text, self._given, self._language, most, is_last=self.is_ended, length=encoder.letters
        )
        new = encoder.feed(self._text[self._given : cut])
        self._ids += [*new, *encoder.finish()] if is_cut else new
        self._given, text = cut, self._text[:cut]
        if self._growing is None and self._ids and is_speakable(text):
            self._growing = Segment(text, self._start, self._start, self._ids, is_whole=False)
            self.segments.append(self._growing)
        if self._growing is not None:
            self._growing.text, self._growing.end = text, self._start + cut
        if is_cut:
            self._cut(cut)
        return is_cut

    def _take_sentence(self) -> bool:
        """Make segments of the next sentence; whether it is complete."""
        cut = cut_sentence(self._text, self._language, self._max_letters, is_last=self.is_ended)
        if not cut:
            return False
        sentence = self._text[:cut]
        pieces = self._split(sentence) if is_speakable(sentence) else []
        start = self._start
        for piece, end in zip(pieces, segment_ends(sentence, pieces), strict=True):
            self.segments.append(Segment(piece, start, self._start + end))
            start = self._start + end
        self._cut(cut)
        return True

    def _cut(self, cut: int) -> None:
        """The growing segment, if there is one, is whole; the text after `cut` begins another."""
        if self._growing is not None:
            self._growing.is_whole = True
        self._text, self._start, self._given = self._text[cut:], self._start + cut, 0
        self._encoder, self._growing, self._ids = None, None, []
