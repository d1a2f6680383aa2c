"""Load, randomly fill and measure the weights of a checkpoint folder: a language model and its codec."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from sonoro.models.shared.codec_file import CodecFile
from sonoro.models.shared.streaming import StreamingCodec
from sonoro.nn import stored, weights
from sonoro.nn.linear import Linear
from sonoro.nn.transformer import quantize_layers
from sonoro.nn.weights import DummyRule, Fusion, Shape

MODEL_FILES = "model.safetensors"
"""The name under which the language model's files are found (`stored.find`) and reported."""

C = TypeVar("C")
L = TypeVar("L", bound=nn.Module)
M = TypeVar("M", bound=StreamingCodec)


@dataclass(frozen=True)
class Modules(Generic[L, M]):
    """Language model and codec with final weights; `skipped` names the stored tensors that were not used."""

    lm: L
    codec: M
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelFiles(Generic[C, L, M]):
    """How a family's language models and codecs are stored.

    `make` builds the language model of a configuration; `finalize` is called once its weights are final. `fusions` map
    its names to those of a folder (or, given no names, of the release); `spelling` maps released names to those of a
    folder. `parts` are name prefixes by part, `rules` the random weights of dummy models. `is_wide`: tensors that stay
    in float32. `reads_8_bits`: whether layers that a file has in 8 bits stay so, for a model on a device in a dtype.
    `row_terms`: layers in fp8 may take rows as so many terms in E4M3. The codec is in `codec_file`,
    which may be the same, with `codec_parts`; `codec_config` derives its configuration."""

    make: Callable[[C], L]
    finalize: Callable[[L], None]
    fusions: Callable[[C, Iterable[str]], tuple[Fusion, ...]]
    parts: Mapping[str, tuple[str, ...]]
    codec: CodecFile[Any, M]
    codec_file: str
    codec_parts: Mapping[str, tuple[str, ...]]
    codec_config: Callable[[C], Any]
    rules: tuple[DummyRule, ...] = ()
    is_wide: Callable[[str], bool] = lambda name: False
    reads_8_bits: Callable[[L, torch.device, torch.dtype], bool] = lambda lm, device, dtype: False
    row_terms: int = 0
    spelling: Callable[[Collection[str]], Callable[[str], str]] = lambda names: str

    def load(
        self, folder: Path, config: C, *, device: torch.device, dtype: torch.dtype, quantization: str = "none"
    ) -> Modules[L, M]:
        """Load the modules of a checkpoint folder. Raises `CheckpointError` naming tensors and files."""
        lm = self._empty(config, quantization)
        if quantization == "none" and self.reads_8_bits(lm, device, dtype):
            for part in lm.modules():
                if isinstance(part, Linear):
                    part.quantization = "stored"
        reading = self._reading(folder, config)
        # The codec first: while it is read, its tensors are in memory twice.
        codec_config = self.codec_config(config)
        codec = self.codec.load(folder / self.codec_file, codec_config, device=device, dtype=dtype)
        skipped = weights.load(lm, dtype_of=lambda name: self._dtype_of(name, dtype), device=device, **reading)
        self._finish(lm)
        if self.codec_file == MODEL_FILES:
            own = self.codec.stored_shapes(codec_config)
            skipped = tuple(name for name in skipped if name not in own)
        return Modules(lm, codec, (*skipped, *codec.skipped))

    def init_dummy(
        self, config: C, seed: int, *, device: torch.device, dtype: torch.dtype, quantization: str = "none"
    ) -> Modules[L, M]:
        """Modules with random weights, whose frames vary."""
        lm, codec = self._empty(config, quantization), self.codec_config(config)
        weights.init_dummy(lm, seed, rules=self.rules, dtype_of=lambda name: self._dtype_of(name, dtype), device=device)
        self._finish(lm)
        return Modules(lm, self.codec.init_dummy(codec, seed, device=device, dtype=dtype))

    def stored_shapes(self, config: C, folder: Path | None = None) -> dict[str, dict[str, Shape]]:
        """Names and shapes of a release's tensors, by file; with `folder`, of its tensors, checked as by `load`."""
        lm, codec = weights.empty(self.make, config), self.codec_config(config)
        if folder is None:
            named, decoding = weights.stored_shapes(lm, self.fusions(config, ())), self.codec.stored_shapes(codec)
        else:
            named = weights.check(lm, **self._reading(folder, config))
            decoding = self.codec.check(folder / self.codec_file, codec)
        if self.codec_file == MODEL_FILES:
            return {MODEL_FILES: named | decoding}
        return {MODEL_FILES: named, self.codec_file: decoding}

    def _reading(self, folder: Path, config: C) -> dict[str, Any]:
        """Arguments for `weights.load` and `weights.check` of `folder`."""
        files = stored.find(folder / MODEL_FILES)
        names = stored.headers(files).keys()
        return {"files": files, "fusions": self.fusions(config, names), "spell": self.spelling(names)}

    def count_parts(self, shapes: Mapping[str, Mapping[str, Shape]]) -> dict[str, int]:
        """Number of elements by part of language model and codec, without empty parts."""
        if self.codec_file == MODEL_FILES:
            counts = weights.count_parts(shapes[MODEL_FILES], {**self.parts, **self.codec_parts})
        else:
            counts = weights.count_parts(shapes[MODEL_FILES], self.parts)
            counts |= weights.count_parts(shapes[self.codec_file], self.codec_parts)
        return {part: count for part, count in counts.items() if count}

    def weight_bytes(self, config: C, dtype: torch.dtype, quantization: str = "none") -> int:
        """Bytes of the weights, without derived tables: in `dtype`, layers in `quantization`, the codec in float32."""
        lm = self._empty(config, quantization)
        tensors = weights.empty(self.make, config).state_dict().items()
        taken = sum(tensor.numel() * self._dtype_of(name, dtype).itemsize for name, tensor in tensors)
        for part in lm.modules():
            if isinstance(part, Linear) and part.quantization != "none":
                rows, columns = part.weight.shape
                taken += rows * torch.float32.itemsize - rows * columns * (dtype.itemsize - 1)
        return taken + self.codec.weight_bytes(self.codec_config(config), torch.float32)

    def _finish(self, lm: L) -> None:
        """Run `finalize` and return the memory it freed, before small allocations land in the freed blocks."""
        self.finalize(lm)
        torch.cuda.empty_cache()

    def _empty(self, config: C, quantization: str) -> L:
        lm = weights.empty(self.make, config)
        quantize_layers(lm, quantization, row_terms=self.row_terms)
        return lm

    def _dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(torch.float32, dtype) if self.is_wide(name) else dtype
