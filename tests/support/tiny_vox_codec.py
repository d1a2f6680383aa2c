"""A small audiovae.pth under the released names, whose weights hide no term.

What writes it needs numpy and torch alone, and the tool that runs the official class imports it too.
"""

import zlib

import numpy as np
import torch

TINY_CODEC = {
    "encoder_dim": 8,
    "encoder_rates": [2, 5],
    "latent_dim": 8,
    "decoder_dim": 32,
    "decoder_rates": [5, 3, 2],
    "sr_bin_boundaries": [20000, 30000, 40000],
    "sample_rate": 16000,
    "out_sample_rate": 48000,
}
"""What config.json has as `audio_vae_config`."""

PATCH = 4
ENCODER_HOP, HOP = 40, 120
"""Samples per patch: of what is heard and of what is spoken."""


def _conv(name, weight, rows=None):
    """A convolution with weight norm as it is released; `rows` biases."""
    return {f"{name}.weight_g": (weight[0], 1, 1), f"{name}.weight_v": weight, f"{name}.bias": (rows or weight[0],)}


def _unit(name, channels):
    return {
        f"{name}.block.0.alpha": (1, channels, 1),
        **_conv(f"{name}.block.1", (channels, 1, 7)),
        f"{name}.block.2.alpha": (1, channels, 1),
        **_conv(f"{name}.block.3", (channels, channels, 1)),
    }


def shapes_of(config=TINY_CODEC):
    """Names and shapes of the floats in audiovae.pth, written down from the released one."""
    channels, latent = config["encoder_dim"], config["latent_dim"]
    shapes = _conv("encoder.block.0", (channels, 1, 7))
    for index, rate in enumerate(config["encoder_rates"], start=1):
        block = f"encoder.block.{index}.block"
        for unit in range(3):
            shapes |= _unit(f"{block}.{unit}", channels)
        shapes |= {f"{block}.3.alpha": (1, channels, 1), **_conv(f"{block}.4", (2 * channels, channels, 2 * rate))}
        channels *= 2
    shapes |= _conv("encoder.fc_mu", (latent, channels, 3)) | _conv("encoder.fc_logvar", (latent, channels, 3))
    channels, buckets = config["decoder_dim"], len(config["sr_bin_boundaries"]) + 1
    shapes |= _conv("decoder.model.0", (latent, 1, 7)) | _conv("decoder.model.1", (channels, latent, 1))
    for index, rate in enumerate(config["decoder_rates"], start=2):
        block, half = f"decoder.model.{index}.block", channels // 2
        shapes |= {f"{block}.0.alpha": (1, channels, 1), **_conv(f"{block}.1", (channels, half, 2 * rate), half)}
        for unit in (2, 3, 4):
            shapes |= _unit(f"{block}.{unit}", half)
        for kind in ("scale", "bias"):
            shapes[f"decoder.sr_cond_model.{index}.{kind}_embed.weight"] = (buckets, channels)
        channels = half
    index = len(config["decoder_rates"]) + 2
    return shapes | {
        f"decoder.model.{index}.alpha": (1, channels, 1),
        **_conv(f"decoder.model.{index + 1}", (1, channels, 7)),
    }


def codec_tensors(seed=0, config=TINY_CODEC, snake_std=0.3):
    """Arrays by released name: floats of which nothing is left at 0 or 1, sums near 1, samples below 1; the edges."""
    tensors = {}
    last = f"decoder.model.{len(config['decoder_rates']) + 3}."
    for name, shape in shapes_of(config).items():
        normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "alpha":
            normal = 0.8 + snake_std * np.abs(normal)
        elif leaf == "weight_g":
            size = 0.05 if name.startswith(last) else 0.5 if ".block.3." in name else 0.8
            normal = size * (1 + 0.1 * np.abs(normal))
        elif leaf == "bias":
            normal = 0.1 * normal
        elif leaf == "weight":
            normal = ("scale" in name) + 0.2 * normal
        tensors[name] = normal.astype(np.float32)
    tensors["decoder.sr_bin_boundaries"] = np.array(config["sr_bin_boundaries"], np.int32)
    return tensors


def write_codec(path, seed=0, config=TINY_CODEC, snake_std=0.3):
    """Write audiovae.pth with random tensors, as the released one holds them."""
    tensors = codec_tensors(seed, config, snake_std)
    torch.save({"state_dict": {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}}, path)
