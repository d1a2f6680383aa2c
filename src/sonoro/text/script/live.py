"""Markup in a text that is still arriving: tags may be cut anywhere, and plain text is delayed by nothing."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sonoro.core.errors import InvalidRequest
from sonoro.core.script import Line, Said
from sonoro.core.types import Markup, is_speakable
from sonoro.text.live_feed import LiveFeed
from sonoro.text.origins import Origins
from sonoro.text.splitting import Segment

from . import tags
from .lines import Composer, Delivery, is_ended
from .live_marked import LiveMarked
from .marked import Marked, Style

_MOST_SAID = 4
_TAIL = 32
"""Characters kept of what was said."""

MakeFeed = Callable[[Line, list[Segment], int], LiveFeed]
"""Makes the feed of a line, which appends to segments, and whose text begins at a character of all that is spoken."""


@dataclass
class _LiveLine:
    """A line, the feed of its text, the silence before it, whether there is anything to speak in it, and the end of
    what was said."""

    line: Line
    feed: LiveFeed
    lead_s: float = 0.0
    has_words: bool = False
    said: str = ""


class LiveScript:
    """A `LiveFeed` of text with the tags of `markup`: a feed for each line.

    What is spoken has one origin for each character in the text as it came: `origins`. It `is_marked` once a tag has
    come. SSML is spoken when all of it has come."""

    def __init__(self, markup: Markup, delivery: Delivery, make_feed: MakeFeed, max_characters: int) -> None:
        self.segments: list[Segment] = []
        self.origins = Origins()
        self.is_ended = False
        self._delivery, self._make_feed, self._most = delivery, make_feed, max_characters
        self._reader, self._given = LiveMarked(markup), list[Said]()
        self._composer = Composer(self._marked, (), delivery)
        # While no character has come that a tag begins with, text passes unread.
        self._is_plain, self._has_said = markup != "ssml", False
        self._taken = self._turned = self._index = 0
        self._style, self._paused = Style(), dict[int, float]()
        self._lines = deque([self._new_line(Line(text="", origins=()))])

    @property
    def is_marked(self) -> bool:
        return self._reader.is_marked or self._has_said

    @property
    def _marked(self) -> Marked:
        return self._reader.marked

    @property
    def characters(self) -> int:
        """Characters that have come."""
        return len(self._marked.source)

    @property
    def marks(self) -> list[tuple[int, str]]:
        """The marks so far, by places in the text as it came."""
        return self._marked.marks

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was not honoured so far."""
        return tuple(self._composer.warnings)

    @property
    def has_more(self) -> bool:
        """Whether there is text beyond the whole segments, or more may come."""
        return not self.is_ended or any(one.feed.has_more for one in self._lines)

    def append(self, text: str, said: Sequence[Said] = ()) -> str:
        """Append `text`, of which is `said` what lexicons say; returns what is to be spoken next. Raises as
        `LiveFeed.append` does, and `InvalidRequest` for markup that is not honoured."""
        if self.is_ended:
            raise InvalidRequest("text", text, "the text was already ended")
        if self.characters + len(text) > self._most:
            limit = f"at most {self._most} characters for a live request"
            raise InvalidRequest("text", f"{self.characters + len(text)} characters", limit)
        if self._is_plain and (said or tags.may_hold(text)):
            self._read_plain()
        self._marked.source += text
        self._given += said
        self._has_said = self._has_said or bool(said)
        return self._lines[-1].feed.append(text) if self._is_plain else self._take(is_last=False)

    def end(self) -> str:
        """Mark the text as complete; returns what of it was held back."""
        if self.is_ended:
            return ""
        rest = "" if self._is_plain else self._take(is_last=True)
        self.is_ended = True
        self._lines[-1].feed.end()
        return rest

    def advance(self, index: int) -> None:
        """As `LiveFeed.advance`."""
        self._index = index
        while True:
            first, known = self._lines[0], len(self.segments)
            first.feed.advance(index)
            for segment in self.segments[known:]:
                segment.line, segment.lead_s, first.lead_s = first.line, first.lead_s, 0.0
            if not first.feed.is_ended or first.feed.has_more:
                return
            if self.segments and self.segments[-1].line is first.line:
                self.segments[-1].ends_line = True
            if len(self._lines) == 1:
                return
            self._lines.popleft()
            self._lines[0].lead_s += first.lead_s

    def close(self, index: int) -> None:
        """As `LiveFeed.close`."""
        self._lines[0].feed.close(index)

    def cut_off(self, index: int) -> None:
        """As `LiveFeed.cut_off`."""
        self._lines[0].feed.cut_off(index)

    def _read_plain(self) -> None:
        """Take in the text that has passed unread."""
        plain, line, self._is_plain = self._marked.source, self._lines[-1], False
        self._reader.pass_plain()
        self.origins.add(len(plain), 0)
        line.said, line.has_words = plain[-_TAIL:], is_speakable(plain)
        self._taken = len(plain)

    def _take(self, *, is_last: bool) -> str:
        """Read what has come as far as it is settled; returns what is to be spoken of it."""
        before = self._marked
        end = self._reader.read(is_last=is_last)
        if self._marked is not before:
            self._composer, self._taken, self._turned = Composer(self._marked, (), self._delivery), 0, 0
        origins, read_to = self._marked.origins, self._reader.read_to
        known = [one for one in self._given if one.end <= read_to]
        self._given = self._given[len(known) :]
        self._composer.update([one._replace(start=origins.find(one.start), end=origins.find(one.end)) for one in known])
        said = self._speak_to(min([end, *(origins.find(one.start) for one in self._given)]))
        return said + self._speak(self._taken, self._taken, is_last=True) if is_last else said

    def _speak_to(self, end: int) -> str:
        """Give the feeds the text up to character `end`, and begin lines where it says so."""
        marked, said = self._marked, ""
        cuts = {*marked.pauses, *(at for at, _ in marked.styles), end}
        for cut in sorted(cut for cut in cuts if self._taken <= cut <= end):
            said += self._speak(self._taken, cut)
            self._taken = cut
            pause_s = marked.pauses.get(cut, 0.0) - self._paused.get(cut, 0.0)
            if self._turn(cut) or pause_s:
                self._paused[cut] = marked.pauses.get(cut, 0.0)
                added, lead_s = self._end_line(pause_s)
                said += added
                self._lines.append(self._new_line(self._composer.styled(self._style, cut), lead_s))
        return said

    def _turn(self, place: int) -> bool:
        """Take the styles up to character `place`; returns whether one of them differs from the one before it."""
        styles, has_changed = self._marked.styles, False
        while self._turned < len(styles) and styles[self._turned][0] <= place:
            style = self._composer.honoured(styles[self._turned][1])
            has_changed |= style != self._style
            self._style = style
            self._turned += 1
        return has_changed

    def _speak(self, start: int, end: int, *, is_last: bool = False) -> str:
        """Speak characters `start` to `end`. Raises `InvalidRequest` if there is too much with the aliases."""
        if len(self.origins) > _MOST_SAID * self._most:
            raise InvalidRequest("text", f"{len(self.origins)} characters", "its aliases make too many of it")
        last = self._lines[-1]
        spoken = self._composer.spoken(start, end, last.said, is_last=is_last)
        if not last.has_words and is_speakable(spoken.text):
            spoken = self._composer.cued(self._style, start, spoken)
        self.origins.extend(spoken.origins, self._marked.origins)
        return self._give(spoken.text)

    def _give(self, text: str) -> str:
        line = self._lines[-1]
        line.has_words = line.has_words or is_speakable(text)
        line.said = (line.said + text)[-_TAIL:]
        return line.feed.append(text)

    def _end_line(self, pause_s: float) -> tuple[str, float]:
        """End the last line with a pause behind it; returns what that adds to the text, and the pause if the line has
        been spoken, so that the next one must begin with it."""
        added = ""
        if len(self._lines) > 1 and not self._lines[-1].has_words:
            pause_s += self._lines.pop().lead_s
        last = self._lines[-1]
        is_bare = last.has_words and not last.feed.is_ended and not is_ended(last.said.rstrip())
        if pause_s and is_bare and self._delivery.spec.text_normalizer is None:
            at = self.origins[-1][1]
            self.origins.add(1, at, at)
            added = self._give(",")
        last.feed.end()
        if not last.has_words or not (last.feed.has_more or self._index < len(self.segments)):
            return added, pause_s
        if pause_s:
            line = msgspec.structs.replace(last.line, pause_s=last.line.pause_s + pause_s)
            for segment in self.segments:
                segment.line = line if segment.line is last.line else segment.line
            last.line = line
        if not last.feed.has_more:
            self.segments[-1].ends_line = True
        return added, 0.0

    def _new_line(self, line: Line, lead_s: float = 0.0) -> _LiveLine:
        return _LiveLine(line, self._make_feed(line, self.segments, len(self.origins)), lead_s)
