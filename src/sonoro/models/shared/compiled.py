"""What decode steps in compiled code have in common, on a CPU: packed weights, and pointers into a decoder stack and
its cache. Their C code is in `sonoro.native`. Weights that a checkpoint stores in 8 bits are read as such: the same
numbers, a quarter of the memory traffic."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from ctypes import Structure
from typing import Any, cast

import torch
from torch import Tensor, nn

from sonoro.native.library import CompiledCode, load
from sonoro.native.structures import SHARED
from sonoro.nn.kvcache import PackedTokens, PagedKVCache
from sonoro.nn.linear import Linear
from sonoro.nn.transformer import DecoderConfig, DecoderLayer, DecoderStack, Rotary
from sonoro.nn.watch import HeadWatch
from sonoro.runtime.memory import compact_heap

logger = logging.getLogger(__name__)

Layer, Product, Room, Stack, Watch = (SHARED[name] for name in ("Layer", "Product", "Room", "Stack", "Watch"))

_READ = (torch.float32, torch.int64, torch.int32, torch.int8, torch.bool)
"""What the C code reads."""


class Addresses:
    """Addresses of tensors, which are kept as long as this object; so is what else it is made with."""

    def __init__(self, *kept: Any) -> None:
        self._kept = [*kept]

    def at(self, tensor: Tensor | None) -> int | None:
        """That of `tensor`, None for None."""
        if tensor is None:
            return None
        assert tensor.is_contiguous()
        assert tensor.dtype in _READ
        self._kept.append(tensor)
        return tensor.data_ptr()


class PackedWeights:
    """The weights of the linear layers in `roots` for the compiled code, packed once for all states."""

    def __init__(self, library: CompiledCode, roots: Sequence[nn.Module]) -> None:
        self.library = library
        self._kept: list[Any] = []
        with compact_heap():
            self._products = {id(part): self._product(part) for part in linear_layers(*roots)}

    def product(self, part: nn.Module, bias: Tensor | None = None) -> Structure:
        """That of the linear layer `part`, plus `bias` if it has none of its own."""
        product = self._products[id(part)]
        if bias is not None:
            self._kept.append(bias)
            product = Product.from_buffer_copy(product)
            product.bias = bias.data_ptr()
        return product

    def _product(self, part: Linear) -> Structure:
        bias = None if part.bias is None else part.bias.data_ptr()
        shape = (bias, *part.weight.shape)
        packed = self.library.pack(part.weight.data, part.scale)
        if packed is None:
            return Product(part.weight.data_ptr(), None, None, *shape)
        self._kept.append(packed)
        return Product(None, *(tensor.data_ptr() for tensor in packed), *shape)


def linear_layers(*roots: nn.Module) -> list[Linear]:
    return [part for root in roots for part in root.modules() if isinstance(part, Linear)]


def has_known_layout(parts: Sequence[Linear], library: CompiledCode) -> bool:
    """Whether `library` knows the layout of `parts`: float32 by input, or int8 where it is fast."""
    return all(
        part.weight.dtype == torch.float32 and part.weight.t().is_contiguous()
        if part.scale is None
        else library.packs and part.weight.dtype == torch.int8
        for part in parts
    )


def library_for(*roots: nn.Module, is_known: bool = True) -> CompiledCode | None:
    """The compiled code, if it knows the layout of all linear layers in `roots`, and what else `is_known`. None on a
    GPU and, said in the log, without a library for this machine, or for another layout."""
    parts = linear_layers(*roots)
    if not parts[0].weight.is_cpu:
        return None
    library = load()
    if library is None or not is_known or not has_known_layout(parts, library):
        logger.info("event=decode_step code=torch")
        return None
    return library


def stack_of(  # noqa: PLR0917 (what `DecoderStack.step` is given)
    weights: PackedWeights,
    addresses: Addresses,
    stack: DecoderStack,
    cache: PagedKVCache,
    rotary: Rotary,
    watch: HeadWatch | None = None,
) -> Structure:
    """`stack` over `cache`, with `rotary` tables by position; the heads that `watch` has, if given, are recorded."""
    config, at = stack.config, addresses.at
    layers = (Layer * config.layers)()
    for index, (to, layer) in enumerate(zip(layers, cast(Sequence[DecoderLayer], stack.layers), strict=True)):
        attention, feed, norms = layer.self_attn, layer.mlp, layer.self_attn.head_norms
        up = feed.gate_up_proj if hasattr(feed, "gate_up_proj") else feed.up_proj
        for name, part in zip(
            ("qkv", "out", "gate_up", "down"),
            (attention.qkv_proj, attention.o_proj, up, feed.down_proj),
            strict=True,
        ):
            setattr(to, name, weights.product(part))
        to.query_norm, to.key_norm = at(norms.query), at(norms.key)
        to.input_norm, to.input_bias = map(at, affine(layer.input_layernorm))
        to.inner_norm, to.inner_bias = map(at, affine(layer.post_attention_layernorm))
        to.keys, to.values = at(cache.keys[index]), at(cache.values[index])
        heads = None if watch is None else watch.heads.get(index)
        if heads is not None:
            to.watched, to.watched_count = at(heads), len(heads)
    return Stack(
        layers, *map(at, (*affine(stack.norm), *rotary, cache.page_table)),
        cache.page_table.shape[1], cache.page_positions, config.layers, config.width, config.intermediate,
        config.heads, config.kv_heads, config.head_width, config.norm_eps,
    )  # fmt: skip


def watch_of(addresses: Addresses, watch: HeadWatch | None) -> Structure:
    """Where the attention that `watch` wants is recorded; nowhere for None."""
    if watch is None:
        return Watch()
    return Watch(addresses.at(watch.spans), addresses.at(watch.attention), *watch.attention.shape[1:])


def affine(norm: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight of `norm`, and its bias if it is a LayerNorm."""
    return cast(Tensor, norm.weight), cast(Tensor, norm.bias) if isinstance(norm, nn.LayerNorm) else None


def room_of(
    addresses: Addresses, stacks: Sequence[DecoderConfig], rows: int, *, positions: int, logits: int, hidden: int
) -> Structure:
    """Room for `rows` rows of `stacks` at up to `positions` positions, with so many logits and hidden numbers each."""
    width = max(config.width for config in stacks)
    inner = max(config.intermediate for config in stacks)
    attended = max(config.heads * config.head_width for config in stacks)
    wide = max(2 * inner, *((config.heads + 2 * config.kv_heads) * config.head_width for config in stacks))
    heads = max(config.heads for config in stacks)
    sizes = {
        "x": rows * width, "normed": rows * width, "wide": rows * wide, "inner": rows * inner,
        "attended": rows * attended, "scores": max(heads * positions, logits), "logits": rows * logits,
        "hidden": rows * hidden,
    }  # fmt: skip
    slots, positions_of_rows = (addresses.at(torch.zeros(rows, dtype=torch.int64)) for _ in range(2))
    floats = {name: addresses.at(torch.zeros(size)) for name, size in sizes.items()}
    return Room(**floats, slots=slots, positions=positions_of_rows)


def prompt_runner(
    library: CompiledCode, stack: Structure, room: Structure, most: int
) -> Callable[[Tensor, PackedTokens], None]:
    """What writes keys and values of packed tokens, whose inputs are rows [T, H]; `most` of them fit into `room`."""

    def run(rows: Tensor, tokens: PackedTokens) -> None:
        assert rows.dtype == torch.float32
        assert tokens.slots.dtype == tokens.positions.dtype == torch.int64
        given = rows.contiguous(), tokens.slots.contiguous(), tokens.positions.contiguous()
        pointers = (tensor.data_ptr() for tensor in given)
        library.prefill(ctypes.byref(stack), ctypes.byref(room), *pointers, len(rows), most)

    return run
