"""Cuts the text of a live request into segments as it arrives. Pure Python: knows no slot and no tick.

A model with live text is given token ids as soon as they are certain; for any other, each complete sentence is a
segment."""

from collections.abc import Callable
from typing import Protocol

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import is_speakable
from sonoro.text.splitting import Segment, SpokenText, cut_live, cut_sentence, placed


class LiveText(Protocol):
    """Incremental tokeniser of one live segment: text arrives in pieces, and each frame takes the next id."""

    max_letters: int

    def letters(self, text: str) -> int:
        """How much of `max_letters` the text of a segment uses."""

    def feed(self, text: str) -> list[int]:
        """Append `text`; returns the next ids, only those that no later text can change."""

    def finish(self) -> list[int]:
        """The remaining ids, with those that end a text; empty if the whole segment has nothing to speak."""

    @property
    def spoken(self) -> SpokenText:
        """The text of the ids so far, and of characters whose ids may still change."""


class LiveFeed:
    """Turns appended text into `segments`, the last of which may still grow.
    Takes at most `max_characters` in all; a segment has at most `max_letters` letters, or fewer as the model asks.
    `begin` returns the encoder of a new segment, or None for a model without live text; `split` then cuts each sentence
    into segments. These go into `segments`, if that is given; the text begins at character `start` of a longer one."""

    def __init__(
        self,
        begin: Callable[[], LiveText | None],
        split: Callable[[str], list[SpokenText]],
        language: str,
        max_letters: int,
        max_characters: int,
        *,
        segments: list[Segment] | None = None,
        start: int = 0,
    ) -> None:
        self.segments: list[Segment] = [] if segments is None else segments
        self.characters = 0
        self.is_ended = False
        self._begin, self._split = begin, split
        self._language, self._max_letters, self._max_characters = language, max_letters, max_characters
        # Text from the start of the growing segment on, its offset in all text, and how much of it the model was given.
        self._text, self._start, self._given = "", start, 0
        self._encoder: LiveText | None = None
        self._ids: list[int] = []
        self._growing: Segment | None = None

    def append(self, text: str) -> str:
        """Append `text`, and return it. Raises `InvalidRequest` after `end`, or beyond `max_characters`."""
        if self.is_ended:
            raise InvalidRequest("text", text, "the text was already ended")
        self.characters += len(text)
        if self.characters > self._max_characters:
            limit = f"at most {self._max_characters} characters for a live request"
            raise InvalidRequest("text", f"{self.characters} characters", limit)
        self._text += text
        return text

    def end(self) -> str:
        """Mark the text as complete; nothing of it was held back."""
        self.is_ended = True
        return ""

    @property
    def has_more(self) -> bool:
        """Whether there is text beyond the whole segments, or more may come."""
        return not self.is_ended or bool(self._text)

    def advance(self, index: int) -> None:
        """Cut and encode the text so far up to segment `index`. Later text is left for later calls, as it takes time.
        Raises what the model raises for text it cannot take."""
        while self._text and (index >= len(self.segments) or self._growing is self.segments[index]):
            self._encoder = self._encoder or self._begin()
            if not (self._take_sentence() if self._encoder is None else self._take_words(self._encoder)):
                return

    def close(self, index: int) -> None:
        """Close segment `index`, which the model has ended; text that it was not given goes to the next one."""
        if self._growing is self.segments[index]:
            self._cut(self._given)

    def cut_off(self, index: int) -> None:
        """End segment `index`, if it may still grow, behind the last whole word that the model was given, so that it is
        spoken to its end. Later text goes to the next one."""
        if self._growing is not self.segments[index]:
            return
        given, encoder = self._text[: self._given], self._begin()
        cut = 1 + max(given.rfind(" "), given.rfind("\n"))
        assert encoder is not None
        ids = [*encoder.feed(self._text[:cut]), *encoder.finish()]
        if ids[: len(self._ids)] != self._ids:
            # The model already has a part of the last word.
            assert self._encoder is not None
            cut, encoder = self._given, self._encoder
            ids = [*self._ids, *encoder.finish()]
        self._ids[:] = ids
        self._growing.spoken, self._growing.end = encoder.spoken.moved(self._start), self._start + cut
        self._cut(cut)

    def _take_words(self, encoder: LiveText) -> bool:
        """Encode what is certain of the growing segment. Returns whether the segment is whole."""
        most = min(self._max_letters, encoder.max_letters)
        cut, is_cut = cut_live(
            self._text, self._given, self._language, most, is_last=self.is_ended, length=encoder.letters
        )
        new = encoder.feed(self._text[self._given : cut])
        self._ids += [*new, *encoder.finish()] if is_cut else new
        self._given = cut
        if self._growing is None and self._ids and is_speakable(self._text[:cut]):
            self._growing = Segment(encoder.spoken, self._start, self._start, self._ids, is_whole=False)
            self.segments.append(self._growing)
        if self._growing is not None:
            self._growing.spoken, self._growing.end = encoder.spoken.moved(self._start), self._start + cut
        if is_cut:
            self._cut(cut)
        return is_cut

    def _take_sentence(self) -> bool:
        """Make segments of the next sentence. Returns False if it is not complete yet."""
        cut = cut_sentence(self._text, self._language, self._max_letters, is_last=self.is_ended)
        if not cut:
            return False
        # It begins with the white space behind the one before it.
        sentence = self._text[:cut].lstrip()
        end = self._start + cut
        parts = self._split(sentence) if is_speakable(sentence) else []
        self.segments += placed([part.moved(end - len(sentence)) for part in parts], self._start, end)
        self._cut(cut)
        return True

    def _cut(self, cut: int) -> None:
        """End the growing segment, if there is one; the text after `cut` begins another."""
        if self._growing is not None:
            self._growing.is_whole = True
        self._text, self._start, self._given = self._text[cut:], self._start + cut, 0
        self._encoder, self._growing, self._ids = None, None, []
