"""The words of lexicons in a text with markup that is still arriving. A word is held back until it is whole."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from sonoro.core.errors import InvalidRequest
from sonoro.core.script import Said
from sonoro.core.types import Markup

from .lexicon import Lexicon, Match
from .live_marked import LiveMarked


class LiveLexicons:
    """Finds what `lexicons` say in a text with `markup`. What is no part of a word of theirs passes at once."""

    def __init__(self, lexicons: Sequence[Lexicon], markup: Markup) -> None:
        self._lexicons, self._reader = lexicons, LiveMarked(markup)
        self._searched = self._passed = 0
        self._held: int | None = None
        """Where a word may begin that is not whole yet."""

    def append(self, text: str) -> tuple[str, tuple[Said, ...]]:
        """Append `text`; returns the text to speak next, and what is said of it, by places in all text."""
        self._reader.marked.source += text
        return self._take(is_last=False)

    def end(self) -> tuple[str, tuple[Said, ...]]:
        """The rest of the text."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> tuple[str, tuple[Said, ...]]:
        source = self._reader.marked.source
        try:
            end = self._reader.read(is_last=is_last)
        except InvalidRequest:  # whoever speaks the text refuses it
            self._lexicons, self._held = (), None
            end = self._searched
        said = tuple(self._search(end, is_last=is_last)) if self._lexicons else ()
        passed = len(source)
        if self._lexicons and self._reader.is_waiting and not is_last:
            passed = 0
        elif self._held is not None:
            passed = self._reader.marked.origins.position(self._held)
        text, self._passed = source[self._passed : passed], max(passed, self._passed)
        return text, said

    def _search(self, end: int, *, is_last: bool) -> Iterator[Said]:
        """What is said of the text up to character `end`, which may go on unless it `is_last`."""
        marked, start, self._held = self._reader.marked, self._searched, None
        for first, last in marked.free(start, end):
            is_open = last == end and not marked.ends_at(end)
            for found in self._matches(marked.text[:end], first, last, is_last=is_last, is_open=is_open):
                (start, _), (_, stop) = marked.origins[found.start], marked.origins[found.end - 1]
                yield found.said._replace(start=start, end=stop, at=start)
            if self._held is not None:
                break
        self._searched = end if self._held is None else self._held

    def _matches(self, text: str, start: int, stop: int, *, is_last: bool, is_open: bool) -> Iterator[Match]:
        """As `lexicon.matches`, up to a place where more text may change what matches, which is then held."""
        at = start
        for begin in heapq.merge(*(lexicon.starts(text, start, stop) for lexicon in self._lexicons)):
            if begin < at:
                continue
            for lexicon in self._lexicons:
                if not is_last and lexicon.may_change(text, begin, stop, is_open=is_open):
                    self._held = begin
                    return
                if (found := lexicon.longest(text, begin, stop)) is not None:
                    yield found
                    at = found.end
                    break
