"""Texts to the phonemes that the teacher Kokoro reads, American and British: misaki with a light part-of-speech tagger.

`python -m builtin_voice.phonemize corpus.txt phonemes.jsonl.xz` normalises each line as the voice does
(`sonoro.text.english`) and writes a JSON object for it, in the order of the corpus: its number `row`, its
normalised `text`, and its phonemes in each accent. Lines with something that cannot be spoken are dropped, and counted.
espeak-ng handles words that misaki lacks. Needs `requirements.txt`; the machine that synthesises does not.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from builtin_voice.kokoro.teacher import MAX_PHONEMES
from sonoro.core.config import usable_cores
from sonoro.text import read

ACCENTS = ("us", "gb")
UNKNOWN = "❓"


def _tagging(blank: Any, tagger: Any) -> Callable[[str], Any]:
    """As a spaCy pipeline: text to a document whose words have their parts of speech."""

    def tag(text: str) -> Any:
        doc = blank(text)
        words = [token for token in doc if not token.is_space]
        line = " ".join(token.text + ("\n" if token.text in (".", "?", "!") else "") for token in words)
        for token, (_, part) in zip(words, tagger.tag(line, tokenize=False), strict=True):
            token.tag_ = part
        return doc

    return tag


@cache
def _speller(accent: str) -> Callable[[str], str]:
    import spacy  # noqa: PLC0415 - heavy, and absent where the teacher speaks
    from misaki import en, espeak  # noqa: PLC0415
    from textblob_aptagger import PerceptronTagger  # noqa: PLC0415

    is_british = accent == "gb"
    # Its constructor would fetch a large spaCy model for the tags alone.
    speller = en.G2P.__new__(en.G2P)
    speller.version, speller.british, speller.unk = None, is_british, UNKNOWN
    speller.lexicon = en.Lexicon(is_british)
    speller.fallback = espeak.EspeakFallback(british=is_british)
    speller.nlp = _tagging(spacy.blank("en"), PerceptronTagger())

    def spell(text: str) -> str:
        # The normaliser writes the letter A as it sounds, which misaki takes for "aye".
        spelled = speller(re.sub(r"\bay\b", "[ay](/ˈA/)", text))[0].strip()
        # A lone letter keeps its full stop to itself.
        return spelled if spelled.endswith(text[-1]) else spelled + text[-1]

    return spell


def phonemes(text: str, accent: str) -> str:
    """Of a normalised text, in `accent` ("us", "gb")."""
    return _speller(accent)(text)


def _row(numbered: tuple[int, str]) -> dict[str, Any] | None:
    number, line = numbered
    normal = read(line)
    if not normal.text or normal.dropped:
        return None
    spelled = {accent: phonemes(normal.text, accent) for accent in ACCENTS}
    if any(UNKNOWN in line or not 1 <= len(line) <= MAX_PHONEMES for line in spelled.values()):
        return None
    return {"row": number, "text": normal.text, **spelled}


def phonemize(texts: Iterable[str], processes: int = 1) -> Iterator[dict[str, Any] | None]:
    """A row for each text, or None for one that is left out."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(_row, enumerate(texts), chunksize=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="a text a line, UTF-8")
    parser.add_argument("output", type=Path, help=".jsonl.xz")
    parser.add_argument("--processes", type=int, default=usable_cores())
    options = parser.parse_args()
    left_out = 0
    partial = options.output.with_suffix(".partial")
    with lzma.open(partial, "wt", encoding="utf-8") as file:
        for row in phonemize(options.corpus.read_text("utf-8").splitlines(), options.processes):
            if row is None:
                left_out += 1
            else:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.rename(options.output)
    print(f"left_out={left_out}")


if __name__ == "__main__":
    main()
