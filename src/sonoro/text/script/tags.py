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
from functools import cache

from .elements import Elements
from .marked import MAX_RATE, MIN_RATE, Marked, Said
from .values import number_of, seconds_of

LONGEST = 256
"""Characters of a tag at most, so that a live text need not be held back for long."""

_ATTRIBUTE = r"""[\w:.-]{1,40}(?:\s{0,9}=\s{0,9}(?:"[^"<>\n]{0,200}"|'[^'<>\n]{0,200}'|[^\s"'<>/]{1,200}))?"""
_REST = rf"(?:\s{{1,9}}{_ATTRIBUTE}){{0,16}}\s{{0,9}}/?>"
_LENGTH = r"\d{1,6}(?:\.\d{0,6})?\s?(?i:ms|s)"
_KNOWN = "spell|speed|volume|emotion|phoneme|sub|say-as|mark|voice|lang|prosody|emphasis|p|s"
_FORMS = {
    "break": rf"</?(?i:break){_REST}",
    "pause": rf"\[(?i:pause):\s?{_LENGTH}\]",
    "ipa": r"\[[^\[\]\n]{1,100}\]\(/(?=[^/()\n]{0,99}[^\x00-\x7f])[^/()\n]{1,100}/\)",
    "long_pause": rf"\[(?i:pause)\s{{1,3}}{_LENGTH}\]|\[(?i:(?:short\s|long\s)?pause)\]",
    "voice": r"\[(?i:voice):[^\[\]\n]{1,100}\]",
    "rate": r"\[(?i:rate):[^\[\]\n]{1,20}\]",
    "escaped_pause": rf"\\\{{pause:\s?{_LENGTH}\\\}}",
    "escaped_word": r"""\\\{(?:\s?"(?:word|pronounce)"\s?:\s?"[^"\n]{0,100}"\s?,?){2}\s?\\\}""",
    "bars": r"<<[^<>\n|]{1,20}(?:\|[^<>\n|]{1,20}){0,40}>>",
    "element": rf"</?[A-Za-z][\w:-]{{0,40}}{_REST}",
    "malformed_break": r"</?(?i:break)\b[^<>\n]{0,999}>",
    "malformed": rf"</?(?i:{_KNOWN})\b[^<>\n]{{0,999}}>",
}
_OF_AUTO = ("break", "pause", "ipa", "malformed_break")
_OF_SPEAKERS = ("voice", "rate")
_OF_DEEPGRAM = ("escaped_pause", "escaped_word")
_TAG = re.compile(r"<(/?)([A-Za-z][\w:-]*)(.*?)(/?)>", re.DOTALL)
_PAIR = re.compile(r"""([\w:.-]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>/]+)))?""")
_PAUSES = {"pause": 0.5, "short pause": 0.25, "long pause": 1.0}
_STANDALONE = frozenset(("break", "speed", "volume", "emotion", "mark"))


_SYNTAXES = {
    "auto": _OF_AUTO,
    "voices": (*_OF_AUTO, *_OF_SPEAKERS),
    "tags": tuple(_FORMS),
    "deepgram": _OF_DEEPGRAM,
}


@cache
def forms(syntax: str) -> re.Pattern[str]:
    """The tags of `syntax`, each perhaps behind a backslash that makes it text."""
    names = _SYNTAXES[syntax]
    made = [rf"(?P<{name}>{_FORMS[name]})" for name in names]
    known = "|".join(_FORMS[name] for name in names if name not in _OF_DEEPGRAM)
    if syntax == "tags":
        known += r"|[\[<{}\]>\\]"
    if known:
        made.append(rf"(?P<text>\\(?:{known}))")
    return re.compile(rf"(?=[<\[\\])(?:{'|'.join(made)})")


def parse(source: str, syntax: str) -> Marked | None:
    """Read the tags in `source`; None if it has none. Raises `InvalidRequest` with line and column."""
    pattern = forms(syntax)
    return _Tags(Marked(source)).read(pattern) if pattern.search(source) is not None else None


class _Tags:
    def __init__(self, marked: Marked) -> None:
        self._marked = marked
        self._elements = Elements(marked)

    def read(self, pattern: re.Pattern[str]) -> Marked:
        marked, at = self._marked, 0
        for found in pattern.finditer(marked.source):
            self._add(at, found.start())
            at = found.end()
            assert found.lastgroup is not None
            _TAKES[found.lastgroup](self, found[0], found.start())
        self._add(at, len(marked.source))
        while self._elements.open:
            self._elements.end()
        return marked

    def _add(self, start: int, end: int) -> None:
        if not self._elements.hidden:
            self._marked.add(self._marked.source[start:end], start)

    def _text(self, form: str, at: int) -> None:
        self._add(at + 1, at + len(form))

    def _element(self, form: str, at: int) -> None:
        found = _TAG.fullmatch(form)
        assert found is not None
        name = found[2].lower().rpartition(":")[2]
        if found[1]:
            self._close(name)
            return
        attributes = {pair[1].lower(): pair[2] or pair[3] or pair[4] or "" for pair in _PAIR.finditer(found[3])}
        self._elements.begin(name, attributes, at)
        if found[4] or name in _STANDALONE:
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


_TAKES: dict[str, Callable[[_Tags, str, int], None]] = {
    "text": _Tags._text,
    "break": _Tags._element,
    "element": _Tags._element,
    "malformed_break": _Tags._malformed,
    "malformed": _Tags._malformed,
    "pause": _Tags._pause,
    "long_pause": _Tags._pause,
    "escaped_pause": _Tags._pause,
    "ipa": _Tags._ipa,
    "bars": _Tags._bars,
    "escaped_word": _Tags._escaped_word,
    "voice": _Tags._voice,
    "rate": _Tags._rate,
}
