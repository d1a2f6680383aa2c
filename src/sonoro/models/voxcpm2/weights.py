"""The tensors of a checkpoint folder: their released names and shapes, loading, random filling, counting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from sonoro.nn import weights
from sonoro.nn.weights import Fusion, Shape

from . import codec_weights
from .backbone import VoxLM
from .codec import VoxCodec
from .config import ModelConfig

__all__ = ["MODEL_FILE", "Modules", "count_parts", "init_dummy", "load", "stored_shapes", "weight_bytes"]

MODEL_FILE = "model.safetensors"

_PARTS = {
    "base LM": ("base_lm.layers.", "base_lm.norm."),
    "text embedding": ("base_lm.embed_tokens.",),
    "residual LM": ("residual_lm.",),
    "local encoder": ("feat_encoder.",),
    "flow": ("feat_decoder.",),
    "quantiser and projections": ("fsq_layer.", "enc_", "lm_to_", "res_to_", "fusion_", "stop_"),
}


class Modules(NamedTuple):
    """Everything with weights, ready to speak."""

    lm: VoxLM
    codec: VoxCodec


def load(folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> Modules:
    """The modules of a checkpoint folder. Raises `CheckpointError` naming tensors and files."""
    lm = weights.empty(VoxLM, config)
    weights.load(lm, [folder / MODEL_FILE], dtype_of=lambda _: dtype, device=device, fusions=_fusions(config))
    lm.finalize()
    file = folder / codec_weights.CODEC_FILE
    return Modules(lm, codec_weights.load(file, config.codec, device=device, dtype=dtype))


def init_dummy(config: ModelConfig, seed: int, *, device: torch.device, dtype: torch.dtype) -> Modules:
    """Modules of random weights at any size."""
    lm = weights.empty(VoxLM, config)
    weights.init_dummy(lm, seed, dtype_of=lambda _: dtype, device=device)
    lm.finalize()
    return Modules(lm, codec_weights.init_dummy(config.codec, seed, device=device, dtype=dtype))


def stored_shapes(config: ModelConfig, folder: Path | None = None) -> dict[str, dict[str, Shape]]:
    """By file: names and shapes of the tensors of a release; of those in `folder`, having raised what `load` would."""
    lm, codec, file = weights.empty(VoxLM, config), config.codec, codec_weights.CODEC_FILE
    if folder is None:
        return {MODEL_FILE: weights.stored_shapes(lm, _fusions(config)), file: codec_weights.stored_shapes(codec)}
    checked = weights.check(lm, [folder / MODEL_FILE], fusions=_fusions(config))
    return {MODEL_FILE: checked, file: codec_weights.check(folder / file, codec)}


def count_parts(shapes: Mapping[str, Mapping[str, Shape]]) -> dict[str, int]:
    """Elements of the tensors of both files by part."""
    counts = weights.count_parts(shapes[MODEL_FILE], _PARTS)
    return counts | weights.count_parts(shapes[codec_weights.CODEC_FILE], codec_weights.PARTS)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the weights take in memory beside a language model in `dtype`; derived tables not counted."""
    numbers = sum(tensor.numel() for tensor in weights.empty(VoxLM, config).state_dict().values())
    return numbers * dtype.itemsize + codec_weights.weight_bytes(config.codec, dtype)


def _fusions(config: ModelConfig) -> tuple[Fusion, ...]:
    lm, local, flow = config.lm_config.num_attention_heads, config.encoder_config.num_heads, config.dit_config.num_heads
    stacks = {"base_lm.": lm, "residual_lm.": lm, "feat_encoder.": local, "feat_decoder.": flow}
    shared = config.lm_config.num_key_value_heads
    return tuple(name for prefix, heads in stacks.items() for name in weights.parted_names(prefix, heads, shared))
