"""Load, randomly fill and measure a codec's weights, stored under released names and with weight norm."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from sonoro.models.shared.streaming import StreamingCodec
from sonoro.nn import stored, torch_file, weights
from sonoro.nn.transformer import split_pairs
from sonoro.nn.weights import DummyRule, Fusion, Shape
from sonoro.nn.window import WindowAttention

C = TypeVar("C")
M = TypeVar("M", bound=StreamingCodec)

UNIT_NAMES = {r"\.act1\.": ".block.0.", r"\.conv1\.": ".block.1.", r"\.act2\.": ".block.2.", r"\.conv2\.": ".block.3."}
"""Renames of a residual unit's parts for files that store it as a sequence."""


def spread_rates(name: str, shape: Shape) -> Shape:
    """The stored shape of tensor `name` for releases that store Snake rates as [1, C, 1]."""
    return (1, *shape, 1) if name.endswith(".alpha") else shape


def all_but(decoder: Any) -> Callable[[str], bool]:
    """`CodecFile.is_wide` of a codec: what makes codes stays in float32, and what `decoder`, its class, says."""
    return lambda name: not name.startswith("decoder.") or decoder.is_wide(name.removeprefix("decoder."))


def split_window_pairs(codec: nn.Module, name: str, value: Tensor) -> Tensor:
    """`CodecFile.arrange` of a codec with `WindowLayers` whose file has interleaved rotary pairs."""
    stem, found, _ = name.rpartition(".qkv_proj.")
    attention = cast(WindowAttention, codec.get_submodule(stem))
    return split_pairs(value, sum(attention.heads[:2]), attention.head_width) if found else value


@dataclass(frozen=True, kw_only=True)
class CodecFile(Generic[C, M]):
    """How a family's codecs are stored; `make` builds the codec of a configuration.

    `sift` selects the codec's tensors among a file's (the path is for messages). `fusions`, then the regular
    expressions `renames`, in order, map module names to released names; `shape_of` maps a released name and the
    module's shape to the released shape. A weight whose name without `.weight` matches a key of `norms` is released
    with weight norm, in that spelling of `torch_file.NORM_SPELLINGS`; any spelling, and plain weights, are loaded.
    `unused` tensors (weight norm folded) may be stored too. `arrange` converts a stored value to the module's.
    `is_wide`: tensors that stay in float32; `rules`: random weights of dummy models."""

    make: Callable[[C], M]
    is_wide: Callable[[str], bool]
    rules: tuple[DummyRule, ...]
    renames: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, int] = field(default_factory=dict)
    shape_of: Callable[[str, Shape], Shape] = lambda name, shape: shape
    sift: Callable[[dict[str, Tensor], C, Path], dict[str, Tensor]] = lambda tensors, config, where: tensors
    fusions: Callable[[C], tuple[Fusion, ...]] = lambda config: ()
    unused: Callable[[C], dict[str, Shape]] = lambda config: {}
    arrange: Callable[[M, str, Tensor], Tensor] = lambda codec, name, value: value

    def load(self, file: Path, config: C, *, device: torch.device, dtype: torch.dtype) -> M:
        """Load the codec of `file` (or of the same in another format) in float32, for a model in `dtype`; its `skipped`
        names unused tensors. Raises `CheckpointError` naming tensors."""
        codec = weights.empty(self.make, config)
        folded, codec.skipped = self._folded(file, torch.device("cpu"), config, codec)[1:]

        def read(name: str, shape: Shape) -> Tensor:
            # Each is of one tensor of the module: it is not kept beside it.
            value = torch.cat([folded.pop(part).float() for part in self._released(name, shape, config)])
            return self.arrange(codec, name, value).view(shape).to(device)

        weights.fill(codec, read)
        return _finished(codec, dtype)

    def init_dummy(self, config: C, seed: int, *, device: torch.device, dtype: torch.dtype) -> M:
        """A codec with random weights in float32, for a model in `dtype`; its output is loud but not clipped."""
        codec = weights.empty(self.make, config)
        weights.init_dummy(codec, seed, rules=self.rules, dtype_of=lambda _: torch.float32, device=device)
        return _finished(codec, dtype)

    def check(self, file: Path, config: C) -> dict[str, Shape]:
        """Check `file` as `load` does, reading few values; returns stored names and shapes of the codec's tensors."""
        found, _, skipped = self._folded(file, torch.device("meta"), config, weights.empty(self.make, config))
        kept = {name: torch_file.folded_name(name) not in skipped for name in found}
        return {name: tuple(tensor.shape) for name, tensor in found.items() if kept[name]}

    def stored_shapes(self, config: C) -> dict[str, Shape]:
        """Names and shapes of a release's tensors, with weight norm as stored."""
        shapes: dict[str, Shape] = {}
        for name, shape in (self._shapes(weights.empty(self.make, config), config) | self.unused(config)).items():
            stem = name.removesuffix(".weight")
            kinds = [kind for pattern, kind in self.norms.items() if stem != name and re.fullmatch(pattern, stem)]
            if kinds:
                lengths, directions = torch_file.NORM_SPELLINGS[kinds[0]]
                shapes |= {stem + lengths: (shape[0], *(1,) * (len(shape) - 1)), stem + directions: shape}
            else:
                shapes[name] = shape
        return shapes

    def weight_bytes(self, config: C, dtype: torch.dtype) -> int:
        """Bytes of the weights with the decoder in `dtype`, without derived tables."""
        tensors = weights.empty(self.make, config).state_dict().items()
        return sum(
            tensor.numel() * (torch.float32 if self.is_wide(name) else dtype).itemsize for name, tensor in tensors
        )

    def _released(self, name: str, shape: Shape, config: C) -> dict[str, Shape]:
        """Released names and shapes (weight norm folded) whose rows, in this order, make the module's tensor `name`."""
        released, parts = {}, {name: shape}
        for fusion in self.fusions(config):
            parts = fusion.split(name, shape) or parts
        for part, part_shape in parts.items():
            own = part
            for pattern, replacement in self.renames.items():
                own = re.sub(pattern, replacement, own)
            released[own] = self.shape_of(own, part_shape)
        return released

    def _shapes(self, codec: nn.Module, config: C) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name, tensor in codec.state_dict().items():
            shapes |= self._released(name, tuple(tensor.shape), config)
        return shapes

    def _folded(
        self, file: Path, device: torch.device, config: C, codec: nn.Module
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[str, ...]]:
        """The tensors of `file` as stored, the same with weight norm folded, and the names to skip. Raises
        `TensorMismatch` unless the others match `codec`."""
        with stored.opened(stored.find(file)) as contents:
            found = {name: contents.get(name) for name in contents.entries}
        found = {name: tensor.to(device) for name, tensor in self.sift(found, config, file).items()}
        folded = torch_file.fold_norms(found, file)
        entries = stored.entries_of(folded, file)
        skipped = stored.sort_out(entries, self._shapes(codec, config), self.unused(config), where=str(file))
        return found, folded, skipped


def _finished(codec: M, dtype: torch.dtype) -> M:
    """`codec` once its weights are final, for a model in `dtype`."""
    codec.model_dtype = dtype
    codec.requires_grad_(False).eval()
    codec.finalize()
    return codec
