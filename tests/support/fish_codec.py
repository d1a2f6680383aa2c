"""The codec of tests/support/tiny_fish_codec.py, loaded."""

import tempfile
from pathlib import Path

import msgspec
import torch
from tiny_fish_codec import TINY_CODEC, TRANSFORMER, write_codec

from sonoro.models.fish_s2 import codec_weights
from sonoro.models.fish_s2.codec import CodecConfig

CPU = torch.device("cpu")
CONFIG = msgspec.convert(TINY_CODEC, CodecConfig)
TILED = TINY_CODEC | {
    "transformer": TRANSFORMER | {"intermediate": 32, "heads": 2, "kv_heads": 2, "head_width": 32, "window": 20},
    "decoder_dim": 128,
}
"""Sizes that the kernels take."""


def make_codec(config=TINY_CODEC, dtype=torch.float64, snake_std=0.3):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / codec_weights.CODEC_FILE
        write_codec(file, config=config, snake_std=snake_std)
        codec = codec_weights.FILE.load(file, msgspec.convert(config, CodecConfig), device=CPU, dtype=torch.float32)
    codec = codec.to(dtype)
    codec.finalize()
    return codec
