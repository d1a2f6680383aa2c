"""A text with markup that is still arriving, read as far as it is settled. Knows no model and no lexicon."""

from __future__ import annotations

from sonoro.core.types import Markup

from . import ssml, tags
from .marked import Marked


class LiveMarked:
    """`marked` of what has come of a text with `markup`: append to its source, then `read`. SSML is read when all of it
    has come, into another object."""

    def __init__(self, markup: Markup) -> None:
        self.marked = Marked("")
        self._markup = markup
        self._tags = None if markup == "ssml" else tags.Tags(self.marked, markup)
        self._may_be_ssml = markup in ("auto", "voices")

    @property
    def is_marked(self) -> bool:
        """Whether there is markup."""
        return self._tags is None or self._tags.count > 0

    @property
    def is_waiting(self) -> bool:
        """Whether nothing can be read before more has come."""
        return self._may_be_ssml or self._tags is None

    @property
    def read_to(self) -> int:
        """How much of the source is read."""
        if self._tags is not None:
            return self._tags.read_to
        return len(self.marked.source) if self.marked.text else 0

    def pass_plain(self) -> None:
        """Take what has come for plain text."""
        assert self._tags is not None
        plain = self.marked.source
        self.marked.add(plain, 0)
        self._tags.read_to = len(plain)
        self._may_be_ssml = self._may_be_ssml and not plain.strip()

    def read(self, *, is_last: bool) -> int:
        """Read what has come; returns how much of the text of `marked` is settled. Raises `InvalidRequest`."""
        source = self.marked.source
        if self._may_be_ssml and (is_last or not ssml.may_begin(source)):
            self._may_be_ssml = False
        elif self._may_be_ssml and ssml.is_ssml(source):
            self._may_be_ssml, self._tags = False, None
        if self._may_be_ssml:
            return 0
        if self._tags is None:
            self.marked = ssml.parse(source) if is_last else self.marked
            return len(self.marked.text) if is_last else 0
        self._tags.read(len(source) if is_last else tags.complete(source, self._tags.read_to, self._markup))
        if is_last:
            self._tags.end()
        return self._tags.settled
