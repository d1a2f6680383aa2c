"""The training texts: a corpus of English as people write it, from free packages and templates.

Speeches, novels, small talk, dictionary examples and definitions give natural sentences; templates give conversation,
requests, numbers, names and foreign words, with every frequent word in several sentences; words and short phrases also
stand alone. No text shares five consecutive words with an evaluation text.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from builtin_voice import prose
from builtin_voice.flite import VOICES
from builtin_voice.mixed import judged_texts
from builtin_voice.slots import Demand, Slots, frequent_by_kind
from builtin_voice.templates import Writer
from builtin_voice.words import Lexicon, read_lexicon
from sonoro.text import read

TEXTS = 98_000
FREQUENT_WORDS = 20_000
TEXTS_A_WORD = 14
"""Least number of texts that contain each frequent word."""
_ALONE = 3500
"""Number of the most frequent words that also stand alone."""
_LONGEST = 300
_SHARED_WORDS = 5
_QUESTION = re.compile(
    r"(?:what|why|who|whose|where|when|how|which|is|are|am|was|were|do|does|did|can|could|will|would|have you)\b"
)
PROSE_SHARES = {"speeches": 6.0, "old speeches": 0.7, "novels": 7.0, "chats": 2.6, "examples": 19.0, "definitions": 2.7}
"""Percentage of texts from each source of sentences."""
TEMPLATE_SHARES = {
    "conversation": 14.5,
    "assistant": 6.0,
    "numbers": 8.0,
    "names": 4.0,
    "foreign": 1.5,
    "carriers": 8.0,
    "replies": 5.0,
    "instructions": 2.5,
    "facts": 5.0,
    "rare": 1.8,
    "clauses": 3.0,
}
LONG_SHARE = 12.0
"""Percentage of texts of several sentences, from prose and templates, of up to `_LONGEST` characters."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of the corpus. Paragraphs are lists of sentences; `frequent` are words, most frequent first; `people`
    are first and last names, `names` all proper names, `others` words not in the lexicon: contractions and British
    spellings."""

    lexicon: Lexicon
    paragraphs: dict[str, list[list[str]]]
    frequent: list[str]
    people: tuple[list[str], list[str]]
    names: list[str]
    others: list[str]


def read_sources(share: Path, frequent: list[str]) -> Sources:
    """Read the sources from the folder that `prepare.sh` makes."""
    folder = share / "prose"
    lexicon = read_lexicon(share)
    paragraphs = {
        "speeches": prose.read_speeches(folder / "speeches"),
        "old speeches": prose.read_speeches(folder / "speeches", modern=False),
        "novels": prose.read_austen(folder / "austen.rdb") + prose.read_novel(folder / "novel"),
        "chats": prose.read_chats(folder / "chats"),
        "examples": [[sentence] for sentence in _examples(lexicon)],
        "definitions": [[sentence] for sentence in _definitions(lexicon)],
    }
    scowl = share / "dict" / "scowl"
    names = [
        line
        for level in ("upper.10", "upper.35", "upper.40", "upper.50", "proper-names.50", "proper-names.60")
        for line in (scowl / f"english-{level}").read_text("latin-1").splitlines()
        if re.fullmatch(r"[A-Z][a-z]{2,}", line)
    ]
    people = tuple(
        _census(share / "names", files) for files in (("dist.female.first", "dist.male.first"), ("dist.all.last",))
    )
    others = [
        line
        for level in ("english-contractions.*[0-6]?", "british-words.*[0-5]?", "english-words.*[0-5]?")
        for path in sorted(scowl.glob(level))
        for line in path.read_text("latin-1").splitlines()
    ]
    return Sources(lexicon, paragraphs, frequent, (people[0], people[1]), names, others)


def _census(folder: Path, files: Iterable[str]) -> list[str]:
    """Names in the U.S. census with a frequency above 1 in 10,000."""
    rows = (line.split() for name in files for line in (folder / name).read_text("ascii").splitlines())
    names = (name.capitalize() for name, share, *_ in rows if float(share) > 0.01)
    return [re.sub(r"^Mc(\w)", lambda match: "Mc" + match[1].upper(), name) for name in names]


def _as_sentence(phrase: str) -> str:
    phrase = phrase.strip(" ,.")
    mark = "?" if _QUESTION.match(phrase.lower()) and " " in phrase else "."
    return phrase[:1].upper() + phrase[1:] + ("" if phrase.endswith(("?", "!")) else mark)


def _examples(lexicon: Lexicon) -> list[str]:
    usable = (
        e for e in lexicon.examples if re.fullmatch(r"[A-Za-z0-9 ,.'?!:;$%-]+", e) and ".." not in e and len(e) > 3
    )
    return [_as_sentence(example) for example in dict.fromkeys(usable)]


def _definitions(lexicon: Lexicon) -> Iterator[str]:
    shapes = cycle(("The word {} means {}.", "{}: {}.", "{} is {}.", "What is {}? It's {}."))
    for word, text in lexicon.definitions:
        if re.fullmatch(r"[A-Za-z ,'-]{8,}", text):
            sentence = next(shapes).format(word, text)
            yield sentence[:1].upper() + sentence[1:]


def runs_of(text: str) -> Iterator[str]:
    """Every five consecutive words of a text, as spoken; all of a shorter one."""
    words = re.findall(r"[a-z']+", read(text, lowercase=True).text)
    width = min(_SHARED_WORDS, len(words))
    return (" ".join(words[at : at + width]) for at in range(len(words) - width + 1))


def judged_runs() -> frozenset[str]:
    """The runs of all evaluation texts."""
    return frozenset(run for text in judged_texts() for run in runs_of(text))


class Corpus:
    """The accepted texts: distinct, readable, and without overlap with evaluation texts."""

    def __init__(self, demand: Demand) -> None:
        self.texts: dict[str, str] = {}
        self._demand, self._judged = demand, judged_runs()

    def add(self, text: str, kind: str) -> bool:
        """Add `text`, and count its words, if it is acceptable; returns whether it was."""
        text = re.sub(r"\s+", " ", text).strip()
        if not text or len(text) > _LONGEST or text in self.texts:
            return False
        normalized = read(text)
        if not normalized.text or normalized.dropped or not self._judged.isdisjoint(runs_of(text)):
            return False
        self.texts[text] = kind
        self._demand.count(text)
        return True

    def fill(self, kind: str, count: int, texts: Iterator[str]) -> None:
        """Add up to `count` of `texts`, fewer if they run out or most are rejected."""
        tries = 0
        for text in texts:
            if count <= 0 or tries > 40 * count + 1000:
                return
            taken = self.add(text, kind)
            count, tries = count - taken, 0 if taken else tries + 1


def write_corpus(sources: Sources, count: int, seed: int) -> dict[str, str]:
    """About `count` distinct texts with their kinds, determined by `seed`, shuffled, so that any prefix is a fair
    sample."""
    rng = random.Random(seed)
    kinds = frequent_by_kind(sources.frequent, sources.lexicon, sources.names, sources.others)
    demand = Demand(kinds, TEXTS_A_WORD)
    slots, writer = Slots(sources.lexicon, demand, sources.people, rng), Writer(sources.lexicon, rng)
    corpus = Corpus(demand)
    sentences = {name: _sampled(paragraphs, rng) for name, paragraphs in sources.paragraphs.items()}

    def templated() -> str:
        section = rng.choices(list(TEMPLATE_SHARES), list(TEMPLATE_SHARES.values()))[0]
        return writer.sentence() if section == "clauses" else slots.text(section)

    def several() -> Iterator[str]:
        while True:
            yield _joined(sources.paragraphs, templated, rng)

    everyday = [word for word in sources.frequent if word in sources.lexicon.known][:_ALONE]
    corpus.fill("alone", _ALONE, (_alone(word, rng) for word in everyday))
    for name, share in PROSE_SHARES.items():
        corpus.fill(name, round(count * share / 100), sentences[name])
    corpus.fill("several", round(count * LONG_SHARE / 100), several())
    for section, share in TEMPLATE_SHARES.items():
        write = writer.sentence if section == "clauses" else lambda section=section: slots.text(section)
        corpus.fill(section, round(count * share / 100), (_as_typed(write(), rng) for _ in iter(int, 1)))
    # Words that random sampling has missed.
    while left := demand.kinds_left():
        before = len(corpus.texts)
        corpus.fill("wanted", 500, (_wanted(demand, left, rng) for _ in range(5000)))
        if len(corpus.texts) == before:
            break
    texts = list(corpus.texts.items())
    rng.shuffle(texts)
    return dict(texts)


def _sampled(paragraphs: list[list[str]], rng: random.Random) -> Iterator[str]:
    """The distinct sentences of up to 160 characters, in random order."""
    usable = list(dict.fromkeys(s for paragraph in paragraphs for s in paragraph if len(s) <= 160))
    rng.shuffle(usable)
    return iter(usable)


def _joined(paragraphs: dict[str, list[list[str]]], templated: object, rng: random.Random) -> str:
    """Consecutive sentences up to a length: from one paragraph, a dictionary, or templates."""
    length = rng.randint(110, _LONGEST)
    kind = rng.choices(("speeches", "novels", "chats", "examples", "templates"), (22, 18, 4, 20, 36))[0]
    if kind == "templates":
        found = [templated() for _ in range(8)]
    elif kind == "examples":
        found = [rng.choice(paragraphs[kind])[0] for _ in range(8)]
    else:
        paragraph = rng.choice(paragraphs[kind]) or [""]
        found = paragraph[rng.randrange(len(paragraph)) :]
    text = ""
    for line in found:
        sentence = line if not line or line[-1] in '.?!"”' else f"{line}."
        if len(text) + len(sentence) > length and text:
            break
        text = f"{text} {sentence[:1].upper()}{sentence[1:]}"
    return text if len(text) > 90 else ""


def _alone(word: str, rng: random.Random) -> str:
    return rng.choice((word, word.capitalize())) + rng.choice((".", ".", ".", "?", "!", "", ""))


def _wanted(demand: Demand, kinds: list[str], rng: random.Random) -> str:
    words = [word for word in (demand.draw(rng.choice(kinds), rng) for _ in range(rng.randint(1, 6))) if word]
    shape = rng.choice(("{}.", "{}", "{}?", "I said {}.", "{}, please.", "Not {}!", "The words are {}."))
    return shape.format(rng.choice((" ", ", ", ", ", " and ", " or ")).join(words)) if words else ""


def _as_typed(text: str, rng: random.Random) -> str:
    """Vary `text` as people type: sometimes without final mark or capitals, or with other quotes."""
    drawn = rng.random()
    if drawn < 0.05:
        return text.rstrip(".")
    if drawn < 0.065:
        return text.lower()
    if drawn < 0.07:
        return text.upper()
    if drawn < 0.12:
        return re.sub(r'"([^"]*)"', r"“\1”", text).replace("'", "’")
    return text


def write(texts: list[str], output: Path) -> None:
    """Write `texts`, one per line; to a .jsonl.gz (with any suffix after it) rows {text, voice} for Flite."""
    if ".jsonl.gz" not in output.name:
        output.write_text("".join(f"{text}\n" for text in texts), "utf-8")
        return
    spoken = dict.fromkeys(read(text, lowercase=True).text for text in texts)
    rows = [{"text": text, "voice": VOICES[at % len(VOICES)]} for at, text in enumerate(spoken)]
    output.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode("ascii"), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="corpus.txt to write, or corpus.jsonl.gz for Flite")
    parser.add_argument("--share", type=Path, required=True, help="share/ of the folder that prepare.sh makes")
    parser.add_argument("--count", type=int, default=TEXTS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    frequent = (options.share / "frequent.txt").read_text("utf-8").splitlines()[:FREQUENT_WORDS]
    texts = write_corpus(read_sources(options.share, frequent), options.count, options.seed)
    write(list(texts), options.output)
    kinds = {kind: list(texts.values()).count(kind) for kind in dict.fromkeys(texts.values())}
    print(f"texts={len(texts)} characters={sum(map(len, texts))} kinds={kinds}")


if __name__ == "__main__":
    main()
