"""Load a module's tensors from checkpoint files, or fill them with random numbers.

Names are those of the file, except for fusions: tensors that are stored separately and concatenated on dim 0. Modules
are built on the meta device and filled here, so each tensor is allocated once, in its final dtype and on its device."""

import hashlib
import math
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sonoro.nn import stored
from sonoro.nn.linear import Linear
from sonoro.nn.stored import Shape
from sonoro.ops.device import seeded

C = TypeVar("C")
M = TypeVar("M", bound=nn.Module)

_FINGERPRINT_NUMBERS = 16

READERS = 8
"""Threads that copy memory-mapped files to a GPU: each waits for the disk."""


@dataclass(frozen=True)
class Fusion:
    """Tensors stored as `parts` that the module holds concatenated as `target`, for names that start with `prefix`.
    `parts` maps stored names to their shares of the rows, in order: `{"q_proj": 16, "k_proj": 8}`. One is a rename."""

    prefix: str
    target: str
    parts: Mapping[str, int]

    def split(self, name: str, shape: Shape) -> dict[str, Shape] | None:
        """Stored names and shapes of the module's tensor `name`; None if this fusion does not apply to it."""
        marker = f".{self.target}."
        if not name.startswith(self.prefix) or marker not in name:
            return None
        unit, rest = divmod(shape[0], sum(self.parts.values()))
        assert rest == 0, f"{name}: {shape[0]} rows do not divide by the shares {dict(self.parts)}"
        return {name.replace(marker, f".{part}."): (unit * share, *shape[1:]) for part, share in self.parts.items()}


def llama_names(prefix: str) -> tuple[Fusion, ...]:
    """Fusions for a `DecoderStack` below `prefix` whose file uses the names of the original LLaMA (`wqkv`, `w1`)."""
    names: dict[str, dict[str, int]] = {
        "self_attn.qkv_proj": {"attention.wqkv": 1},
        "self_attn.o_proj": {"attention.wo": 1},
        "self_attn.q_norm": {"attention.q_norm": 1},
        "self_attn.k_norm": {"attention.k_norm": 1},
        "mlp.gate_up_proj": {"feed_forward.w1": 1, "feed_forward.w3": 1},
        "mlp.down_proj": {"feed_forward.w2": 1},
        "input_layernorm": {"attention_norm": 1},
        "post_attention_layernorm": {"ffn_norm": 1},
    }
    return tuple(Fusion(prefix, ours, stored) for ours, stored in names.items())


def parted_names(prefix: str, heads: int, kv_heads: int) -> tuple[Fusion, ...]:
    """Fusions for a `DecoderStack` below `prefix` whose file has separate projections (`q_proj`, `gate_proj`)."""
    return (
        Fusion(prefix, "qkv_proj", {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}),
        Fusion(prefix, "gate_up_proj", {"gate_proj": 1, "up_proj": 1}),
    )


def empty(kind: Callable[[C], M], config: C) -> M:
    """`kind(config)` on the meta device: shapes without values."""
    with shapes_alone():
        return kind(config)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """A context in which modules are made on the meta device, without initialising them."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Skips the functions of `torch.nn.init`: on the meta device the first call imports a compiler (1 s)."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def stored_shapes(module: nn.Module, fusions: Sequence[Fusion] = ()) -> dict[str, Shape]:
    """Names and shapes of `module`'s tensors as a file stores them. The module may be on the meta device."""
    shapes: dict[str, Shape] = {}
    for name, tensor in module.state_dict().items():
        shapes |= _stored(name, tuple(tensor.shape), fusions)
    return shapes


def load(
    module: nn.Module,
    files: Sequence[Path],
    *,
    dtype_of: Callable[[str], torch.dtype],
    device: torch.device,
    fusions: Sequence[Fusion] = (),
    spell: Callable[[str], str] = str,
) -> tuple[str, ...]:
    """Fill every parameter and persistent buffer of `module` from `files`; returns the names of skipped tensors.
    The files together must match the module (`stored.sort_out`). `spell` maps a name to the one in the files. Each
    tensor is cast once, to `dtype_of(its name in the module)`. Raises `CheckpointNotFound` for a missing file,
    `CheckpointError` for a damaged one, `TensorMismatch` naming tensors, files and shapes."""
    where = ", ".join(map(str, files))
    expected = _spelled(stored_shapes(module, fusions), spell)
    kept = {name: layer for name, layer in _layers(module) if layer.quantization == "stored"}
    with stored.opened(files) as (headers, get, narrow):
        skipped = stored.sort_out(headers, expected, {}, where=where)
        stored.check_tied(skipped, expected, get, where)

        def read(name: str, shape: Shape) -> Tensor:
            parts, row = _stored(name, shape, fusions), 0
            if (layer := kept.get(name)) and None not in (rows := [narrow(spell(part)) for part in parts]):
                value, layer.scale = (torch.cat(halves).to(device) for halves in zip(*rows, strict=True))
                return value
            value = torch.empty(shape, dtype=dtype_of(name), device=device)
            for part, part_shape in parts.items():
                if shape:
                    value[row : row + part_shape[0]].copy_(get(spell(part)))
                    row += part_shape[0]
                else:
                    value.copy_(get(spell(part)))
            return value

        fill(module, read, readers=1 if device.type == "cpu" else READERS)
    return skipped


def check(
    module: nn.Module, files: Sequence[Path], *, fusions: Sequence[Fusion] = (), spell: Callable[[str], str] = str
) -> dict[str, Shape]:
    """Check that `load` would accept `files`, except that tied heads are not compared; reads no values.
    Returns stored names (before `spell`) and shapes of the module's tensors. Raises as `load`."""
    expected = stored_shapes(module, fusions)
    where = ", ".join(map(str, files))
    stored.sort_out(stored.headers(files), _spelled(expected, spell), {}, where=where)
    return expected


def _spelled(shapes: Mapping[str, Shape], spell: Callable[[str], str]) -> dict[str, Shape]:
    return {spell(name): shape for name, shape in shapes.items()}


def count_parts(shapes: Mapping[str, Shape], parts: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Number of elements of `shapes` by part; `parts` maps each to name prefixes, every tensor in exactly one part."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    counts = {
        part: sum(size for name, size in sizes.items() if name.startswith(prefixes)) for part, prefixes in parts.items()
    }
    assert sum(counts.values()) == sum(sizes.values())
    return counts


@dataclass(frozen=True)
class DummyRule:
    """Random values for tensors whose name matches the regex `pattern`: N(mean, std^2).
    Without `std` it is `gain / sqrt(fan_in(shape))`, so outputs have about `gain` times the magnitude of inputs."""

    pattern: str
    mean: float = 0.0
    std: float | None = None
    gain: float = 1.0
    fan_in: Callable[[Shape], float] = lambda shape: math.prod(shape[1:])


_DEFAULT_RULES = (
    DummyRule(r"(^|\.)bias$", std=0.02),
    DummyRule(r"norm\w*\.weight$", mean=1.0, std=0.1),
    DummyRule(r""),
)


def fingerprint(configuration: str, *modules: nn.Module) -> str:
    """SHA-256 (hex) of `configuration` and of each tensor's name, shape, dtype and first numbers. Synchronises."""
    digest, numbers = hashlib.sha256(configuration.encode()), []
    for module in modules:
        heads = []
        for name, tensor in module.state_dict().items():
            digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
            # A view of the first row: flattening would copy the weights that are not contiguous.
            heads.append(tensor[(0,) * max(0, tensor.ndim - 1)].reshape(-1)[:_FINGERPRINT_NUMBERS].double())
        # One copy per module: modules may be on different devices.
        numbers.append(torch.cat(heads).cpu())
    digest.update(torch.cat(numbers).numpy().tobytes())
    return digest.hexdigest()


def init_dummy(
    module: nn.Module,
    seed: int,
    *,
    rules: Sequence[DummyRule] = (),
    dtype_of: Callable[[str], torch.dtype],
    device: torch.device,
) -> None:
    """Fill every parameter and persistent buffer of `module` with random numbers.
    The first of `rules` that matches a name applies; otherwise weights are fan-in scaled, biases N(0, .02^2) and
    norm weights N(1, .1^2). Values depend on seed, name, shape, dtype and device type alone."""

    def random_value(name: str, shape: Shape) -> Tensor:
        rule = next(rule for rule in (*rules, *_DEFAULT_RULES) if re.search(rule.pattern, name))
        std = rule.gain / math.sqrt(rule.fan_in(shape)) if rule.std is None else rule.std
        generator = seeded(device, zlib.crc32(f"{seed}:{name}".encode()))
        numbers = torch.empty(shape, dtype=dtype_of(name), device=device)
        return numbers if numbers.is_meta else numbers.normal_(rule.mean, std, generator=generator)

    fill(module, random_value)


def fill(module: nn.Module, value_of: Callable[[str, Shape], Tensor], readers: int = 1) -> None:
    """Set every parameter and persistent buffer of `module` to `value_of(name, shape)`; a `Linear` may store its weight
    in another form (`Linear.stored`).
    With `readers` above 1, `value_of` runs in that many threads, at most that many values ahead."""
    layers, values = dict(_layers(module)), {}
    with torch.no_grad():
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        made = _called(value_of, shapes.items(), readers)
        for name in shapes:
            layer = layers.get(name)
            values[name] = next(made) if layer is None else layer.stored(next(made))
            if layer is not None and layer.scale is not None:
                # Return the unquantised tensor's memory: a smaller allocation in that block would fragment it.
                torch.cuda.empty_cache()
    module.load_state_dict(values, assign=True)


def _layers(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Each `Linear` in `module`, by the name of its weight."""
    return ((f"{name}.weight", layer) for name, layer in module.named_modules() if isinstance(layer, Linear))


def _called(
    value_of: Callable[[str, Shape], Tensor], items: Iterable[tuple[str, Shape]], readers: int
) -> Iterator[Tensor]:
    """Yield `value_of(*item)` for each of `items`, in order, computed in up to `readers` threads."""
    if readers == 1:
        yield from (value_of(*item) for item in items)
        return
    with ThreadPoolExecutor(readers, thread_name_prefix="reader") as pool:
        ahead: deque[Future[Tensor]] = deque()
        for item in items:
            ahead.append(pool.submit(value_of, *item))
            if len(ahead) == readers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _stored(name: str, shape: Shape, fusions: Sequence[Fusion]) -> dict[str, Shape]:
    for fusion in fusions:
        if (parts := fusion.split(name, shape)) is not None:
            return parts
    return {name: shape}
