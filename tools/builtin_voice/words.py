"""English words with their classes, frequencies and inflections, from Debian's `wordnet-base`, `wamerican` and `scowl`.

WordNet gives parts of speech, how often each word was seen with a sense, verb frames, definitions and examples; the
word list decides which regular spelling of an inflection exists (stopped, not stoped); SCOWL gives words of everyday
use, which WordNet's counts of written texts underrate (glue, sock, pie).
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

CONCRETE = {"05": "animal", "06": "artifact", "08": "body", "13": "food", "15": "place", "17": "object", "18": "person"}
_POS_OF_DIGIT = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
_INTRANSITIVE, _TRANSITIVE = {"01", "02", "22"}, {"08", "09", "11"}
_INSULT = re.compile(r"\b(?:slurs?|offensive (?:term|name|word|terms)|disparaging)\b")
"""Marks offensive words in WordNet's gloss of their first sense."""
_UNSTRESSED = ("el", "al", "ol", "il", "am", "ip")  # traveled rather than travelled; both are in the list
_VOWEL_SOUND = re.compile(
    r"(?!uni(?![mn])|use|usu|uti|eu|one\b|once|ewe|ura)(?:[aeiou]|hour|honest|honor|heir|herb)", re.IGNORECASE
)


EVERYDAY = {"10": 25.0, "20": 20.0, "35": 2.0}
"""Weight added to a word's count by SCOWL level; the first two levels are everyday words."""

_SHORT_LETTERS, _SHORT_WEIGHT = 7, 10.0
"""In the third level, short words (barn, creek, pup) are everyday ones, long words are learned ones."""


@dataclass
class Choice:
    """Weighted random choice of words: by count to a power below one, so that rare words occur too, plus the weight of
    everyday use."""

    words: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, word: str, count: int, added: float) -> None:
        self.words.append(word)
        self.weights.append((count + 0.3) ** 0.7 + added + (self.weights[-1] if self.weights else 0))

    def draw(self, rng: random.Random) -> str:
        return rng.choices(self.words, cum_weights=self.weights)[0]


@dataclass
class Lexicon:
    """The words of all classes: nouns by class ("any" holds all), verbs by frame, in dictionary order."""

    nouns: dict[str, Choice]
    transitive: Choice
    intransitive: Choice
    adjectives: Choice
    adverbs: Choice
    proper: list[str]
    words: list[str]
    everyday: list[str]
    definitions: list[tuple[str, str]]
    examples: list[str]
    irregular: dict[str, str]
    known: frozenset[str]

    def _known(self, *candidates: str) -> str:
        return next((form for form in candidates if form in self.known), candidates[0])

    def plural(self, noun: str) -> str:
        if re.search(r"(?:s|x|z|ch|sh)$", noun):
            regular = noun + "es"
        else:
            regular = noun[:-1] + "ies" if re.search(r"[^aeiou]y$", noun) else noun + "s"
        return self.irregular.get(noun) or self._known(regular, noun + "s", noun + "es")

    def third_person(self, verb: str) -> str:
        return {"be": "is", "have": "has"}.get(verb) or re.sub(r"([^aeiou])ys$", r"\1ies", verb + _sibilant(verb))

    def past(self, verb: str) -> str:
        return PAST.get(verb, (self._regular(verb, "ed"),))[0]

    def participle(self, verb: str) -> str:
        return PAST.get(verb, (self._regular(verb, "ed"),))[-1]

    def gerund(self, verb: str) -> str:
        return self._regular(verb, "ing")

    def _regular(self, verb: str, ending: str) -> str:
        doubled = verb + verb[-1] + ending
        if verb.endswith("ie") and ending == "ing":
            plain = verb[:-2] + "ying"
        elif verb.endswith("e") and not (ending == "ing" and re.search(r"(?:ee|oe|ye)$", verb)):
            plain = verb[:-1] + ending
        else:
            plain = re.sub(r"([^aeiou])yed$", r"\1ied", verb + ending)
        if verb.endswith("c"):
            return self._known(f"{verb}k{ending}", plain)
        # A final consonant after a single vowel is doubled as in American spelling.
        doubles = re.search(r"[^aeiou][aeiou][^aeiouwxy]$", verb) and verb[-2:] not in _UNSTRESSED
        return self._known(doubled, plain) if doubles else self._known(plain, doubled)


def _sibilant(verb: str) -> str:
    return "es" if re.search(r"(?:s|x|z|ch|sh|[^aeiou]o)$", verb) else "s"


def with_article(phrase: str) -> str:
    """`phrase` with "a" or "an" before it, by sound."""
    return f"{'an' if _VOWEL_SOUND.match(phrase) else 'a'} {phrase}"


# Verb, past, and participle where it differs: one verb a line.
PAST = {
    verb: tuple(forms)
    for verb, *forms in map(str.split, Path(__file__).with_name("irregular_verbs.txt").read_text("ascii").splitlines())
}


def _counts(folder: Path) -> dict[tuple[str, str], int]:
    """Counts of each (lemma, part of speech) in WordNet's tagged texts."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for line in (folder / "cntlist.rev").read_text("ascii").splitlines():
        key, _, count = line.split()
        lemma, _, rest = key.partition("%")
        counts[lemma, _POS_OF_DIGIT[rest[0]]] += int(count)
    return counts


def _synsets(folder: Path, pos: str) -> dict[str, tuple[str, list[str], str, str]]:
    """By offset: lexicographer file, words, the frames part and the gloss."""
    found = {}
    for line in (folder / f"data.{pos}").read_text("ascii", errors="ignore").splitlines():
        if not line.startswith("  "):
            data, _, gloss = line.partition(" | ")
            fields = data.split(" ")
            words = [fields[4 + 2 * i] for i in range(int(fields[3], 16))]
            found[fields[0]] = (fields[1], words, data, gloss.strip())
    return found


def _levels(folder: Path) -> dict[str, float]:
    """Additional weight of each word of SCOWL's everyday levels, without possessives."""
    found: dict[str, float] = {}
    for level, weight in EVERYDAY.items():
        for name in ("english", "american"):
            for word in (folder / f"{name}-words.{level}").read_text("latin-1").splitlines():
                if re.fullmatch(r"[a-z]+", word):
                    is_short = 2 < len(word) <= _SHORT_LETTERS
                    found.setdefault(word, max(weight, _SHORT_WEIGHT) if is_short else weight)
    return found


def _of(word: str, lemmas: set[str]) -> bool:
    """Whether `word` is one of `lemmas` or its plural."""
    return word.lower() in lemmas or word.lower().removesuffix("s") in lemmas


def read_lexicon(share: Path) -> Lexicon:
    """The lexicon of a folder that holds wordnet/ (index.*, data.*, *.exc, cntlist.rev), dict/american-english, one
    word a line, and dict/scowl/."""
    wordnet, levels = share / "wordnet", _levels(share / "dict" / "scowl")
    listed = (share / "dict" / "american-english").read_text("utf-8").splitlines()
    plain = [word for word in listed if re.fullmatch(r"[A-Za-z]{2,16}", word)]
    known = frozenset(plain)
    counts = _counts(wordnet)
    nouns: dict[str, Choice] = {name: Choice() for name in ("any", *CONCRETE.values())}
    verbs = {"transitive": Choice(), "intransitive": Choice()}
    other = {"adj": Choice(), "adv": Choice()}
    definitions, examples, insults = [], [], set[str]()
    irregular: dict[str, str] = {}
    for line in (wordnet / "noun.exc").read_text("ascii").splitlines():
        form, lemma = line.split()[:2]
        if form in known:
            irregular.setdefault(lemma, form)
    for pos in ("noun", "verb", "adj", "adv"):
        synsets = _synsets(wordnet, pos)
        for _, words, _, gloss in synsets.values():
            examples += re.findall(r'"([^"]+)"', gloss)
            if pos == "noun" and words[0] in known and words[0].islower():
                definitions.append((words[0], re.split(r"[;(]", gloss)[0].strip()))
        for line in (wordnet / f"index.{pos}").read_text("ascii").splitlines():
            parts = line.split()
            lemma = parts[0]
            if line.startswith("  ") or lemma not in known or lemma == "be":
                continue
            count, added = counts[lemma, pos], levels.get(lemma, 0.0)
            file_number, _, data, gloss = synsets[parts[-int(parts[2])]]
            if _INSULT.search(gloss):
                insults.add(lemma)
                continue
            if pos == "noun":
                nouns["any"].add(lemma, count, added)
                if file_number in CONCRETE:
                    nouns[CONCRETE[file_number]].add(lemma, count, added)
            elif pos == "verb":
                frames = set(re.findall(r"\+ (\d\d) 00", data))
                for name, wanted in (("transitive", _TRANSITIVE), ("intransitive", _INTRANSITIVE)):
                    if frames & wanted:
                        verbs[name].add(lemma, count, added)
            else:
                other[pos].add(lemma, count, added)
    plain = [word for word in plain if not _of(word, insults)]
    return Lexicon(
        nouns=nouns,
        transitive=verbs["transitive"],
        intransitive=verbs["intransitive"],
        adjectives=other["adj"],
        adverbs=other["adv"],
        proper=[word for word in plain if re.fullmatch(r"[A-Z][a-z]{2,}", word)],
        words=plain,
        everyday=[word for word, weight in levels.items() if weight > EVERYDAY["35"]],
        definitions=definitions,
        examples=examples,
        irregular=irregular,
        known=frozenset(plain),
    )
