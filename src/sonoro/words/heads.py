"""Which heads of a checkpoint point at its text: the table that is kept with the checkpoint. Knows no model."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sonoro.core.errors import CheckpointError
from sonoro.words.tracking import Pointing

__all__ = ["FILE", "WordHeads", "read_heads", "read_table", "write_heads"]

FILE = "word_heads.json"
"""In the checkpoint's folder."""


class WordHeads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The head that points at the text by layout: where the model has all of the `text_first`, and where its
    `text_along` comes a token a frame, with the sound. None: no head of the checkpoint does.

    To choose one, `candidates` (layer, head; ascending) are watched instead, and not the text alone: all positions.
    """

    text_first: Pointing | None = None
    text_along: Pointing | None = None
    candidates: tuple[tuple[int, int], ...] = ()

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Layer and head of each that is watched, once, ascending."""
        if self.candidates:
            return self.candidates
        pointings = (self.text_first, self.text_along)
        return tuple(sorted({(one.layer, one.head) for one in pointings if one is not None}))

    @property
    def is_measured(self) -> bool:
        """Whether any of it was measured."""
        return any(one is not None and one.is_measured for one in (self.text_first, self.text_along))


def read_heads(folder: Path) -> WordHeads:
    """The table of the checkpoint in `folder`, empty if it has none. Raises `CheckpointError` naming the file."""
    file = folder / FILE
    return read_table(file) if file.is_file() else WordHeads()


def read_table(file: Path) -> WordHeads:
    """The table in `file`. Raises `CheckpointError` naming it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=WordHeads)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{file} is no table of heads: {error}") from error


def write_heads(file: Path, heads: WordHeads) -> Path:
    """Keep `heads` in `file`, which is `FILE` in the checkpoint's folder; where."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(heads), indent=2) + b"\n")
    return part.replace(file)
