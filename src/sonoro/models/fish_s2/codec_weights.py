"""The tensors of codec.pth: their released names and shapes, strict loading, random filling.

Convolutions are stored with weight norm, in either of two spellings, or plain, and are folded here; tensors that are
stored and only derived (masks, rotary tables) are dropped.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch
from torch import Tensor

from sonoro.models.streaming import codec_dtype_for
from sonoro.nn import torch_file, weights
from sonoro.nn.weights import DummyRule, Shape
from sonoro.nn.window import WindowAttention, part_pairs

from .codec import CodecConfig, FishCodec

__all__ = ["CODEC_FILE", "PARTS", "check", "init_dummy", "load", "stored_shapes", "weight_bytes"]

CODEC_FILE = "codec.pth"

_RENAMES = {
    r"^(de|en)coder\.(quantizer\.)?(?=semantic_|quantizer|pre_module|post_module|upsample|downsample)": "quantizer.",
    r"\.self_attn_layer_scale\.scale$": ".attention_layer_scale.gamma",
    r"\.mlp_layer_scale\.scale$": ".ffn_layer_scale.gamma",
    r"\.act1\.": ".block.0.",
    r"\.conv1\.": ".block.1.",
    r"\.act2\.": ".block.2.",
    r"\.conv2\.": ".block.3.",
}
"""From a module's name to the released one, each where it applies, in this order; those of `llama_names` besides."""

PARTS = {
    "codec decoder": ("decoder.", "quantizer.post_module.", "quantizer.upsample."),
    "codec codebooks": ("quantizer.semantic_quantizer.", "quantizer.quantizer."),
    "codec encoder": ("encoder.", "quantizer.pre_module.", "quantizer.downsample."),
}


def load(file: Path, config: CodecConfig, *, device: torch.device, dtype: torch.dtype) -> FishCodec:
    """The codec of `file`, ready to speak beside a model in `dtype`. Raises `CheckpointError` naming tensors."""
    codec, codec_dtype = weights.empty(FishCodec, config), codec_dtype_for(device, dtype)
    _, folded = _read(file, torch.device("cpu"), codec)
    attentions = {f"{name}.qkv_proj.weight": layer for name, layer in codec.named_modules()}

    def read(name: str, shape: Shape) -> Tensor:
        value = torch.cat([folded[part].float() for part in _released(name, shape)])
        if isinstance(layer := attentions.get(name), WindowAttention):
            value = part_pairs(value, sum(layer.heads[:2]), layer.head_width)
        return value.view(shape).to(device, _dtype_of(name, codec_dtype))

    weights.fill(codec, read)
    codec.finalize()
    return codec


def init_dummy(config: CodecConfig, seed: int, *, device: torch.device, dtype: torch.dtype) -> FishCodec:
    """A codec of random weights, ready to speak beside a model in `dtype`: loud but not clipped, codes that vary."""
    codec = weights.empty(FishCodec, config)
    dtype_of = functools.partial(_dtype_of, dtype=codec_dtype_for(device, dtype))
    weights.init_dummy(codec, seed, rules=_DUMMY_RULES, dtype_of=dtype_of, device=device)
    codec.finalize()
    return codec


def check(file: Path, config: CodecConfig) -> dict[str, Shape]:
    """Names and shapes of the tensors in `file` that count, having raised what `load` would; reads no values."""
    stored, _ = _read(file, torch.device("meta"), weights.empty(FishCodec, config))
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def stored_shapes(config: CodecConfig) -> dict[str, Shape]:
    """Names and shapes of a release's tensors, weight norms as they are stored."""
    shapes: dict[str, Shape] = {}
    for name, shape in _folded_shapes(weights.empty(FishCodec, config)).items():
        normed = re.fullmatch(r"((?:de|en)coder\..*conv|.*(?:in|out)_proj)\.weight", name)
        if normed is None:
            shapes[name] = shape
        else:
            spelling = torch_file.NORM_SPELLINGS[normed[1].endswith("_proj")]
            shapes |= {normed[1] + spelling[0]: (shape[0], 1, 1), normed[1] + spelling[1]: shape}
    return shapes


def weight_bytes(config: CodecConfig, dtype: torch.dtype) -> int:
    """What the weights take in memory with the decoder in `dtype`; derived tables not counted."""
    tensors = weights.empty(FishCodec, config).state_dict().items()
    return sum(tensor.numel() * _dtype_of(name, dtype).itemsize for name, tensor in tensors)


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    # What makes codes stays in float32, as do the tables and rates from which others are derived.
    is_source = name.startswith("decoder.quantizer.") or name.endswith(".alpha")
    return dtype if name.startswith("decoder.") and not is_source else torch.float32


def _released(name: str, shape: Shape) -> dict[str, Shape]:
    """The released names and shapes, folded, of what the module calls `name`; its rows are theirs in this order."""
    released = {}
    parts = next((parts for fusion in weights.llama_names("") if (parts := fusion.split(name, shape))), {name: shape})
    for part, part_shape in parts.items():
        stored = part
        for pattern, replacement in _RENAMES.items():
            stored = re.sub(pattern, replacement, stored)
        released[stored] = (1, *part_shape, 1) if stored.endswith(".alpha") else part_shape
    return released


def _folded_shapes(codec: FishCodec) -> dict[str, Shape]:
    named = codec.state_dict().items()
    return {part: shape for name, tensor in named for part, shape in _released(name, tuple(tensor.shape)).items()}


def _read(file: Path, device: torch.device, codec: FishCodec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of `file` that count, as stored and with weight norms folded; raises unless `codec` has the same."""
    live = torch_file.read(file, device, dropped=(".causal_mask", ".freqs_cis"))
    stored = {name.removeprefix("generator."): tensor for name, tensor in live.items()}
    folded = torch_file.fold_norms(stored, file)
    shapes = {name: tuple(tensor.shape) for name, tensor in folded.items()}
    weights.compare(shapes, _folded_shapes(codec), {}, where=str(file))
    return stored, folded


# The gains keep residual sums from growing, so that the output is about a fifth of full scale at the released widths.
_DUMMY_RULES = (
    DummyRule(r"\.alpha$", mean=1.0, std=0.1),
    DummyRule(r"codebook\.weight$", std=1.0),
    DummyRule(r"(\.gamma|layer_scale\.scale)$", mean=0.3, std=0.03),
    DummyRule(r"out_proj\.weight$", gain=0.3),
    DummyRule(r"^decoder\.upsample\.\d+\.0\.conv\.weight$", fan_in=lambda shape: shape[0]),
    DummyRule(r"^decoder\.model\.\d+\.block\.1\.conv\.weight$", fan_in=lambda shape: 2 * shape[0]),
    DummyRule(r"\.conv2\.conv\.weight$", gain=0.3),
    DummyRule(r"^decoder\.model\.[1-9]\d*\.conv\.weight$", gain=0.06),
)
