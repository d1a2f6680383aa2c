"""Compress results of the recipe, to store them or move them between machines.

`python -m builtin_voice.pack WORK OUTPUT encoder.pt codes.pt` writes each as OUTPUT/NAME.xx in pieces of 15 MiB:
weights in 16 bits, without random ones and those also in encoder.pt; of codes the first encoding, bit-packed.
`--unpack` restores WORK's files from OUTPUT's pieces, encoder.pt before codec.pt."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from builtin_voice import settings
from builtin_voice.recipe import new_codec_config
from builtin_voice.training import halved, save
from builtin_voice.voice_codec import VoiceCodec

PIECE_BYTES = 15 * 2**20
_CODING = ("encoder.", "quantizer.books", "quantizer.sums", "quantizer.usage", "sketch", "phones", "first_phones")
LEFT_OUT = {
    "encoder.pt": ("decoder.decoder.",),
    "codec.pt": (*_CODING, "decoder.quantizer."),
    "codec-snapshot.pt": ("critic",),
}
"""Prefixes of the names that are left out, by file."""


def packed_codes(stored: dict[str, Any]) -> dict[str, Any]:
    """The first encoding of the results of `encode`, with codes bit-packed."""
    count = len(stored["voices"])
    tokens, frames = (int(stored[name][:count].sum()) for name in ("text_lengths", "code_lengths"))
    width = (settings.CODEBOOK_SIZE - 1).bit_length()
    # 16 bits each, most significant first, of which the last `width` are kept.
    high_first = stored["codes"][:frames].numpy().astype(">u2").view(np.uint8)
    bits = np.unpackbits(high_first.reshape(-1, 2), axis=1)[:, 16 - width :]
    return stored | {
        "texts": stored["texts"][:tokens],
        "text_lengths": stored["text_lengths"][:count],
        "code_lengths": stored["code_lengths"][:count],
        "codes": torch.from_numpy(np.packbits(bits)),
    }


def unpacked_codes(stored: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `packed_codes`, with the first encoding only."""
    frames, width = int(stored["code_lengths"].sum()), (settings.CODEBOOK_SIZE - 1).bit_length()
    bits = np.unpackbits(stored["codes"].numpy(), count=frames * settings.CODEBOOKS * width).reshape(-1, width)
    codes = np.packbits(np.pad(bits, ((0, 0), (16 - width, 0))), axis=1).view(">u2").astype(np.int16)
    return stored | {"codes": torch.from_numpy(codes.reshape(frames, settings.CODEBOOKS))}


def pack(path: Path, folder: Path) -> None:
    values = torch.load(path, map_location="cpu", weights_only=True)
    values = {name: value for name, value in values.items() if not name.startswith(LEFT_OUT.get(path.name, ("\n",)))}
    buffer = io.BytesIO()
    torch.save(packed_codes(values) if "codes" in values else halved(values), buffer)
    data = buffer.getbuffer()
    for piece in range(-(-len(data) // PIECE_BYTES)):
        (folder / f"{path.name}.{piece:02d}").write_bytes(data[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES])


def unpack(path: Path, folder: Path) -> None:
    pieces = sorted(folder.glob(f"{path.name}.[0-9][0-9]"))
    data = b"".join(piece.read_bytes() for piece in pieces)
    values = torch.load(io.BytesIO(data), weights_only=True)
    base: dict[str, Any] = {}
    if path.name == "encoder.pt":
        base = VoiceCodec(new_codec_config()).state_dict()
    elif path.name == "codec.pt":
        base = torch.load(path.with_name("encoder.pt"), weights_only=True)
    save(unpacked_codes(values) if "codes" in values else base | _widened(values), path)


def _widened(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _widened(value)
        if isinstance(value, dict)
        else value.float()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in values.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("names", nargs="+", help="files of WORK; what is not there is passed over")
    parser.add_argument("--unpack", action="store_true")
    options = parser.parse_args()
    for name in options.names:
        if options.unpack:
            unpack(options.work / name, options.output)
        elif (options.work / name).exists():
            pack(options.work / name, options.output)


if __name__ == "__main__":
    main()
