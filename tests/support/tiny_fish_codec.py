"""A small codec.pth under the released names, whose weights hide no term.

What writes it needs numpy and torch alone, and the tool that runs the official classes imports it too.
"""

import hashlib
import zlib

import numpy as np
import torch

TRANSFORMER = {
    "width": 64,
    "intermediate": 96,
    "layers": 2,
    "heads": 4,
    "kv_heads": 4,
    "head_width": 16,
    "window": 8,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "has_rounded_angles": True,
}
TINY_CODEC = {
    "sample_rate": 44100,
    "encoder_dim": 8,
    "encoder_rates": [2, 2, 2],
    "encoder_transformer": TRANSFORMER
    | {"intermediate": 192, "heads": 1, "kv_heads": 1, "head_width": 64, "window": 512},
    "downsample": [2, 2],
    "transformer": TRANSFORMER,
    "semantic_codes": 64,
    "residual_codes": 32,
    "residual_codebooks": 9,
    "codebook_width": 8,
    "decoder_dim": 48,
    "decoder_rates": [2, 2, 2],
}
"""What config.json has as `codec_config`. The encoder's heads are 64 wide in the official code, whatever the width."""

HOP = 32


def _conv(name, weight, rows=None):
    """A convolution with weight norm as it is released; `rows` biases."""
    stem = f"{name}.conv.parametrizations.weight"
    return {
        f"{stem}.original0": (weight[0], 1, 1),
        f"{stem}.original1": weight,
        f"{name}.conv.bias": (rows or weight[0],),
    }


def _unit(name, channels):
    return {
        f"{name}.block.0.alpha": (1, channels, 1),
        **_conv(f"{name}.block.1", (channels, channels, 7)),
        f"{name}.block.2.alpha": (1, channels, 1),
        **_conv(f"{name}.block.3", (channels, channels, 1)),
    }


def _transformer(name, sizes):
    width, inner, heads = sizes["width"], sizes["intermediate"], sizes["heads"] * sizes["head_width"]
    shapes = {f"{name}.norm.weight": (width,)}
    for index in range(sizes["layers"]):
        layer = f"{name}.layers.{index}"
        shapes |= {
            f"{layer}.attention.wqkv.weight": (3 * heads, width),
            f"{layer}.attention.wo.weight": (width, heads),
            f"{layer}.feed_forward.w1.weight": (inner, width),
            f"{layer}.feed_forward.w3.weight": (inner, width),
            f"{layer}.feed_forward.w2.weight": (width, inner),
            **{f"{layer}.{part}_norm.weight": (width,) for part in ("attention", "ffn")},
            **{f"{layer}.{part}_layer_scale.gamma": (width,) for part in ("attention", "ffn")},
        }
    return shapes


def _resampler(name, width):
    block = f"{name}.1"
    return {
        f"{name}.0.conv.weight": (width, width, 2),
        f"{name}.0.conv.bias": (width,),
        f"{block}.dwconv.conv.weight": (width, 1, 7),
        f"{block}.dwconv.conv.bias": (width,),
        f"{block}.norm.weight": (width,),
        f"{block}.norm.bias": (width,),
        f"{block}.pwconv1.weight": (4 * width, width),
        f"{block}.pwconv1.bias": (4 * width,),
        f"{block}.pwconv2.weight": (width, 4 * width),
        f"{block}.pwconv2.bias": (width,),
        f"{block}.gamma": (width,),
    }


def _codebook(name, codes, width, inner):
    return {
        f"{name}.codebook.weight": (codes, inner),
        f"{name}.in_proj.weight_g": (inner, 1, 1),
        f"{name}.in_proj.weight_v": (inner, width, 1),
        f"{name}.in_proj.bias": (inner,),
        f"{name}.out_proj.weight_g": (width, 1, 1),
        f"{name}.out_proj.weight_v": (width, inner, 1),
        f"{name}.out_proj.bias": (width,),
    }


def shapes_of(config=TINY_CODEC):
    """Names and shapes of codec.pth, written down from the released one, none of them asked of the code under test."""
    width, inner = config["transformer"]["width"], config["codebook_width"]
    channels = config["encoder_dim"]
    shapes = _conv("encoder.block.0", (channels, 1, 7))
    for index, rate in enumerate(config["encoder_rates"], start=1):
        block = f"encoder.block.{index}.block"
        for unit in range(3):
            shapes |= _unit(f"{block}.{unit}", channels)
        shapes |= {f"{block}.3.alpha": (1, channels, 1), **_conv(f"{block}.4", (2 * channels, channels, 2 * rate))}
        channels *= 2
    shapes |= _transformer(f"{block}.5", config["encoder_transformer"])
    index = len(config["encoder_rates"]) + 1
    shapes |= {f"encoder.block.{index}.alpha": (1, width, 1), **_conv(f"encoder.block.{index + 1}", (width, width, 3))}
    for index in range(len(config["downsample"])):
        shapes |= _resampler(f"quantizer.downsample.{index}", width) | _resampler(f"quantizer.upsample.{index}", width)
    for part in ("pre_module", "post_module"):
        shapes |= _transformer(f"quantizer.{part}", config["transformer"])
    shapes |= _codebook("quantizer.semantic_quantizer.quantizers.0", config["semantic_codes"], width, inner)
    for index in range(config["residual_codebooks"]):
        shapes |= _codebook(f"quantizer.quantizer.quantizers.{index}", config["residual_codes"], width, inner)
    channels = config["decoder_dim"]
    shapes |= _conv("decoder.model.0", (channels, width, 7))
    for index, rate in enumerate(config["decoder_rates"], start=1):
        block, half = f"decoder.model.{index}.block", channels // 2
        shapes |= {f"{block}.0.alpha": (1, channels, 1), **_conv(f"{block}.1", (channels, half, 2 * rate), half)}
        for unit in (2, 3, 4):
            shapes |= _unit(f"{block}.{unit}", half)
        channels = half
    index = len(config["decoder_rates"]) + 1
    return shapes | {
        f"decoder.model.{index}.alpha": (1, channels, 1),
        **_conv(f"decoder.model.{index + 1}", (1, channels, 7)),
    }


def codec_tensors(seed=0, config=TINY_CODEC, snake_std=0.3):
    """Float32 arrays by released name: nothing is left at 0 or 1, sums keep a size near 1, samples stay below 1."""
    tensors = {}
    last = f"decoder.model.{len(config['decoder_rates']) + 2}."
    for name, shape in shapes_of(config).items():
        normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "alpha":
            normal = 0.8 + snake_std * np.abs(normal)
        elif leaf == "gamma" or "norm.weight" in name:
            normal = 0.6 + 0.1 * np.abs(normal)
        elif leaf in ("weight_g", "original0"):
            normal = (0.05 if name.startswith(last) else 0.8) * (1 + 0.1 * np.abs(normal))
        elif leaf == "bias":
            normal = 0.1 * normal
        elif leaf == "weight" and "codebook" not in name:
            normal = normal / np.sqrt(np.prod(shape[1:]))
        tensors[name] = normal.astype(np.float32)
    return tensors


def digest(tensors):
    """A fingerprint of names and values."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].tobytes())
    return total.hexdigest()


def write_codec(path, seed=0, config=TINY_CODEC, snake_std=0.3):
    """Write codec.pth with random tensors, and stale buffers as the released one has them."""
    tensors = {name: torch.from_numpy(tensor) for name, tensor in codec_tensors(seed, config, snake_std).items()}
    for part in ("encoder.block.3.block.5", "quantizer.pre_module", "quantizer.post_module"):
        tensors[f"{part}.causal_mask"] = torch.ones(4, 4, dtype=torch.bool)
        tensors[f"{part}.freqs_cis"] = torch.ones(4, 8, 2, dtype=torch.bfloat16)
    torch.save(tensors, path)


def sound(samples, seed=0):
    """Something with a changing pitch and loudness: [S] float64 within +-0.9."""
    random = np.random.default_rng(seed)
    pitch = np.cumsum(0.02 + 0.3 * np.repeat(random.random(samples // 200 + 1), 200)[:samples])
    loudness = np.repeat(random.random(samples // 300 + 1), 300)[:samples]
    return np.clip(loudness * np.sin(pitch) + 0.1 * random.standard_normal(samples), -0.9, 0.9)
