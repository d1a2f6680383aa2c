"""What the voice is taught to read: a corpus of English, written out as it is spoken, from free word lists alone.

Dictionary examples and definitions bring natural phrases, templates bring every kind of sentence, single words and word
runs bring the rare words. No sentence shares five words in a row with a Harvard sentence, so those can judge the voice.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from builtin_voice.flite import VOICES
from builtin_voice.templates import Writer
from builtin_voice.words import Lexicon, read_lexicon
from sonoro.core.normalize import normalize_english

HARVARD = Path(__file__).with_name("harvard.txt")
MAX_WORDS = 28
_MAX_CHARACTERS = 180
_SHARED_WORDS = 5
_QUESTION = re.compile(
    r"(?:what|why|who|whose|where|when|how|which|is|are|am|was|were|do|does|did|can|could|will|would|have you)\b"
)
# How many of each hundred rows each kind of text gives; what runs out (dictionary examples) is made up by templates.
SHARES = {"examples": 24, "definitions": 6, "sentences": 37, "numbers": 11, "runs": 20, "words": 2}


def read_harvard() -> list[str]:
    """The 720 Harvard sentences (IEEE, 1969) in order; the first 100 are the evaluation set."""
    return HARVARD.read_text("ascii").splitlines()


def _as_sentence(phrase: str) -> str:
    phrase = phrase.strip(" ,.")
    mark = "?" if _QUESTION.match(phrase.lower()) and " " in phrase else "."
    return phrase[:1].upper() + phrase[1:] + ("" if phrase.endswith(("?", "!")) else mark)


def _examples(lexicon: Lexicon, rng: random.Random) -> Iterator[str]:
    """Dictionary examples, each once; short ones mostly two together."""
    usable = [e for e in lexicon.examples if re.fullmatch(r"[A-Za-z ,.'?!-]+", e) and ".." not in e and len(e) > 3]
    rng.shuffle(usable)
    waiting = iter(usable)
    for first in waiting:
        second = next(waiting, None) if len(first) < 35 and rng.random() < 0.75 else None
        if second is None:
            yield _as_sentence(first)
        elif rng.random() < 0.6:
            yield f"{_as_sentence(first)} {_as_sentence(second)}"
        else:
            yield f"{_as_sentence(first)[:-1]}, {rng.choice(('and', 'but', 'or', 'then', 'so'))} {second}."


def _definitions(lexicon: Lexicon, rng: random.Random) -> Iterator[str]:
    usable = [(word, text) for word, text in lexicon.definitions if re.fullmatch(r"[A-Za-z ,'-]{8,}", text)]
    rng.shuffle(usable)
    for word, text in usable:
        yield rng.choice((f"The word {word} means {text}.", f"{word.capitalize()} is {text}.", _as_sentence(text)))


def _runs(lexicon: Lexicon, rng: random.Random) -> Iterator[str]:
    while True:
        of = [lexicon.everyday if rng.random() < 0.85 else lexicon.words for _ in range(rng.randint(2, 12))]
        words = [rng.choice(choice) for choice in of]
        yield rng.choice((" ", ", ")).join(words).capitalize() + "."


def _words(lexicon: Lexicon, rng: random.Random) -> Iterator[str]:
    draws = (
        lexicon.nouns["any"].draw,
        lexicon.adjectives.draw,
        lexicon.transitive.draw,
        lambda r: r.choice(lexicon.words),
    )
    while True:
        yield rng.choice(draws)(rng).capitalize() + rng.choice((".", ".", ".", "?", "!"))


def _sentences(writer: Writer, rng: random.Random) -> Iterator[str]:
    """Short ones mostly two together: the engine speaks up to 110 letters at once."""
    while True:
        first = writer.sentence()
        yield f"{first} {writer.sentence()}" if len(first) < 50 and rng.random() < 0.6 else first


def _numbers(writer: Writer, rng: random.Random) -> Iterator[str]:
    """Some go on after their numbers: a number is not where speech ends."""
    while True:
        first = writer.number_sentence()
        again = rng.choice((writer.number_sentence, writer.sentence))
        yield f"{first} {again()}" if len(first) < 45 and rng.random() < 0.5 else first


def _runs_of(text: str) -> Iterator[str]:
    words = re.findall(r"[a-z']+", text)
    width = min(_SHARED_WORDS, len(words))
    return (" ".join(words[i : i + width]) for i in range(len(words) - width + 1))


def write_corpus(lexicon: Lexicon, count: int, seed: int) -> list[dict[str, str]]:
    """`count` different rows {text, voice}, the same for the same seed; voices in equal shares, all kinds mixed."""
    rng = random.Random(seed)
    writer = Writer(lexicon, rng)
    sources = {
        "examples": _examples(lexicon, rng),
        "definitions": _definitions(lexicon, rng),
        "sentences": _sentences(writer, rng),
        "numbers": _numbers(writer, rng),
        "runs": _runs(lexicon, rng),
        "words": _words(lexicon, rng),
    }
    kept_out = {
        run for sentence in read_harvard() for run in _runs_of(normalize_english(sentence, lowercase=True).text)
    }
    seen: set[str] = set()
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        written = next(sources[kind], None) or writer.sentence()
        normalized = normalize_english(written, lowercase=True)
        text = normalized.text
        fits = len(text.split()) <= MAX_WORDS and len(text) <= _MAX_CHARACTERS
        if text and fits and not normalized.dropped and text not in seen and kept_out.isdisjoint(_runs_of(text)):
            seen.add(text)
            rows.append({"text": text, "voice": VOICES[len(rows) % len(VOICES)]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="corpus.jsonl.gz to write")
    parser.add_argument(
        "--share", type=Path, default=Path("/usr/share"), help="folder of wordnet/, dict/american-english, dict/scowl/"
    )
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    lexicon = read_lexicon(options.share)
    rows = write_corpus(lexicon, options.count, options.seed)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
    options.output.write_bytes(gzip.compress(data, mtime=0))
    print(f"rows={len(rows)} characters_mean={sum(len(row['text']) for row in rows) / len(rows):.1f}")


if __name__ == "__main__":
    main()
