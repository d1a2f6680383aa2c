"""The codec of tests/support/tiny_vox_codec.py, loaded."""

import tempfile
from pathlib import Path

import msgspec
import torch
from tiny_vox_codec import TINY_CODEC, write_codec

from sonoro.models.voxcpm2 import codec_weights
from sonoro.models.voxcpm2.codec import CodecConfig

CPU = torch.device("cpu")
CONFIG = msgspec.convert(TINY_CODEC, CodecConfig)
TILED = TINY_CODEC | {"latent_dim": 16, "decoder_dim": 128}
"""Sizes that the kernels take."""


def make_codec(config=TINY_CODEC, dtype=torch.float64, snake_std=0.3):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / codec_weights.CODEC_FILE
        write_codec(file, config=config, snake_std=snake_std)
        codec = codec_weights.FILE.load(file, msgspec.convert(config, CodecConfig), device=CPU, dtype=torch.float32)
    codec = codec.to(dtype)
    codec.finalize()
    return codec
