"""`Marked` to the `Script` that an engine speaks: lines that end at pauses and where the style changes, with what is
said in place of what is written. Knows what a model honours by its `ModelSpec` alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from sonoro.core.blends import find_voice
from sonoro.core.errors import UnknownVoice
from sonoro.core.script import Line, Said, Script
from sonoro.core.types import ModelSpec, OnMarkup, is_speakable, listed
from sonoro.text.origins import Origins
from sonoro.text.splitting import language_name

from .lexicon import Lexicon, matches
from .marked import Marked, Style, place_of
from .phonemes import arpabet
from .say_as import KINDS, say

MAX_WARNINGS = 64
_ENDS = tuple(".,;:!?…。、，；：！？—–-")
_CLOSERS = "\"'”’»)]}」』）"


@dataclass(frozen=True)
class Delivery:
    """How markup is taken: by the model of `spec`, for a request in `language`. `aliases` are further names of its
    voices, in lower case."""

    spec: ModelSpec
    aliases: Mapping[str, str]
    on_markup: OnMarkup = "refuse"
    language: str = "auto"
    cast: Collection[str] = ()
    """Names, in lower case, of voices that are not the model's own."""

    def find_voice(self, name: str) -> str | None:
        """The model's own name of a voice, or a name of the cast; None if it is unknown."""
        own = find_voice(name, self.spec.voices, self.aliases, can_blend=self.spec.can_blend)
        return name.lower() if own is None and name.lower() in self.cast else own

    @property
    def is_english(self) -> bool:
        return self.spec.text_normalizer == "english" or self.language.lower() in ("auto", "en", "english")


def honoured(spec: ModelSpec) -> tuple[str, ...]:
    """The markup that the model of `spec` honours, by name."""
    able = {
        "say-as": "english" in spec.languages or spec.languages == ("auto",),
        "voice": bool(spec.voices),
        "language": spec.languages != ("auto",),
        "phoneme": spec.arpabet is not None,
        "emphasis": spec.cues is not None,
        "emotion": spec.cues is not None or spec.accepts_instructions,
    }
    always = ("pause", "alias", "lexicon", "rate", "volume", "sentence", "mark")
    return (*always, *(name for name, is_able in able.items() if is_able))


def script_of(marked: Marked, lexicons: Sequence[Lexicon], delivery: Delivery, *, is_plain: bool) -> Script | None:
    """The script of `marked`; None if it says nothing but its text. Raises `InvalidRequest` for what is not honoured,
    if the delivery says so."""
    composed = Composer(marked, lexicons, delivery)
    if not composed.changes:
        return None
    return composed.script(is_plain=is_plain)


@dataclass
class Spoken:
    """A text to say, and the written span of each of its characters; `before` is what was said before it."""

    text: str = ""
    origins: Origins = field(default_factory=Origins)
    before: str = ""

    def add(self, text: str, start: int) -> None:
        """Append `text`, written from `start` on."""
        self.text += text
        self.origins.add_run(len(text), start)

    def replace(self, words: str, start: int, end: int) -> None:
        """Append `words` for what is written from `start` to `end`."""
        self.text += words
        self.origins.add(len(words), start, end)

    def end_sentence(self, at: int) -> None:
        """End a sentence at `at`: with a full stop, unless there is punctuation."""
        said = self.text.rstrip()
        last = said or self.before.rstrip()
        if last and not is_ended(last):
            self.text = said
            self.origins.cut(len(said))
            self.replace(". ", at, at)

    def end_line(self) -> None:
        """End the text in a comma, unless there is punctuation: else a model may speak on."""
        if not is_ended(self.text):
            self.text += ","
            self.origins.add_run(1, self.origins.end, 0, 0)

    def stripped(self) -> Spoken:
        """Leave out white space at both ends; returns itself."""
        text = self.text.rstrip()
        self.origins.cut(len(text))
        self.text = text.lstrip()
        if lead := len(text) - len(self.text):
            self.origins = Origins(self.origins.part(lead, len(text)))
        return self


def is_ended(text: str) -> bool:
    """Whether `text` ends in punctuation."""
    return text.rstrip(_CLOSERS).endswith(_ENDS)


class Composer:
    """Makes lines of `marked`, which may grow: then `update` comes before its new text is used.
    `warnings` name what is not honoured. Raises `InvalidRequest` instead, if the delivery says so."""

    def __init__(self, marked: Marked, lexicons: Sequence[Lexicon], delivery: Delivery) -> None:
        self._marked, self._delivery, self._spec = marked, delivery, delivery.spec
        self.warnings: list[str] = []
        self._said: list[tuple[int, int, bool, str]] = []
        """Borders, and what is said in place of what is written: start, end, that it is not a border, and the words."""
        self._seen = 0, 0, 0
        self.update()
        self.update([*self._of_lexicons(lexicons)] if lexicons else ())

    def update(self, more: Sequence[Said] = ()) -> None:
        """Take in what `marked` has gained, and `more` that is said, of which it does not know."""
        marked, (ignored, said, borders) = self._marked, self._seen
        for name, at, unless in marked.ignored[ignored:]:
            if unless not in honoured(self._spec):
                self._refuse(name, at)
        if new := self._spoken([*marked.said[said:], *more]) + [(at, at, False, "") for at in marked.borders[borders:]]:
            self._said = sorted(self._said + new)
        self._seen = len(marked.ignored), len(marked.said), len(marked.borders)

    @property
    def changes(self) -> bool:
        """Whether anything differs from the text as it was sent."""
        return bool(self._said or self.warnings or self._marked.text != self._marked.source)

    def script(self, *, is_plain: bool) -> Script:
        marked = self._marked
        pauses_s, parts = [0.0], list[tuple[Style, int, Spoken]]()
        styles = [(at, self.honoured(style)) for at, style in marked.styles]
        styles = [one for number, one in enumerate(styles) if not number or one[1] != styles[number - 1][1]]
        starts = [at for at, _ in styles]
        cuts = sorted({0, *marked.pauses, *starts})
        for start, end in pairwise([*cuts, len(marked.text)]):
            pauses_s[-1] += marked.pauses.get(start, 0.0)
            is_last = start == cuts[-1]
            if is_speakable((spoken := self.spoken(start, end, is_last=is_last).stripped()).text):
                style = styles[bisect_right(starts, start) - 1][1]
                parts.append((style, start, self.cued(style, start, spoken)))
                pauses_s.append(0.0)
        lead_s, *pauses_s = pauses_s
        if self._spec.text_normalizer is None:
            for (_, _, spoken), pause_s in zip(parts[:-1], pauses_s[:-1], strict=True):
                if pause_s:
                    spoken.end_line()
        lines = [self.styled(*part, pause_s=pause_s) for part, pause_s in zip(parts, pauses_s, strict=True)]
        return Script(
            text=marked.text,
            origins=marked.origins.runs,
            lines=tuple(lines),
            lead_s=lead_s,
            marks=tuple(marked.marks),
            warnings=tuple(self.warnings),
            is_plain=is_plain,
        )

    def _refuse(self, name: str, at: int) -> None:
        """Note markup that is not honoured; raise `InvalidRequest` if such a text is refused."""
        if self._delivery.on_markup == "refuse":
            raise self._marked.error(name, at, f"{self._spec.name} cannot honour it; on_markup plain speaks the text")
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(f"{name} ({place_of(self._marked.source, at)})")

    def _at(self, place: int) -> int:
        """Where character `place` of the text stands in the source."""
        origins = self._marked.origins
        return origins[place][0] if place < len(origins) else len(self._marked.source)

    def _of_lexicons(self, lexicons: Sequence[Lexicon]) -> Iterator[Said]:
        """What `lexicons` say between the borders of other markup."""
        for start, end in self._marked.free(0, len(self._marked.text)):
            for found in matches(self._marked.text, lexicons, start, end):
                yield found.said._replace(at=self._at(found.start))

    def _spoken(self, said: Sequence[Said]) -> list[tuple[int, int, bool, str]]:
        """The words for each of `said` that is honoured, in order."""
        spoken = []
        for one in sorted(said):
            kind, _, of = one.kind.partition(" ")
            words: str | None = None
            if kind in ("sub", "alias"):
                words = one.value
            elif kind == "say-as" and of in KINDS and self._delivery.is_english:
                words = say(of, one.value, one.form)
            elif kind == "emphasis" and self._spec.cues is not None:
                words = "emphasis".join(self._spec.cues) + " "
            elif kind == "phoneme" and self._spec.arpabet is not None and self._delivery.is_english:
                words = self._pronounced(one, *self._spec.arpabet)
            if words is None:
                self._refuse(one.kind, one.at)
            else:
                spoken.append((one.start, one.end, True, words))
        return spoken

    def _pronounced(self, one: Said, before: str, after: str) -> str | None:
        """The phonemes of `one` as they stand in a text, between `before` and `after`; None for another alphabet."""
        try:
            phones = arpabet(one.value, one.form)
        except ValueError as error:
            raise self._marked.error("phoneme", one.at, f"{error} is no English phone in {one.form}") from error
        return None if phones is None else f"{before}{phones}{after}"

    def spoken(self, start: int, end: int, before: str = "", *, is_last: bool = False) -> Spoken:
        """What is said for characters `start` to `end`, after `before` in the same line. Words for no character belong
        to what begins where they stand, or to the last of all."""
        spoken, at, said = Spoken(before=before), start, self._said
        for first, last, has_words, words in said and said[bisect_left(said, (start,)) : bisect_left(said, (end + 1,))]:
            if first < at or last > end or (first == start and not has_words):
                continue
            if first == end and has_words and not is_last:
                continue
            spoken.add(self._marked.text[at:first], at)
            if has_words:
                spoken.replace(words, first, last)
            else:
                spoken.end_sentence(first)
            at = last
        spoken.add(self._marked.text[at:end], at)
        return spoken

    def honoured(self, style: Style) -> Style:
        """`style` without what the model cannot do."""
        can = style.emotion is None or "emotion" in honoured(self._spec)
        return style if can else replace(style, emotion=None)

    def cued(self, style: Style, start: int, spoken: Spoken) -> Spoken:
        """`spoken`, from character `start` on, with what the model reads before it as its emotion."""
        if style.emotion is None or self._spec.accepts_instructions or self._spec.cues is None:
            return spoken
        made = Spoken()
        made.replace(style.emotion.join(self._spec.cues) + " ", start, start)
        made.origins.append(spoken.origins)
        return Spoken(made.text + spoken.text, made.origins)

    def styled(self, style: Style, start: int, spoken: Spoken | None = None, pause_s: float = 0.0) -> Line:
        """The line of `spoken` in `style`, which begins at character `start`, with `pause_s` behind it."""
        return Line(
            text="" if spoken is None else spoken.text,
            origins=() if spoken is None else spoken.origins.runs,
            pause_s=pause_s,
            rate=style.rate,
            gain=style.gain,
            voice=None if style.voice is None else self._voice(style.voice, start),
            language=None if style.language is None else self._language(style.language, start),
            instructions=style.emotion if self._spec.accepts_instructions else None,
        )

    def _voice(self, name: str, start: int) -> str | None:
        if name.startswith("<"):
            found = next((one for one, sex in self._spec.voice_sexes.items() if sex == name[1:-1]), None)
            if found is None:
                self._refuse("voice gender", self._at(start))
            return found
        names = [name, *name.split()]
        known = next((voice for one in names if (voice := self._delivery.find_voice(one)) is not None), None)
        if known is None:
            place = place_of(self._marked.source, self._at(start))
            raise UnknownVoice(
                "voice", name, f"{place}: known voices: {listed((*self._delivery.cast, *self._spec.voices))}"
            )
        return known

    def _language(self, tag: str, start: int) -> str | None:
        """The model's name of a language, None for one that it finds out itself or does not speak."""
        if self._spec.languages == ("auto",):
            return None
        name = language_name(tag.partition("-")[0])
        if name not in self._spec.languages:
            self._refuse(f"lang {tag[:20]}", self._at(start))
            return None
        return name
