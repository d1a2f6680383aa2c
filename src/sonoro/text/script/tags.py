"""Tags within plain text to `Marked`: those of ElevenLabs, Cartesia, Kokoro-FastAPI and Deepgram.

| form | syntaxes |
|---|---|
| `<break time="1s"/>`, `[pause:1.5s]`, `[word](/wˈɜːd/)` | all: no prose has them |
| other elements, `[pause 1.5s]`, `[pause]`, `[short pause]`, `[long pause]` | tags |
| `[voice:nora]`, `[rate:1.2]` | tags, voices |
| `\\{pause:500ms\\}`, `\\{"word": "x", "pronounce": "ɛks"\\}` | tags and deepgram |

A backslash before a form makes it text. In `tags`, any other element is left out and listed as ignored.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache

from sonoro.core.script import Said

from .elements import BLOCKS, Elements, knows
from .marked import MAX_RATE, MIN_RATE, Marked
from .values import number_of, seconds_of

LONGEST = 256
"""Characters of a tag at most, so that a live text need not be held back for long."""

_ATTRIBUTE = r"""[\w:.-]{1,40}(?:\s{0,9}=\s{0,9}(?:"[^"<>\n]{0,200}"|'[^'<>\n]{0,200}'|[^\s"'<>/]{1,200}))?"""
_REST = rf"(?:\s{{1,9}}{_ATTRIBUTE}){{0,16}}\s{{0,9}}/?>"
_LENGTH = r"\d{1,6}(?:\.\d{0,6})?\s?(?i:ms|s)"
_KNOWN = "spell|speed|volume|emotion|phoneme|sub|say-as|mark|voice|lang|prosody|emphasis|p|s"
_FORMS = {
    "break": ("<", rf"/?(?i:break){_REST}"),
    "pause": ("[", rf"(?i:pause):\s?{_LENGTH}\]"),
    "malformed_pause": ("[", r"(?i:pause)\s?:\s?[\d.][^\[\]\n]{0,20}\](?!\()"),
    "ipa": ("[", r"[^\[\]\n]{1,100}\]\(/(?=[^/()\n]{0,99}[^\x00-\x7f])[^/()\n]{1,100}/\)"),
    "long_pause": ("[", rf"(?i:pause)\s{{1,3}}{_LENGTH}\]|(?i:(?:short\s|long\s)?pause)\]"),
    "voice": ("[", r"(?i:voice):[^\[\]\n]{1,100}\]"),
    "rate": ("[", r"(?i:rate):[^\[\]\n]{1,20}\]"),
    "escaped_pause": ("\\", rf"\{{pause:\s?{_LENGTH}\\\}}"),
    "escaped_word": ("\\", r"""\{(?:\s?"(?:word|pronounce)"\s?:\s?"[^"\n]{0,100}"\s?,?){2}\s?\\\}"""),
    "bars": ("<", r"<[^<>\n|]{1,20}(?:\|[^<>\n|]{1,20}){0,40}>>"),
    "element": ("<", rf"/?[A-Za-z][\w:-]{{0,40}}{_REST}"),
    "malformed_break": ("<", r"/?(?i:break)\b[^<>\n]{0,999}>"),
    "malformed": ("<", rf"/?(?i:{_KNOWN})\b[^<>\n]{{0,999}}>"),
}
"""The forms by name: the character that each begins with, and the expression of its rest."""

_OF_AUTO = ("break", "pause", "malformed_pause", "ipa", "malformed_break")
_OF_SPEAKERS = ("voice", "rate")
_OF_DEEPGRAM = ("escaped_pause", "escaped_word")
_TAG = re.compile(r"<(/?)([A-Za-z][\w:-]*)(.*?)(/?)>", re.DOTALL)
_PAIR = re.compile(r"""([\w:.-]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>/]+)))?""")
_PAUSES = {"pause": 0.5, "short pause": 0.25, "long pause": 1.0}
_FENCE = re.compile(r"(?m)^[ \t]*```")
_STANDALONE = frozenset(("break", "speed", "volume", "emotion", "mark"))


_SYNTAXES = {
    "auto": _OF_AUTO,
    "voices": (*_OF_AUTO, *_OF_SPEAKERS),
    "tags": tuple(_FORMS),
    "deepgram": _OF_DEEPGRAM,
    "none": (),
}
_SIGNS_OF_AUTO = ("<break", "</break", "[pause")
_SIGNS = {
    "auto": _SIGNS_OF_AUTO,
    "voices": (*_SIGNS_OF_AUTO, "[voice", "[rate"),
    "tags": (">", "]", "\\"),
    "deepgram": ("\\{",),
}
"""What a text with forms of a syntax holds one of, in small letters; but for phonemes, which are not ASCII."""


_PARTS = {
    "break": r"</?(?:b|br|bre|brea|break(?:[^\w<>\n][^<>\n]*)?)?",
    "pause": r"\[(?:p|pa|pau|paus|pause|pause\s?:\s?(?:[\d.][^\[\]\n]{0,20})?)?",
    "ipa": r"\[(?:[^\[\]\n]{0,100}|[^\[\]\n]{1,100}\](?:\((?:/(?:[^/()\n]{0,100}/?)?)?)?)",
    "element": r"</?(?:[a-z][^<>\n]*)?|<<[^<>\n]*>?",
    "escaped": r"\\\{[^{}\n]*\\?",
}
"""What may still become a form, by what it begins like; it may hold more than becomes one."""


@cache
def _parts(syntax: str) -> re.Pattern[str]:
    names = {"tags": tuple(_PARTS), "deepgram": ("escaped",)}.get(syntax, ("break", "pause", "ipa"))
    made = "|".join(_PARTS[name] for name in names)
    return re.compile(rf"(?is:\\(?:{made})?|{made})" if syntax != "deepgram" else rf"(?is:\\|{made})")


_FIRST = re.compile(r"[<\[\\]")


def may_hold(text: str) -> bool:
    """Whether `text` holds a character that a tag, or a part of one, begins with."""
    return "<" in text or "[" in text or "\\" in text


def complete(source: str, start: int, syntax: str) -> int:
    """Up to where `source` can be read from `start` on, whatever follows: before what may still become a tag."""
    if syntax == "none":
        return len(source)
    at, pattern = start, forms(syntax)
    while begun := _FIRST.search(source, at):
        at = begun.start()
        may_go_on = len(source) - at <= LONGEST and _parts(syntax).fullmatch(source, at) is not None
        found = pattern.match(source, at)
        # [pause] may be the word of [pause](/…/), and \[ the beginning of an escaped form.
        if may_go_on and (found is None or found[0][-1] in "]\\[<{}"):
            return at
        at = at + 1 if found is None else found.end()
    return len(source)


@cache
def forms(syntax: str) -> re.Pattern[str]:
    """The tags of `syntax`, each perhaps behind a backslash that makes it text."""
    names = _SYNTAXES[syntax]
    made: dict[str, list[str]] = {"<": [], "[": [], "\\": []}
    for name in names:
        first, rest = _FORMS[name]
        made[first].append(f"(?P<{name}>{rest})")
    whole = [rf"\{first}(?:{rest})" for first, rest in map(_FORMS.__getitem__, names) if first != "\\"]
    if syntax == "tags":
        whole.append(r"[\[<{}\]>\\]")
    if whole:
        made["\\"].append(rf"(?P<text>{'|'.join(whole)})")
    # A search that begins with one of few letters is quick, and so is the refusal of what nothing closes.
    closed = {"<": r"(?=<?[^<>\n]*>)", "[": r"(?=[^\[\]\n]*\])"}
    parts = [rf"\{one}{closed.get(one, '')}(?:{'|'.join(rest)})" for one, rest in made.items() if rest]
    return re.compile("|".join(parts) or "(?!)")


def parse(source: str, syntax: str) -> Marked | None:
    """Read the tags in `source`; None if it has none. Raises `InvalidRequest` with line and column."""
    if not may_hold(source):
        return None
    folded = source.lower() if (is_ascii := source.isascii()) else source.casefold()
    if not any(sign in folded for sign in _SIGNS[syntax]) and (is_ascii or "](/" not in folded):
        return None
    tags = Tags(Marked(source), syntax)
    tags.read(len(source))
    tags.end()
    return tags.marked if tags.count else None


@lru_cache
def _tag(form: str) -> tuple[str, bool, bool, dict[str, str]]:
    """The name of a tag, whether it ends its element, whether it is all of it, and its attributes."""
    found = _TAG.fullmatch(form)
    assert found is not None
    name = found[2].lower().rpartition(":")[2]
    attributes = {pair[1].lower(): pair[2] or pair[3] or pair[4] or "" for pair in _PAIR.finditer(found[3])}
    return name, bool(found[1]), bool(found[4]) or name in _STANDALONE, attributes


class Tags:
    """Reads the tags of `syntax` in the source of `marked`, which may grow, into `marked`."""

    def __init__(self, marked: Marked, syntax: str) -> None:
        self.marked = self._marked = marked
        self._elements, self._forms = Elements(marked), forms(syntax)
        self._is_guessed = syntax in ("auto", "voices")
        self.read_to = self.count = 0
        """How much of the source is read, and how many tags were in it."""

    @property
    def settled(self) -> int:
        """How much of the text is final: not what stands in an element that has still to end."""
        return min((start for start in self._elements.texts), default=len(self._marked.text))

    def read(self, end: int) -> None:
        """Read the source up to character `end`, where no tag is broken in two."""
        for found in self._forms.finditer(self._marked.source, self.read_to, end):
            if self._is_code(found.start()):
                continue
            self._add(self.read_to, found.start())
            self.read_to, self.count = found.end(), self.count + 1
            assert found.lastgroup is not None
            _TAKES[found.lastgroup](self, found[0], found.start())
        self._add(self.read_to, end)
        self.read_to = end

    def _is_code(self, at: int) -> bool:
        """Whether what begins at `at`, where tags are only guessed at, is code: behind a backtick or in a fence."""
        source = self._marked.source
        if not self._is_guessed or source.find("`", 0, at) < 0:
            return False
        return source[at - 1] == "`" or len(_FENCE.findall(source, 0, at)) % 2 == 1

    def end(self) -> None:
        """End all elements that are open."""
        while self._elements.open:
            self._elements.end()

    def _add(self, start: int, end: int) -> None:
        if not self._elements.hidden:
            self._marked.add(self._marked.source[start:end], start)

    def _text(self, form: str, at: int) -> None:
        self._add(at + 1, at + len(form))

    def _element(self, form: str, at: int) -> None:
        name, is_end, is_whole, attributes = _tag(form)
        if not knows(name):
            # It holds nothing: in HTML many elements are never closed.
            if not is_end:
                self._marked.ignore(name, at)
            if name in BLOCKS:
                self._marked.border(at)
            return
        if is_end:
            self._close(name)
            return
        if name in ("p", "s"):
            self._close(name)
        self._elements.begin(name, attributes, at)
        if is_whole:
            self._elements.end()

    def _malformed(self, form: str, at: int) -> None:
        self._marked.ignore(re.split(r"[^\w-]", form.strip("</"))[0].lower(), at)

    def _close(self, name: str) -> None:
        """End the innermost open element `name` and those in it; nothing if there is none."""
        if any(name == opened for opened, _ in self._elements.open):
            while self._elements.open[-1][0] != name:
                self._elements.end()
            self._elements.end()

    def _pause(self, form: str, at: int) -> None:
        inner = form.strip("\\{}[]").lower()
        length = re.sub(r"^pause[:\s]\s*", "", inner).replace(" ", "")
        seconds = _PAUSES.get(" ".join(inner.split())) if inner.endswith("pause") else seconds_of(length)
        assert seconds is not None
        self._marked.pause(seconds, "pause", at)

    def _malformed_pause(self, form: str, at: int) -> None:
        self._marked.ignore(f"pause {form[1:-1].partition(':')[2].strip()}", at)

    def _ipa(self, form: str, at: int) -> None:
        word, phonemes = form[1:-2].split("](/", 1)
        self._pronounced(word, at + 1, phonemes, at)

    def _pronounced(self, word: str, start: int, phonemes: str, at: int) -> None:
        marked, first = self._marked, len(self._marked.text)
        marked.add(word, start)
        marked.said.append(Said(first, len(marked.text), at, "phoneme", phonemes, "ipa"))

    def _bars(self, form: str, at: int) -> None:
        start = len(self._marked.text)
        self._marked.said.append(Said(start, start, at, "phoneme", form[2:-2].replace("|", ""), "ipa"))

    def _escaped_word(self, form: str, at: int) -> None:
        try:
            given = json.loads("{" + form[2:-2] + "}")
            word, phonemes = given["word"], given["pronounce"]
        except (ValueError, KeyError) as error:
            raise self._marked.error("pronounce", at, "give word and pronounce") from error
        # Found as it was sent, unless its JSON is escaped.
        self._pronounced(word, at + max(form.find(word, form.find(":")), 0), phonemes, at)

    def _voice(self, form: str, at: int) -> None:
        self._marked.turn(replace(self._marked.style, voice=form[1:-1].partition(":")[2].strip()))

    def _rate(self, form: str, at: int) -> None:
        rate = number_of(form[1:-1].partition(":")[2])
        if rate is None or not MIN_RATE <= rate <= MAX_RATE:
            raise self._marked.error("rate", at, f"it must be a number from {MIN_RATE:g} to {MAX_RATE:g}")
        self._marked.turn(replace(self._marked.style, rate=rate))


_TAKES: dict[str, Callable[[Tags, str, int], None]] = {
    "text": Tags._text,
    "break": Tags._element,
    "element": Tags._element,
    "malformed_break": Tags._malformed,
    "malformed": Tags._malformed,
    "pause": Tags._pause,
    "long_pause": Tags._pause,
    "escaped_pause": Tags._pause,
    "malformed_pause": Tags._malformed_pause,
    "ipa": Tags._ipa,
    "bars": Tags._bars,
    "escaped_word": Tags._escaped_word,
    "voice": Tags._voice,
    "rate": Tags._rate,
}
