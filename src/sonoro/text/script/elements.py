"""What the elements of SSML mean, for every syntax that has them. Knows no syntax."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sonoro.core.script import Said

from .marked import MAX_GAIN, MAX_RATE, MIN_RATE, Marked
from .values import STRENGTHS, gain_of, number_of, rate_of, seconds_of

MAX_DEPTH, MAX_ELEMENTS, MAX_ATTRIBUTES, MAX_ATTRIBUTE = 32, 2000, 16, 1000

_HIDDEN = frozenset(("desc", "meta", "metadata"))
_PLAIN = frozenset(("w", "token"))
_TEXT_ONLY = frozenset(("sub", "say-as", "phoneme", "spell"))
_PROSODY_IGNORED = ("pitch", "range", "contour", "duration")
_KNOWN = {
    "break": ("time", "strength"),
    "prosody": ("rate", "volume", *_PROSODY_IGNORED),
}
"""The attributes of elements that mean something without any: another is a mistake that one would not hear."""

BLOCKS = frozenset(("br", "div", *(f"h{n}" for n in range(1, 7)), "hr", "li", "ol", "table", "td", "th", "tr", "ul"))
"""Elements of HTML that part what is before them from what is behind."""

_UNCHANGED = frozenset(("default", "medium", "+0%", "0%", "+0st"))

Undo = Callable[[], None]
"""What ends an element."""


class Elements:
    """Tells `marked` what elements begin and end. `hidden` is above 0 within an element that is not spoken."""

    def __init__(self, marked: Marked) -> None:
        self.marked = marked
        self.open: list[tuple[str, Undo | None]] = []
        self.texts: list[int] = []
        """Where in the text the elements begin that are open and replace what they hold."""
        self.hidden = self._count = 0

    def begin(self, name: str, attributes: dict[str, str], at: int) -> None:
        """Begin element `name`, in small letters, at `at` of the source. Raises `InvalidRequest`."""
        self._check(name, attributes, at)
        undo: Undo | None = None
        if name in _HIDDEN:
            self.hidden += 1
            undo = self._show
        elif (take := _ELEMENTS.get(name)) is not None and not self.hidden:
            undo = take(self, attributes, at)
        elif take is None and name not in _PLAIN:
            self.marked.ignore(name, at)
            if name in BLOCKS and not self.hidden:
                self.marked.border(at)
        self.open.append((name, undo))

    def end(self) -> None:
        """End the element that began last."""
        _, undo = self.open.pop()
        if undo is not None:
            undo()

    def _show(self) -> None:
        self.hidden -= 1

    def _check(self, name: str, attributes: dict[str, str], at: int) -> None:
        self._count += 1
        if self.open and self.open[-1][0] in _TEXT_ONLY:
            raise self.marked.error(name, at, f"{self.open[-1][0]} holds text only")
        if len(self.open) >= MAX_DEPTH:
            raise self.marked.error(name, at, f"elements are nested at most {MAX_DEPTH} deep")
        if self._count > MAX_ELEMENTS:
            raise self.marked.error(name, at, f"there may be at most {MAX_ELEMENTS} elements")
        if attributes and (len(attributes) > MAX_ATTRIBUTES or max(map(len, attributes.values())) > MAX_ATTRIBUTE):
            raise self.marked.error(name, at, f"at most {MAX_ATTRIBUTES} attributes of {MAX_ATTRIBUTE} characters each")
        for other in set(attributes).difference(_KNOWN[name]) if name in _KNOWN and attributes else ():
            if not other.startswith("xml"):
                self.marked.ignore(f"{name} {other}", at)

    def needed(self, element: str, attributes: dict[str, str], name: str, at: int) -> str:
        """The attribute `name` of `element`. Raises `InvalidRequest` if it has none."""
        if name not in attributes:
            raise self.marked.error(f"{element} {name}", at, f"{element} needs the attribute {name}")
        return attributes[name]

    def styled(self, **changes: str | float | None) -> Undo:
        """Continue in a style with `changes`, until the returned call."""
        before = self.marked.style
        self.marked.turn(replace(before, **changes))  # type: ignore[arg-type]
        return partial(self.marked.turn, before)

    def _language(self, attributes: dict[str, str], _: int) -> Undo | None:
        tag = attributes.get("xml:lang")
        return self.styled(language=tag) if tag else None

    def _sentence(self, attributes: dict[str, str], at: int) -> Undo:
        border = partial(self.marked.border, at)
        border()
        end_language = self._language(attributes, at) if attributes else None
        if end_language is None:
            return border

        def end() -> None:
            end_language()
            border()

        return end

    def _break(self, attributes: dict[str, str], at: int) -> None:
        self.marked.pause(break_s(self.marked, attributes, at), "break time", at)

    def _said(self, kind: str, value: str | None, form: str, at: int) -> Undo:
        marked, start = self.marked, len(self.marked.text)
        self.texts.append(start)

        def end() -> None:
            self.texts.pop()
            written = marked.text[start:]
            marked.said.append(Said(start, len(marked.text), at, kind, written if value is None else value, form))

        return end

    def _sub(self, attributes: dict[str, str], at: int) -> Undo:
        return self._said("sub", self.needed("sub", attributes, "alias", at), "", at)

    def _say_as(self, attributes: dict[str, str], at: int) -> Undo:
        kind = self.needed("say-as", attributes, "interpret-as", at)
        return self._said(f"say-as {kind}", None, attributes.get("format", ""), at)

    def _phoneme(self, attributes: dict[str, str], at: int) -> Undo:
        value = self.needed("phoneme", attributes, "ph", at)
        return self._said("phoneme", value, attributes.get("alphabet", "ipa"), at)

    def _voice(self, attributes: dict[str, str], at: int) -> Undo | None:
        names, sex = attributes.get("name", ""), attributes.get("gender", "")
        if not names and not sex:
            self.marked.ignore("voice", at)
            return None
        language = attributes.get("xml:lang") or self.marked.style.language
        return self.styled(voice=names or f"<{sex}>", language=language)

    def _prosody(self, attributes: dict[str, str], at: int) -> Undo:
        marked = self.marked
        for name in _PROSODY_IGNORED:
            if name in attributes and attributes[name] not in _UNCHANGED:
                marked.ignore(f"prosody {name}", at)
        changes = {}
        if (given := attributes.get("rate")) is not None:
            changes["rate"] = _within(marked, "prosody rate", rate_of(given), marked.style.rate, at)
        if (given := attributes.get("volume")) is not None:
            changes["gain"] = _loud(marked, gain_of(given), at)
        return self.styled(**changes)

    def _lexicon(self, attributes: dict[str, str], at: int) -> None:
        name = self.needed("lexicon", attributes, "uri", at)
        raise self.marked.error(f"lexicon {name}", at, "no lexicon has that name; nothing is fetched")

    def _spell(self, _: dict[str, str], at: int) -> Undo:
        return self._said("say-as characters", None, "", at)

    def _speed(self, attributes: dict[str, str], at: int) -> None:
        ratio = number_of(self.needed("speed", attributes, "ratio", at))
        if ratio is None or not MIN_RATE <= ratio <= MAX_RATE:
            raise self.marked.error("speed ratio", at, f"it must be a number from {MIN_RATE:g} to {MAX_RATE:g}")
        self.marked.turn(replace(self.marked.style, rate=ratio))

    def _volume(self, attributes: dict[str, str], at: int) -> None:
        ratio = number_of(self.needed("volume", attributes, "ratio", at))
        if ratio is None or ratio > MAX_GAIN:
            raise self.marked.error("volume ratio", at, f"it must be a number from 0 to {MAX_GAIN:g}")
        self.marked.turn(replace(self.marked.style, gain=ratio))


def _emphasis(elements: Elements, attributes: dict[str, str], at: int) -> None:
    level, start = attributes.get("level", "moderate"), len(elements.marked.text)
    if level == "reduced":
        elements.marked.ignore("emphasis", at)
    elif level != "none":
        elements.marked.said.append(Said(start, start, at, "emphasis", ""))


def _mark(elements: Elements, attributes: dict[str, str], at: int) -> None:
    elements.marked.marks.append((at, elements.needed("mark", attributes, "name", at)))


def _emotion(elements: Elements, attributes: dict[str, str], at: int) -> None:
    elements.marked.turn(replace(elements.marked.style, emotion=_feeling(elements, "emotion", attributes, "value", at)))


def _express(elements: Elements, attributes: dict[str, str], at: int) -> Undo:
    return elements.styled(emotion=_feeling(elements, "express-as", attributes, "style", at))


def _feeling(elements: Elements, element: str, attributes: dict[str, str], name: str, at: int) -> str | None:
    feeling = " ".join(re.findall(r"[^\W\d_]+", elements.needed(element, attributes, name, at)))[:40]
    if not feeling or feeling == "neutral":
        return None
    elements.marked.ignore("emotion" if element == "emotion" else element, at, unless="emotion")
    return feeling


_ELEMENTS: dict[str, Callable[[Elements, dict[str, str], int], Undo | None]] = {
    "speak": Elements._language,
    "lang": Elements._language,
    "p": Elements._sentence,
    "s": Elements._sentence,
    "break": Elements._break,
    "sub": Elements._sub,
    "say-as": Elements._say_as,
    "phoneme": Elements._phoneme,
    "voice": Elements._voice,
    "prosody": Elements._prosody,
    "emphasis": _emphasis,
    "mark": _mark,
    "emotion": _emotion,
    "express-as": _express,
    "lexicon": Elements._lexicon,
    "spell": Elements._spell,
    "speed": Elements._speed,
    "volume": Elements._volume,
}


def knows(name: str) -> bool:
    """Whether element `name` means anything."""
    return name in _ELEMENTS or name in _HIDDEN or name in _PLAIN


def break_s(marked: Marked, attributes: dict[str, str], at: int) -> float:
    """The seconds of a break with `attributes`. Raises `InvalidRequest`."""
    if (time := attributes.get("time")) is not None:
        if (seconds := seconds_of(time)) is None:
            raise marked.error("break time", at, f"{time[:40]!r} is no time such as 750ms or 1.5s")
        return seconds
    strength = attributes.get("strength", "medium")
    if strength not in STRENGTHS:
        raise marked.error("break strength", at, f"it must be one of {', '.join(STRENGTHS)}")
    return STRENGTHS[strength]


def _within(marked: Marked, name: str, factor: float | None, outer: float, at: int) -> float:
    """The rate `factor` within one of `outer`. Raises `InvalidRequest` for what is no rate, or out of bounds."""
    rate = None if factor is None else factor * outer
    if rate is None or not MIN_RATE <= rate <= MAX_RATE:
        raise marked.error(name, at, f"it must be slow, fast or a percentage; {MIN_RATE:g} to {MAX_RATE:g} in all")
    return rate


def _loud(marked: Marked, factor: float | None, at: int) -> float:
    gain = None if factor is None else factor * marked.style.gain
    if gain is None or gain > MAX_GAIN:
        raise marked.error(
            "prosody volume", at, f"it must be soft, loud or decibels; at most {MAX_GAIN:g} times in all"
        )
    return gain
