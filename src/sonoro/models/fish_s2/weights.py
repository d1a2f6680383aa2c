"""The tensors of a checkpoint folder: their released names and shapes, loading, random filling, counting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from sonoro.nn import weights
from sonoro.nn.weights import DummyRule, Shape

from . import codec_weights
from .backbone import DualAR
from .codec import FishCodec
from .config import ModelConfig

__all__ = ["MODEL_FILES", "Modules", "count_parts", "init_dummy", "load", "stored_shapes", "weight_bytes"]

MODEL_FILES = "model.safetensors"
"""What the files of the language model are called together."""

_SLOW, _FAST = "text_model.model.", "audio_decoder."

_PARTS = {
    "slow layers": (f"{_SLOW}layers.",),
    "text embedding and head": (f"{_SLOW}embeddings.",),
    "fast layers": (f"{_FAST}layers.",),
    "fast embedding": (f"{_FAST}embeddings.",),
    "fast head": (f"{_FAST}output.",),
    "codebook embeddings": (f"{_FAST}codebook_embeddings.",),
    "norms": (f"{_SLOW}norm.", f"{_FAST}norm."),
}

_FUSIONS = (*weights.llama_names(f"{_SLOW}layers."), *weights.llama_names(f"{_FAST}layers."))

# Logits about twice as wide as they would be: draws that are neither flat nor always the same.
_DUMMY_RULES = (
    DummyRule(rf"^{_SLOW}embeddings\.", gain=2.0),
    DummyRule(rf"^{_FAST}output\.", gain=2.0),
    DummyRule(rf"^{_FAST}(codebook_)?embeddings\.", std=0.3),
)


class Modules(NamedTuple):
    """Everything with weights, ready to speak."""

    lm: DualAR
    codec: FishCodec


def load(folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> Modules:
    """The modules of a checkpoint folder. Raises `CheckpointError` naming tensors and files."""
    lm, codec = weights.empty(DualAR, config), config.codec_config
    weights.load(lm, weights.shards(folder), dtype_of=lambda _: dtype, device=device, fusions=_FUSIONS)
    lm.finalize()
    return Modules(lm, codec_weights.load(folder / codec_weights.CODEC_FILE, codec, device=device, dtype=dtype))


def init_dummy(config: ModelConfig, seed: int, *, device: torch.device, dtype: torch.dtype) -> Modules:
    """Modules of random weights at any size: codes that vary."""
    lm, codec = weights.empty(DualAR, config), config.codec_config
    weights.init_dummy(lm, seed, rules=_DUMMY_RULES, dtype_of=lambda _: dtype, device=device)
    lm.finalize()
    return Modules(lm, codec_weights.init_dummy(codec, seed, device=device, dtype=dtype))


def stored_shapes(config: ModelConfig, folder: Path | None = None) -> dict[str, dict[str, Shape]]:
    """By file: names and shapes of the tensors of a release; of those in `folder`, having raised what `load` would."""
    lm, codec, file = weights.empty(DualAR, config), config.codec_config, codec_weights.CODEC_FILE
    if folder is None:
        return {MODEL_FILES: weights.stored_shapes(lm, _FUSIONS), file: codec_weights.stored_shapes(codec)}
    checked = weights.check(lm, weights.shards(folder), fusions=_FUSIONS)
    return {MODEL_FILES: checked, file: codec_weights.check(folder / file, codec)}


def count_parts(shapes: Mapping[str, Mapping[str, Shape]]) -> dict[str, int]:
    """Elements of the tensors of both files by part."""
    tensors = {**shapes[MODEL_FILES], **shapes[codec_weights.CODEC_FILE]}
    return weights.count_parts(tensors, {**_PARTS, **codec_weights.PARTS})


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the weights take in memory beside a language model in `dtype`; derived tables not counted."""
    numbers = sum(tensor.numel() for tensor in weights.empty(DualAR, config).state_dict().values())
    return numbers * dtype.itemsize + codec_weights.weight_bytes(config.codec_config, dtype)
