"""The table of attention heads that point at the text, stored with a checkpoint."""

import os
from pathlib import Path

import msgspec

from sonoro.core.errors import CheckpointError
from sonoro.words.tracking import Pointing

FILE = "word_heads.json"
"""File name in the checkpoint's folder."""

MOST_COLUMNS = 4096
"""Limit of watched text positions per segment: words of a longer text have no times."""


class WordHeads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The head that points at the text, by prompt layout: `text_first` (all text in the prompt) and `text_along` (one
    token per frame); None if there is no such head.
    To find them, `candidates` (layer, head; ascending) are watched instead, over all positions."""

    text_first: Pointing | None = None
    text_along: Pointing | None = None
    candidates: tuple[tuple[int, int], ...] = ()

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The distinct watched heads (layer, head), ascending."""
        if self.candidates:
            return self.candidates
        return tuple(sorted({place for one in self._pointings for place in one.places}))

    @property
    def have_limits(self) -> bool:
        """Whether any pointing has limits beyond which a segment counts as faulty."""
        return any(one.limits is not None for one in self._pointings)

    @property
    def is_measured(self) -> bool:
        """Whether any pointing was measured against an aligner."""
        return any(one.is_measured for one in self._pointings)

    @property
    def _pointings(self) -> list[Pointing]:
        return [one for one in (self.text_first, self.text_along) if one is not None]


def read_heads(folder: Path) -> WordHeads:
    """Read the table of the checkpoint in `folder`; empty if it has none. Raises `CheckpointError` naming the file."""
    file = folder / FILE
    return read_table(file) if file.is_file() else WordHeads()


def read_table(file: Path) -> WordHeads:
    """Read the table in `file`. Raises `CheckpointError` naming it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=WordHeads)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{file} is no table of heads: {error}") from error


def write_heads(file: Path, heads: WordHeads) -> Path:
    """Write `heads` atomically to `file` (`FILE` in the checkpoint's folder); returns its path."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(heads), indent=2) + b"\n")
    return part.replace(file)
