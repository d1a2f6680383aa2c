"""A SentencePiece unigram model, read from its file without the library that made it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER = 1, 2
_UNKNOWN = 2
_MODEL_TYPE, _UNIGRAM = 3, 1


def read_unigram(file: str) -> Tokenizer:
    """The tokeniser of a `.model` file: unigram, byte fallback, text as it stands with a space in front, for which
    pieces have `▁`. Raises any exception for another file."""
    pieces = list(_pieces(memoryview(Path(file).read_bytes())))
    if not pieces:
        raise ValueError("it has no pieces")
    unknown = next((number for number, (_, _, kind) in enumerate(pieces) if kind == _UNKNOWN), None)
    vocabulary = [(piece, score) for piece, score, _ in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=True))
    # A pre-tokeniser (Metaspace) would be wrong for texts that begin with a space.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _pieces(message: memoryview) -> Iterator[tuple[str, float, int]]:
    """Each piece with its score and kind. Raises `ValueError` for another kind of model."""
    for field, value in _fields(message):
        if field == _TRAINER and dict(_fields(value)).get(_MODEL_TYPE, _UNIGRAM) != _UNIGRAM:
            raise ValueError("it is of another kind")
        if field == _PIECES:
            piece = dict(_fields(value))
            yield bytes(piece[1]).decode(), memoryview(bytes(piece.get(2, b"\0" * 4))).cast("f")[0], piece.get(3, 1)


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: their numbers, and bytes or an integer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(message):
            raise ValueError("it is cut off")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
