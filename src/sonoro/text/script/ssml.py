"""SSML 1.1, a subset, to `Marked`. Reads with expat and nothing else: no DTD, no entity of the text's own, no address
that is fetched. Names count without their prefix, as the texts of vendors lack the declarations."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable
from xml.parsers import expat

from .elements import Elements
from .marked import Marked

_DOCUMENT = re.compile(r"\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--.*?-->\s*)*(?:<speak[\s/>]|<!DOCTYPE\b)", re.DOTALL)
_SPACES = re.compile(r"\s\s+|[^\S ]")
"""White space that is not one space."""


def is_ssml(text: str) -> bool:
    """Whether `text` begins as an SSML document."""
    return "<speak" in text and _DOCUMENT.match(text) is not None


def may_begin(text: str) -> bool:
    """Whether `text` may still become, or is, the beginning of an SSML document."""
    rest = re.sub(r"(?s)^\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--.*?-->\s*)*", "", text)
    known = ("<speak", "<!DOCTYPE", "<?xml", "<!--")
    return any(rest.startswith(one) or one.startswith(rest) for one in known)


def parse(source: str) -> Marked:
    """Read the SSML document `source`. Raises `InvalidRequest` with line and column."""
    return _Reader(source).read()


class _Reader:
    def __init__(self, source: str) -> None:
        self._marked = Marked(source)
        self._source = source
        self._lead = len(source) - len(source.lstrip())
        # Where each character begins in UTF-8: expat counts bytes.
        self._starts = (
            None
            if source.isascii()
            else [*itertools.accumulate((len(c.encode()) for c in source[self._lead :]), initial=0)]
        )
        self._parser = expat.ParserCreate("utf-8")
        self._chunk: tuple[str, int] | None = None
        self._elements = Elements(self._marked)

    def read(self) -> Marked:
        parser = self._parser
        parser.StartDoctypeDeclHandler = self._doctype
        parser.StartElementHandler, parser.EndElementHandler = self._begin, self._end
        parser.CharacterDataHandler = self._characters
        # A text ends where the next thing begins, whatever that is.
        settle: Callable[..., None] = self._settle
        parser.CommentHandler = parser.ProcessingInstructionHandler = settle
        parser.StartCdataSectionHandler = parser.EndCdataSectionHandler = settle
        try:
            parser.Parse(self._source[self._lead :].encode(), True)
        except expat.ExpatError as error:
            raise self._broken(error) from error
        return self._marked

    @property
    def _at(self) -> int:
        """The character of the source that expat is at."""
        index = self._parser.CurrentByteIndex
        return self._lead + (index if self._starts is None else bisect.bisect_right(self._starts, index) - 1)

    def _broken(self, error: expat.ExpatError) -> Exception:
        at = self._at
        what = expat.ErrorString(error.code)
        if error.code == expat.errors.codes[expat.errors.XML_ERROR_UNDEFINED_ENTITY]:
            found = re.compile(r"&([^;\s]{0,40});?").match(self._source, at)
            what += f" {found[1]}" if found else ""
        return self._marked.error("SSML", at, f"it is not well-formed: {what}")

    def _doctype(self, *_: object) -> None:
        raise self._marked.error("DOCTYPE", self._at, "SSML has none here; leave it out")

    def _characters(self, data: str) -> None:
        self._settle()
        if not self._elements.hidden:
            self._chunk = data, self._at

    def _settle(self, *_: object) -> None:
        """Take the text that has ended, with its white space collapsed."""
        if self._chunk is None:
            return
        (data, start), self._chunk = self._chunk, None
        end = self._at
        if end - start == len(data):
            self._add(data, start)
        else:  # written in another way: an entity
            made = " ".join(data.split()) if not data.isspace() else ""
            made = " " * data[:1].isspace() + made + " " * (data[-1:].isspace() and bool(made))
            self._marked.add(made.lstrip() if self._is_spaced else made, start, end)

    @property
    def _is_spaced(self) -> bool:
        """Whether further white space would change nothing."""
        return not self._marked.text or self._marked.text[-1].isspace()

    def _add(self, data: str, start: int) -> None:
        """Add `data`, written from `start` on, with its white space collapsed."""
        marked = self._marked
        at = len(data) - len(data.lstrip()) if self._is_spaced else 0
        for found in _SPACES.finditer(data, at):
            marked.add(data[at : found.start()], start + at)
            marked.add(" ", start + found.start(), start + found.end())
            at = found.end()
        marked.add(data[at:], start + at)

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        self._settle()
        if not self._elements.open and name != "speak":
            raise self._marked.error(name, self._at, "the outermost element must be speak")
        self._elements.begin(name.rpartition(":")[2], attributes, self._at)

    def _end(self, _: str) -> None:
        self._settle()
        self._elements.end()
