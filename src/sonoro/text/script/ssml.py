"""SSML 1.1, a subset, to `Marked`. Reads with expat and nothing else: no DTD, no entity of the text's own, no address
that is fetched. Names count without their prefix, as the texts of vendors lack the declarations."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.parsers import expat

from .elements import Elements
from .marked import Marked

_DOCUMENT = re.compile(r"\ufeff?\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--.*?-->\s*)*(?:<speak[\s/>]|<!DOCTYPE\b)", re.DOTALL)
_SPACES = re.compile(r"\s(?:\s+|(?<! ))")
"""White space that is not one space."""
_REFERENCE = re.compile(r"&(?:#x([0-9a-fA-F]+)|#([0-9]+)|(\w+));")
_NAMED = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}


def is_ssml(text: str) -> bool:
    """Whether `text` begins as an SSML document."""
    return "<speak" in text and _DOCUMENT.match(text) is not None


def may_begin(text: str) -> bool:
    """Whether `text` may still become, or is, the beginning of an SSML document."""
    rest = re.sub(r"(?s)^\ufeff?\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--.*?-->\s*)*", "", text)
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
        self._is_ascii, self._encoded = source.isascii(), source[self._lead :].encode()
        self._reached = 0, self._lead
        """A byte of what expat reads, and the character of the source that begins there."""
        self._parser = expat.ParserCreate("utf-8")
        self._begun: int | None = None
        """Where the text begins that expat is in."""
        self._is_verbatim = False
        self._elements = Elements(self._marked)

    def read(self) -> Marked:
        parser = self._parser
        parser.StartDoctypeDeclHandler = self._doctype
        parser.StartElementHandler, parser.EndElementHandler = self._begin, self._end
        parser.CharacterDataHandler = self._characters
        # A text ends where the next thing begins, whatever that is.
        settle: Callable[..., object] = self._settle
        parser.CommentHandler = parser.ProcessingInstructionHandler = settle
        parser.StartCdataSectionHandler = parser.EndCdataSectionHandler = self._turn
        try:
            parser.Parse(self._encoded, True)
        except expat.ExpatError as error:
            raise self._broken(error) from error
        return self._marked

    @property
    def _at(self) -> int:
        """The character of the source that expat is at."""
        index = self._parser.CurrentByteIndex
        if self._is_ascii:
            return self._lead + index
        byte, at = self._reached
        at += len(self._encoded[byte:index].decode(errors="ignore"))
        self._reached = index, at
        return at

    def _broken(self, error: expat.ExpatError) -> Exception:
        at = self._at
        what = expat.ErrorString(error.code)
        if error.code == expat.errors.codes[expat.errors.XML_ERROR_UNDEFINED_ENTITY]:
            found = re.compile(r"&([^;\s]{0,40});?").match(self._source, at)
            what += f" {found[1]}" if found else ""
        return self._marked.error("SSML", at, f"it is not well-formed: {what}")

    def _doctype(self, *_: object) -> None:
        raise self._marked.error("DOCTYPE", self._at, "SSML has none here; leave it out")

    def _characters(self, _: str) -> None:
        """Note where a text begins; expat tells of each line of it."""
        if self._begun is None and not self._elements.hidden:
            self._begun = self._at

    def _settle(self, *_: object) -> int:
        """Take the text that has ended, if any; returns where expat is."""
        at = self._at
        if self._begun is not None:
            start, self._begun = self._begun, None
            self._take(start, at)
        return at

    def _take(self, start: int, end: int) -> None:
        """Take the text that is written from `start` to `end`."""
        if not self._is_verbatim and self._source.find("&", start, end) >= 0:
            for found in _REFERENCE.finditer(self._source, start, end):
                self._add(start, found.start())
                start, made = found.end(), _referred(found)
                if not made.isspace():
                    self._marked.add(made, *found.span())
                elif not self._is_spaced:
                    self._marked.add(" ", *found.span())
        self._add(start, end)

    @property
    def _is_spaced(self) -> bool:
        """Whether further white space would change nothing."""
        return not self._marked.text or self._marked.text[-1].isspace()

    def _add(self, start: int, end: int) -> None:
        """Add what is written from `start` to `end` as it is, of white space the last character, as a space."""
        marked, data = self._marked, self._source[start:end]
        if self._is_spaced:
            data = data.lstrip()
            start = end - len(data)
        if not ("  " in data or "\n" in data or "\t" in data or "\r" in data) and (
            self._is_ascii or data.isprintable()
        ):
            marked.add(data, start)
            return
        words, origins, at, begun = [], marked.origins, 0, 0
        for found in _SPACES.finditer(data):
            words.append(data[at : found.start()])
            origins.add(found.start() - begun, start + begun)
            at, begun = found.end(), found.end() - 1
        words.append(data[at:])
        origins.add(len(data) - begun, start + begun)
        marked.text += " ".join(words)

    def _turn(self) -> None:
        """Begin or end a CDATA section."""
        self._settle()
        self._is_verbatim = not self._is_verbatim

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        at = self._settle()
        if not self._elements.open and name != "speak":
            raise self._marked.error(name, at, "the outermost element must be speak")
        self._elements.begin(name.rpartition(":")[2], attributes, at)

    def _end(self, _: str) -> None:
        self._settle()
        self._elements.end()


def _referred(found: re.Match[str]) -> str:
    """The character that a reference found by `_REFERENCE`, which expat has accepted, stands for."""
    if found[3]:
        return _NAMED[found[3]]
    return chr(int(found[1], 16) if found[1] else int(found[2]))
