"""Estimates the GPU memory of a model and its engine, and which configurations would fit, without allocating any.

The model and its per-slot state are built on torch's "meta" device, and their tensors are counted."""

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.engine.device_state import capacity_of, codec_graph_bytes, graph_bytes
from sonoro.models import registry
from sonoro.models.base import SpeechModel
from sonoro.runtime.kernels import Card

_META = torch.device("meta")
_LARGE_CARD_BYTES = 40 * 2**30
"""Cards this large skip the check, which takes a second; their memory is checked at allocation."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """GPU memory in bytes by part, without the CUDA context (.3 to .6 GB). `graphs` is an upper estimate.
    `least_pages` is the part of `kv_cache` for one request of maximum length, the least an engine runs with."""

    weights: int
    codec: int
    kv_cache: int
    least_pages: int
    slots: int
    staging: int
    codec_histories: int
    graphs: int

    @property
    def total(self) -> int:
        return sum(dataclasses.asdict(self).values()) - self.least_pages

    @property
    def least(self) -> int:
        """Total with the smallest usable KV cache."""
        return self.total - self.kv_cache + self.least_pages

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by a readable name of the part."""
        return {
            "weights of the language model, tables included": self.weights,
            "codec": self.codec,
            "KV cache": self.kv_cache,
            "state of the slots": self.slots,
            "staging of prompts": self.staging,
            "codec histories": self.codec_histories,
            "graphs (estimate)": self.graphs,
            "total": self.total,
        }


@torch.inference_mode()
def footprint(model: str | None, config: EngineConfig, dtype: str | None = None) -> Footprint:
    """The footprint of `model` in `dtype` (bfloat16 if None) under `config`. Raises as `registry.load` does."""
    wanted = config.resolve()
    how = {"dtype": dtype or "bfloat16", "load_format": "dummy", "quantization": config.quantization}
    loaded = registry.load(model, device=_META, **how).model
    # Measured before `settle`, while the codec is in float32 without kernels: in other dtypes it would run the kernels'
    # references, which take more memory than the kernels.
    wide_bytes = _peak_bytes(loaded, wanted)
    choice = loaded.codec.settle(wanted.codec_dtype, wanted.codec_batches[0], wanted.chunk_frames[:1])
    pages = wanted.pages or wanted.slots * wanted.pages_per_slot
    capacity, page_bytes = capacity_of(wanted, pages), loaded.position_bytes * wanted.page_positions
    state, unstaged = (
        _bytes(loaded.allocate(dataclasses.replace(capacity, max_tokens=tokens))) for tokens in (capacity.max_tokens, 1)
    )
    codec, kv_cache = _bytes(loaded.codec), (pages + 1) * page_bytes
    histories = loaded.codec.allocate(wanted.slots)
    return Footprint(
        weights=_bytes(loaded) - codec,
        codec=codec,
        kv_cache=kv_cache,
        least_pages=(wanted.pages_per_slot + 1) * page_bytes,
        slots=unstaged - kv_cache,
        staging=state - unstaged,
        codec_histories=_bytes(histories),
        graphs=graph_bytes(loaded, wanted) + codec_graph_bytes(wanted, wide_bytes * choice.dtype.itemsize // 4),
    )


def what_fits(
    model: str | None, config: EngineConfig, on: Card, total_bytes: int, dtype: str | None = None
) -> tuple[int, list[EngineConfig]]:
    """The least bytes that `config` needs, and, if the card `on`, of `total_bytes`, lacks them, smaller
    configurations that fit.
    At most one for each quantisation that the model is offered in there, with the slots divided by 4 until it fits
    `memory_fraction`."""
    allowed = total_bytes * config.memory_fraction
    needed = footprint(model, config, dtype).least
    found: list[EngineConfig] = []
    for quantization in registry.offered(model, on) if needed > allowed else ():
        slots = config.slots
        while slots:
            sizes: dict[str, Any] = {"frame_batches": (), "codec_batches": (), "pages": 0}
            smaller = dataclasses.replace(config, slots=slots, quantization=quantization, **sizes)
            if footprint(model, smaller, dtype).least <= allowed:
                found.append(smaller)
                break
            slots //= 4
    return needed, found


def refuse_what_does_not_fit(
    model: str | None, config: EngineConfig, on: Card, total_bytes: int, dtype: str | None = None
) -> None:
    """Raise `ConfigError`, naming what would fit, if `config` does not fit the card `on`, of `total_bytes`.
    Loads nothing."""
    if total_bytes * config.memory_fraction >= _LARGE_CARD_BYTES:
        return
    needed, found = what_fits(model, config, on, total_bytes, dtype)
    if needed <= total_bytes * config.memory_fraction:
        return
    shown = [f"slots={one.slots} quantization={one.quantization}" for one in found]
    fitting = f"what would fit: {' or '.join(shown)}" if shown else "nothing would fit"
    asked = f"{_gib(needed)} are needed for slots={config.slots} quantization={config.quantization}"
    limit = f"{asked}, of {_gib(total_bytes)} that {on.name} has; {fitting}"
    raise ConfigError("memory_fraction", config.memory_fraction, limit)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _bytes(value: object) -> int:
    """Bytes of all tensors that `value` holds, each storage counted once."""
    return sum({storage._cdata: storage.nbytes() for storage in _storages(value, set())}.values())


def _storages(value: Any, seen: set[int]) -> Iterator[torch.UntypedStorage]:
    if id(value) in seen or isinstance(value, str | bytes | int | float | type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _storages(item, seen)
    elif isinstance(value, tuple | list | set):
        for item in value:
            yield from _storages(item, seen)
    elif type(value).__module__.startswith(("sonoro.", "torch.nn.")):
        for item in getattr(value, "__dict__", {}).values():
            yield from _storages(item, seen)


class _Live(TorchDispatchMode):
    """Tracks in `peak` the most bytes held at once by tensors created in this context."""

    def __init__(self, known: object) -> None:
        super().__init__()
        self._holders = Counter(storage._cdata for storage in _storages(known, set()))
        self._live = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if not self._holders[storage._cdata]:
                    self._live += storage.nbytes()
                self._holders[storage._cdata] += 1
                weakref.finalize(tensor, self._drop, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return made

    def _drop(self, key: int, count: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            self._live -= count


def _peak_bytes(model: SpeechModel, config: EngineConfig) -> int:
    """Peak bytes of the largest codec launch, in the codec's current dtype."""
    batch, chunk = config.codec_batches[-1], config.chunk_frames[-1]
    made = model.allocate(capacity_of(config, config.pages_per_slot)).frames[:1, :1]
    frames = made.expand(batch, chunk, *made.shape[2:]).contiguous()
    histories = model.codec.allocate(config.slots)
    slots = torch.full((batch,), config.slots, dtype=torch.int64, device=_META)
    with _Live((model, histories, frames, slots)) as live:
        model.codec.decode(frames, slots, histories)
    return live.peak
