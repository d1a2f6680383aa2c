"""The texts a load generator sends: our own two hundred, or those of a file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from sonoro.core.errors import ConfigError

__all__ = ["BUILTIN", "prompts", "shuffled"]

BUILTIN = "builtin"

_TEXT_FIELD = 3
"""Of a line `id|ref_text|ref_audio|text`, which may go on with the recording of the text."""


def prompts(dataset: str) -> tuple[str, ...]:
    """The texts of `dataset`: `builtin`, or a UTF-8 file of texts by line.

    A line with bars is one of a Seed-TTS style list, `id|ref_text|ref_audio|text`, of which the text is taken.
    Raises `ConfigError` naming the file, or the line that is neither.
    """
    if dataset == BUILTIN:
        listing = resources.files("sonoro.bench").joinpath("prompts.txt").read_text(encoding="utf-8")
        return tuple(listing.splitlines())
    try:
        lines = Path(dataset).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("dataset", dataset, f"it must be {BUILTIN} or a readable UTF-8 file ({error})") from error
    texts = tuple(_text(number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not texts:
        raise ConfigError("dataset", dataset, "it must hold at least one text")
    return texts


def shuffled(texts: tuple[str, ...], seed: str) -> Iterator[str]:
    """`texts` without end: all of them in an order drawn from `seed`, then all in another."""
    draw = random.Random(seed)
    while True:
        yield from draw.sample(texts, len(texts))


def _text(number: int, line: str) -> str:
    fields = line.split("|")
    text = fields[0 if len(fields) == 1 else min(_TEXT_FIELD, len(fields) - 1)].strip()
    if 1 < len(fields) <= _TEXT_FIELD or not text:
        raise ConfigError(f"dataset line {number}", line, "it must be a text, or id|ref_text|ref_audio|text")
    return text
