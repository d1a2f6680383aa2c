"""The three ways of getting a model, the same for every family: its folder's tensors, random ones, or a description.

Knows no model: what a family is made of is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from sonoro.core.types import ModelSpec, OptionValue
from sonoro.models.base import Description, Family, LoadedModel
from sonoro.models.words import ShowsWords
from sonoro.nn import stored
from sonoro.nn.weights import Shape
from sonoro.words.heads import read_heads

__all__ = ["Parts", "make_family"]

_DUMMY_SEED = 0
_WEIGHT_FILES = ("*.safetensors*", "pytorch_model*", "model.bin*", "model.pth*")

Shapes = dict[str, dict[str, Shape]]


class Weights(Protocol):
    """What a model's `weights` module offers, of its `config`."""

    def load(self, folder: Path, config: Any, *, device: torch.device, dtype: torch.dtype) -> Any:
        """The modules of a folder, ready to speak, and which of its tensors they `skipped`.

        Raises `CheckpointError` naming the file or tensor.
        """

    def init_dummy(self, config: Any, seed: int, *, device: torch.device, dtype: torch.dtype) -> Any:
        """Modules of random weights, ready to speak."""

    def stored_shapes(self, config: Any, folder: Path | None = None) -> Shapes:
        """By file, the tensors of a release; those in `folder`, having raised what `load` would."""

    def count_parts(self, shapes: Mapping[str, Mapping[str, Shape]]) -> dict[str, int]:
        """Elements by part of the model."""

    def weight_bytes(self, config: Any, dtype: torch.dtype) -> int:
        """What the weights take in memory."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a model brings: `read` its configuration (of a folder, or by a released name), its `weights`; its
    `tokenizer` (of a folder, which must have `tokenizer_file`, or None for a stand-in), and `model` (name,
    configuration, modules, tokeniser). `spec`, `sizes` and `position_bytes` describe it without allocating it.
    """

    read: Callable[[Any], Any]
    weights: Weights
    tokenizer: Callable[[Any, Path | None], Any]
    tokenizer_file: str
    model: Callable[[str, Any, Any, Any], Any]
    spec: Callable[[str, Any], ModelSpec]
    sizes: Callable[[Any], dict[str, str | int | float]]
    position_bytes: Callable[[Any, torch.dtype], int]
    hub_settings: Mapping[str, OptionValue] = field(default_factory=dict)


def make_family(model_type: str, configurations: Mapping[str, str], hub_files: Sequence[str], parts: Parts) -> Family:
    """The registry's entry of a model that is made of `parts`."""
    weights = parts.weights

    def from_folder(folder: Path, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        # Headers and small files come first: what is wrong with them is said before gigabytes are read.
        config = parts.read(folder)
        parameters = weights.count_parts(weights.stored_shapes(config, folder))
        tokenizer = parts.tokenizer(config, folder)
        modules = weights.load(folder, config, device=device, dtype=dtype)
        stored.warn(name, modules.skipped)
        model = parts.model(name, config, modules, tokenizer)
        if isinstance(model, ShowsWords):
            model.word_heads = read_heads(folder)
        return LoadedModel(model, device, dtype, parameters, modules.skipped)

    def from_random(source: Path | str, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        config = parts.read(source)
        has_tokenizer = isinstance(source, Path) and (source / parts.tokenizer_file).is_file()
        tokenizer = parts.tokenizer(config, Path(source) if has_tokenizer else None)
        modules = weights.init_dummy(config, _DUMMY_SEED, device=device, dtype=dtype)
        parameters = weights.count_parts(weights.stored_shapes(config))
        return LoadedModel(parts.model(name, config, modules, tokenizer), device, dtype, parameters)

    def describe(source: Path | str, name: str, dtype: torch.dtype) -> Description:
        config = parts.read(source)
        # A folder's tensors are checked as `from_folder` would, unless it has none.
        has_weights = isinstance(source, Path) and any(any(source.glob(kind)) for kind in _WEIGHT_FILES)
        shapes = weights.stored_shapes(config, Path(source) if has_weights else None)
        spec = parts.spec(name, config)
        return Description(
            spec=spec,
            configuration={"family": model_type, **parts.sizes(config)},
            parameters=weights.count_parts(shapes),
            files={file: sum(math.prod(shape) for shape in named.values()) for file, named in shapes.items()},
            memory_bytes={
                "weights": weights.weight_bytes(config, dtype),
                "attention, per second of audio": round(parts.position_bytes(config, dtype) / spec.frame_s),
            },
        )

    return Family(model_type, configurations, hub_files, from_folder, from_random, describe, parts.hub_settings)
