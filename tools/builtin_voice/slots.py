"""Sentences from `templates.txt`: alternatives in brackets, slots in braces, filled with words that are still wanted.

Sentences are grammatical, their meaning is random. `Demand` counts the words still wanted; numbers, names and addresses
are random, written in figures as people do.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from builtin_voice.figures import KINDS, LISTS, Figures
from builtin_voice.templates import Writer
from builtin_voice.words import Lexicon, with_article

_FOLDER = Path(__file__).parent
_WANTED_SHARE = 0.65
"""Share of slots filled with a wanted word, if there is one; the others follow word frequency."""
_ONSETS = "b,bl,br,ch,cl,cr,d,dr,f,fl,fr,g,gl,gr,h,j,k,l,m,n,p,pl,pr,qu,r,s,sh,sk,sl,sm,sp,st,str,t,th,tr,tw,v,w,y,z"
_NUCLEI = "a,e,i,o,u,ai,ee,oa,oo,ou,ar,er,or,y"
_CODAS = "b,ck,d,ft,g,ld,ll,lt,m,mp,n,nd,ng,nk,nt,p,rd,rk,rm,rn,sh,sk,ss,st,t,th,x,z" + "," * 12


def read_templates() -> dict[str, list[str]]:
    """The templates of each section of `templates.txt`."""
    sections: dict[str, list[str]] = {}
    for line in (_FOLDER / "templates.txt").read_text("utf-8").splitlines():
        if line.startswith("# "):
            sections[line[2:]] = found = []
        else:
            found.append(line)
    return sections


def words_in(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", text.lower().replace("’", "'")))


class Demand:
    """How many more texts should contain each frequent word. `kinds`: the slots that each may fill."""

    def __init__(self, kinds: dict[str, list[str]], texts: int) -> None:
        self.left: Counter[str] = Counter()
        self._kinds = {kind: sorted(set(words)) for kind, words in kinds.items()}
        for words in self._kinds.values():
            self.left.update({word.lower(): texts for word in words if word.lower() not in self.left})

    def count(self, text: str) -> None:
        """Count the words of a new text."""
        for word in words_in(text):
            if word in self.left:
                self.left[word] -= 1

    def draw(self, kind: str, rng: random.Random) -> str | None:
        """A random word of `kind` that is still wanted; None if there is none."""
        words = self._kinds.get(kind, [])
        while words:
            at = rng.randrange(len(words))
            if self.left[words[at].lower()] > 0:
                return words[at]
            words[at] = words[-1]
            words.pop()
        return None

    def kinds_left(self) -> list[str]:
        return [kind for kind in self._kinds if any(self.left[word.lower()] > 0 for word in self._kinds[kind])]


def frequent_by_kind(
    frequent: Iterable[str], lexicon: Lexicon, names: list[str], others: list[str]
) -> dict[str, list[str]]:
    """The frequent words by the slots they can fill, by class and inflection; all known words, and `others`, can fill
    "word"."""
    forms: dict[str, dict[str, str]] = {kind: {} for kind in ("noun", "nouns", "adj", "adv", *_VERB_FORMS)}
    for noun in lexicon.nouns["any"].words:
        forms["noun"][noun] = noun
        forms["nouns"][lexicon.plural(noun)] = noun
    for kind, choice in (("adj", lexicon.adjectives), ("adv", lexicon.adverbs)):
        forms[kind].update(dict.fromkeys(choice.words, ""))
    for verb in lexicon.transitive.words:
        for kind in ("verb", "verbs", "verbed", "verbing", "participle"):
            forms[kind][_VERB_FORMS[kind](lexicon, verb)] = verb
    for verb in lexicon.intransitive.words:
        forms["went"][lexicon.past(verb)] = verb
    proper = {name.lower(): name for name in names}
    also = {word.lower(): word for word in others}
    kinds: dict[str, list[str]] = {kind: [] for kind in (*forms, "proper", "word")}
    for word in frequent:
        if word in proper and word not in lexicon.known:
            kinds["proper"].append(proper[word])
        elif word in lexicon.known:
            kinds["word"].append(word)
            for kind, found in forms.items():
                if word in found:
                    kinds[kind].append(word)
        elif word in also:
            kinds["word"].append(also[word])
    return kinds


_VERB_FORMS: dict[str, Callable[[Lexicon, str], str]] = {
    "verb": lambda lexicon, verb: verb,
    "verbs": Lexicon.third_person,
    "verbed": Lexicon.past,
    "verbing": Lexicon.gerund,
    "participle": Lexicon.participle,
    "went": Lexicon.past,
}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


class Slots:
    """Generates texts of a section, with all randomness from `rng`."""

    def __init__(
        self, lexicon: Lexicon, demand: Demand, people: tuple[list[str], list[str]], rng: random.Random
    ) -> None:
        self._words, self._demand, self._rng = lexicon, demand, rng
        self._first, self._last = people
        self._writer = Writer(lexicon, rng)
        self._sections = read_templates()
        number = Figures(rng)
        draw, writer = self._drawn, self._writer
        self._values: dict[str, Callable[[], str]] = {
            **{name: self._from(values) for name, values in LISTS.items()},
            **{name: getattr(number, name) for name in KINDS},
            "noun": lambda: draw("noun", writer.noun),
            "nouns": lambda: draw("nouns", lambda: lexicon.plural(writer.noun())),
            "adj": lambda: draw("adj", lambda: lexicon.adjectives.draw(rng)),
            "adv": lambda: draw("adv", lambda: lexicon.adverbs.draw(rng)),
            **{kind: self._verb(kind) for kind in _VERB_FORMS},
            "word": lambda: draw("word", lambda: rng.choice(lexicon.everyday)),
            "proper": lambda: draw("proper", lambda: rng.choice(lexicon.proper)),
            "first": lambda: draw("proper", self._from(self._first)),
            "last": lambda: draw("proper", self._from(self._last)),
            "person": lambda: lexicon.nouns["person"].draw(rng),
            "person_plural": lambda: lexicon.plural(lexicon.nouns["person"].draw(rng)),
            "thing": writer.thing,
            "object": writer.object,
            "place": writer.place,
            "clause": writer.clause,
            "rare": lambda: rng.choice(lexicon.words),
            "invented": lambda: _invented(rng),
            "spelled": lambda: "-".join(rng.choice(self._first).upper()),
            "word_spelled": lambda: rng.choice((", ", "-", " ")).join(rng.choice(lexicon.everyday).upper()),
            "address": lambda: f"{number.house()} {rng.choice(LISTS['street'])}",
            "repeated": self._repeated,
        }

    def text(self, section: str) -> str:
        """A random text of `section`, mostly with a capital."""
        template = self._rng.choice(self._sections[section])
        text = self._repaired(self._filled(self._chosen(template)))
        is_phrase = template[0].islower() and template[-1] not in ".?!"
        return text if is_phrase else _capital(text)

    def _from(self, values: list[str]) -> Callable[[], str]:
        return lambda: self._rng.choice(values)

    def _verb(self, kind: str) -> Callable[[], str]:
        verbs = self._words.intransitive if kind == "went" else self._words.transitive
        return lambda: self._drawn(kind, lambda: _VERB_FORMS[kind](self._words, verbs.draw(self._rng)))

    def _drawn(self, kind: str, otherwise: Callable[[], str]) -> str:
        wanted = self._demand.draw(kind, self._rng) if self._rng.random() < _WANTED_SHARE else None
        return wanted or otherwise()

    def _chosen(self, template: str) -> str:
        return re.sub(r"\[([^\]]*)\]", lambda match: self._rng.choice(match[1].split("|")), template)

    def _filled(self, text: str) -> str:
        pieces = re.split(r"\{([^}]*)\}", text)
        self._before = ""
        for index, piece in enumerate(pieces):
            self._before += self._value(piece) if index % 2 else piece
        return self._before

    def _value(self, slot: str) -> str:
        name = slot.lower().removeprefix("a ")
        value = self._values[name]()
        if slot.lower().startswith("a "):
            value = with_article(value)
        return _capital(value) if slot[0].isupper() else value

    def _repeated(self) -> str:
        last = re.findall(r"[^\W\d_]+", self._before)[-1].lower()
        return "".join(f", {last}" for _ in range(self._rng.randint(1, 3)))

    def _repaired(self, text: str) -> str:
        """`text` with articles chosen by sound, one final mark, and no comma before it."""
        text = re.sub(
            r"\b([Aa])n? (?=([A-Za-z]+))",
            lambda match: ("A" if match[1] == "A" else "a") + with_article(match[2]).split()[0][1:] + " ",
            text,
        )
        text = re.sub(r"(?<![.])\.\.(?![.])", ".", re.sub(r"\b([Ii]) '(d|m)\b", r"\1'\2", text))
        return re.sub(r"\s+([.,?!])", r"\1", re.sub(r" {2,}", " ", text)).strip()


def _invented(rng: random.Random) -> str:
    """An invented word of one to four syllables."""
    count = rng.choices((1, 2, 3, 4), (2, 5, 3, 1))[0]
    word = "".join(rng.choice(part.split(",")) for _ in range(count) for part in (_ONSETS, _NUCLEI, _CODAS))
    return word if len(word) > 2 else word + "n"
