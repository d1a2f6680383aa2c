"""The decoder transformer shared by the language-model halves of speech models: rotary positions, grouped queries, RMS
norms on queries and keys or none, gated feed-forward.

`forward` runs whole sequences, for training: the function `attend` receives (layer index, queries, keys, values), each
[B, T, heads, D], and returns [B, T, query heads, D]; where keys and values are kept is its business
(`sonoro.nn.kvcache`). `step` runs one position per slot, or a few, and `prefill` packed prompts, both out of fused
operations; all three are tested against each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.core.errors import CheckpointError
from sonoro.nn.linear import Linear, NormedRows, RMSNorm, random_like
from sonoro.nn.watch import HeadWatch
from sonoro.ops.attention import HeadNorms, PagedKV, decode_attention
from sonoro.ops.pointer import point
from sonoro.ops.prompt import keep_prompt
from sonoro.ops.varlen import varlen_attention

__all__ = [
    "Attend",
    "Attention",
    "Cache",
    "DecoderConfig",
    "DecoderLayer",
    "DecoderStack",
    "FeedForward",
    "NormedAttention",
    "PackedTokens",
    "Rotary",
    "causal_attention",
    "quantize_layers",
    "rotary_of_angles",
    "rotary_tables",
    "rotate",
    "split_pairs",
]

Rotary = tuple[Tensor, Tensor]
"""cos and signed sin of the positions, [..., T, 1, D], as `rotary_tables` makes them."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Cache(Protocol):
    """Keys and values of a stack by page, as `sonoro.nn.kvcache.PagedCache` keeps them."""

    @property
    def keys(self) -> Tensor:
        """[layers, pages, page positions, kv heads, D]."""

    @property
    def values(self) -> Tensor:
        """The same."""

    @property
    def page_table(self) -> Tensor:
        """The pages of each slot: [slots, pages per slot] int32."""


class PackedTokens(NamedTuple):
    """Prompt tokens packed back to back: slot, position and where the prompt begins in the packed sequence; int64 [T].

    Of a prompt whose first token has another position than 0, those before it are on whole pages of its slot already.
    """

    slots: Tensor
    positions: Tensor
    starts: Tensor

    @property
    def cached_lengths(self) -> Tensor:
        """How many positions of the prompt of each token are not in the packed sequence: [T] int64."""
        return self.positions - torch.arange(len(self.starts), device=self.starts.device) + self.starts


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a stack, and its rotary embedding. `heads` query heads share `kv_heads` heads of keys and values.

    Raises `CheckpointError` for heads that do not fit.
    """

    width: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    norm_eps: float
    rope_theta: float

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CheckpointError(f"{self.heads} heads of queries cannot share {self.kv_heads} of keys and values")
        if self.head_width % 2:
            raise CheckpointError(f"heads of {self.head_width} cannot be turned: the width must be even")

    def position_bytes(self, dtype: torch.dtype) -> int:
        """What keys and values of one position take in `dtype`."""
        return 2 * self.layers * self.kv_heads * self.head_width * dtype.itemsize

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """cos and sin of int64 `positions` [...] in `dtype`: [..., 1, head width] each."""
        return rotary_tables(positions, self.head_width, self.rope_theta, dtype)


def rotary_tables(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> Rotary:
    """cos and sin [..., 1, width] in `dtype` for int64 `positions` [...], computed in float32 or wider.

    Pairs are (i, i + width / 2); the first half of sin carries the minus sign of the rotation.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return rotary_of_angles(positions[..., None, None].to(wide), width, theta, dtype)


def rotary_of_angles(scaled: Tensor, width: int, theta: float, dtype: torch.dtype) -> Rotary:
    """`rotary_tables` of positions that are scaled by pair: [..., 1, 1 or width / 2], float32 or wider."""
    exponents = torch.arange(0, width, 2, device=scaled.device, dtype=scaled.dtype) / width
    angles = scaled * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """`x` [..., T, heads, D] rotated by its positions."""
    cos, signed_sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def split_pairs(weight: Tensor, heads: int, head_width: int) -> Tensor:
    """`weight` [rows, C] made for rotary pairs of neighbours as `rotate` needs it, its pairs half a head apart.

    Of the first `heads` heads, those of queries and keys; the rows of values stay as they are.
    """
    rotated, values = weight.tensor_split([heads * head_width])
    pairs = rotated.unflatten(0, (heads, head_width // 2, 2))
    return torch.cat([pairs.transpose(1, 2).flatten(0, 2), values])


def causal_attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend within the given sequence alone: query t sees keys 0..t. Differentiable; keeps nothing."""
    query, key, value = (rows.transpose(1, 2) for rows in (queries, keys, values))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=queries.shape[1] > 1, enable_gqa=True)
    return out.transpose(1, 2)


class Attention(nn.Module):
    """Self-attention with rotary embedding; projections of queries, keys and values are one matrix."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.heads = (config.heads, config.kv_heads, config.kv_heads)
        self.qkv_proj = Linear(config.width, sum(self.heads) * config.head_width, bias=False)
        self.o_proj = Linear(config.heads * config.head_width, config.width, bias=False)

    def forward(self, x: Tensor, layer: int, rotary: Rotary, attend: Attend) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_width))
        queries, keys, values = heads.split(self.heads, dim=-2)
        queries, keys = (rotate(heads, rotary) for heads in self.norm_heads(queries, keys))
        return self.o_proj(attend(layer, queries, keys, values).flatten(-2))

    def norm_heads(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """`queries` and `keys` as they are rotated."""
        return queries, keys

    @property
    def head_norms(self) -> HeadNorms:
        """The norms of queries and keys by head, if there are any."""
        return HeadNorms()


class NormedAttention(Attention):
    """Attention whose queries and keys are normed head by head before they are rotated."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.q_norm = RMSNorm(config.head_width, config.norm_eps)
        self.k_norm = RMSNorm(config.head_width, config.norm_eps)

    def norm_heads(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(queries), self.k_norm(keys)

    @property
    def head_norms(self) -> HeadNorms:
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class FeedForward(nn.Module):
    """Two products with a gate between; gate and up are one matrix."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, 2 * inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: DecoderConfig, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config.width, config.intermediate)

    def forward(self, x: Tensor, layer: int, rotary: Rotary, attend: Attend) -> Tensor:
        """`x` [B, T, width] after this layer, number `layer` of its stack."""
        x = x + self.self_attn(self.input_layernorm(x), layer, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    def project(self, x: NormedRows) -> Tensor:
        """Queries, keys and values [B, heads * D] of `x` [B, width], neither normed nor rotated; no autograd."""
        return self.self_attn.qkv_proj.after_norm(x.rows, self.input_layernorm, x.normed)

    def complete(self, x: Tensor, heads: Tensor, norm: RMSNorm | None) -> NormedRows:
        """`x` [B, width] after this layer, whose attention makes `heads` [B, heads * D] of it; fused, no autograd.
        `norm` is that of the layer after it, if there is one."""
        rows = self.self_attn.o_proj.add_to(x, heads, self.post_attention_layernorm)
        inner = self.mlp.gate_up_proj.gate_up_after_norm(rows, self.post_attention_layernorm)
        return self.mlp.down_proj.add_to(rows.rows, inner, norm)

    def check_kernels(self, rows: int) -> None:
        """Compare the kernels of `project` and `complete` with their references at `rows` rows of random inputs."""
        attention, feed, first, second = self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm
        random, tolerance = random_like(first.weight)
        widths = (attention.qkv_proj.in_features, attention.o_proj.in_features, feed.down_proj.in_features)
        x, heads, inner = (random(rows, width) for width in widths)
        attention.qkv_proj.check_after_norm(x, first, tolerance)
        attention.o_proj.check_add_to(x, heads, second, tolerance)
        feed.gate_up_proj.check_gate_up_after_norm(x, second, tolerance)
        feed.down_proj.check_add_to(x, inner, first, tolerance)
        if attention.o_proj.joins_norm(heads):
            feed.gate_up_proj.check_gate_up(x, tolerance)
        attention.qkv_proj.check_alone(x, tolerance, is_normed=feed.down_proj.joins_norm(inner))


def quantize_layers(module: nn.Module, quantization: str) -> None:
    """Have the weights of every layer in `module` kept in 8 bits, "int8" or "fp8", once they are filled."""
    for layer in module.modules():
        for part in layer.modules() if isinstance(layer, DecoderLayer) else ():
            if isinstance(part, Linear):
                part.quantization = quantization


class DecoderStack(nn.Module):
    """Layers and a final norm. Capturable if `attend` is."""

    def __init__(self, config: DecoderConfig, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config, attention) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """`x` [B, T, width] through all layers and the final norm; `rotary` broadcasts against [B, T, heads, D]."""
        for index, layer in enumerate(self.layers):
            x = layer(x, index, rotary, attend)
        return self.norm(x)

    def step(
        self,
        x: Tensor,
        rotary: Rotary,
        cache: Cache,
        slots: Tensor,
        positions: Tensor,
        *,
        watch: HeadWatch | None = None,
    ) -> Tensor:
        """New positions of each slot through all layers, not through the final norm: `x` [T * B, width] to the same.

        Batch index b is `slots[b]` of `cache`'s table; its keys and values are kept at `positions[b]`; it attends to
        them and all before. Line t * B + b of `x` is the t-th position from there on; mostly T is 1. `rotary` are
        tables by position, [P, 1, head width]. `watch` keeps what some heads look at, if T is 1. Capturable; no sync;
        no autograd.
        """
        hidden = NormedRows(x)
        for index, layer in enumerate(cast(Sequence[DecoderLayer], self.layers)):
            kv = PagedKV(cache.keys[index], cache.values[index], cache.page_table, slots)
            given = layer.project(hidden), layer.self_attn.head_norms, rotary, kv, positions
            heads = decode_attention(*given)
            if watch is not None:
                watch.keep(index, *given)
            hidden = layer.complete(hidden.rows, heads, self.norm_after(index))
        return hidden.rows

    def norm_after(self, index: int) -> RMSNorm | None:
        """What layer `index` + 1 begins with, if there is one."""
        layers = cast(Sequence[DecoderLayer], self.layers)
        return layers[index + 1].input_layernorm if index + 1 < len(layers) else None

    def prefill(
        self, x: Tensor, rotary: Rotary, cache: Cache, tokens: PackedTokens, *, is_output_used: bool = True
    ) -> Tensor:
        """Packed prompts through all layers, not through the final norm: `x` [T, width], the same back.

        Their keys and values are kept on the pages of their slots. `rotary` are tables by position, [P, 1, head width].
        Where no output is used, the last layer only keeps its keys and values, and what comes back means nothing. What
        `forward` with `PagedKVCache.fill` does, out of the operations of `step`. Capturable; no sync; no autograd.
        """
        slots, positions, starts = (rows.contiguous() for rows in tokens)
        cached, hidden = tokens.cached_lengths, NormedRows(x)
        for index, layer in enumerate(cast(Sequence[DecoderLayer], self.layers)):
            attention, kv = layer.self_attn, PagedKV(cache.keys[index], cache.values[index], cache.page_table, slots)
            qkv = layer.project(hidden)
            rotated = keep_prompt(qkv, attention.head_norms, rotary, kv, positions)
            if not is_output_used and index == len(self.layers) - 1:
                break
            queries, keys = rotated.split(attention.heads[:2], dim=1)
            values = qkv.unflatten(-1, (-1, attention.head_width))[:, -attention.heads[2] :]
            heads = varlen_attention(queries, keys, values, starts, cached, kv)
            hidden = layer.complete(hidden.rows, heads.flatten(1), self.norm_after(index))
        return hidden.rows

    def check_kernels(
        self, batch: int, table: Tensor, page: int, tokens: int = 1, *, watch: HeadWatch | None = None
    ) -> None:
        """Compare every kernel of `step` with its reference at `tokens` positions of each of `batch` slots, and the
        kernel of prompts, each of which goes on from a page; one that is wrong is not used again.


        Random inputs, the weights of the first layer, contexts of up to two pages of `page` positions, or of one in a
        `table` [.., 1] (which is not written). Synchronises; does nothing on a CPU.
        """
        layer, config = cast(DecoderLayer, self.layers[0]), self.config
        layer.check_kernels(tokens * batch)
        attention, weight = layer.self_attn, self.norm.weight
        random, tolerance = random_like(weight)
        norms, qkv = attention.head_norms, random(tokens * batch, attention.qkv_proj.out_features)
        index = torch.arange(batch, device=weight.device)
        # Part of a table as wide as the one that will serve, or kernels would be compiled for this alone.
        table = torch.zeros_like(table[:1]).repeat(batch, 1)[:, :2]
        table.copy_(torch.arange(2 * batch, device=weight.device).view(batch, 2)[:, : table.shape[1]])
        length = table.shape[1] * page
        positions = (index * 7 + 3) % (length - tokens + 1)
        pages = random(2, 2 * batch, page, config.kv_heads, config.head_width)
        rotary = self.rotary(torch.arange(length, device=weight.device), weight.dtype)

        def kv() -> PagedKV:
            keys, values = pages.clone()
            return PagedKV(keys, values, table, index)

        decode_attention.check(lambda: (qkv, norms, rotary, kv(), positions), tolerance)
        keep_prompt.check(lambda: (qkv[:batch], norms, rotary, kv(), positions), tolerance)
        prompts = qkv[:batch].unflatten(-1, (-1, config.head_width)).split(attention.heads, dim=1)
        shared = torch.full_like(index, length - page)
        varlen_attention.check(lambda: (*prompts, index, shared, kv()), tolerance)
        if watch is not None and tokens == 1:
            heads, spans = next(iter(watch.heads.values())), torch.stack((index % 5, index * 0 + length), dim=1)
            out = torch.zeros_like(watch.attention[:1, : len(heads)]).repeat(batch, 1, 1)
            point.check(lambda: (qkv, norms, rotary, kv(), positions, heads, spans, out.clone()), tolerance)

    @torch.no_grad()
    def split_pairs(self) -> None:
        """Turn weights that were made for rotary pairs of neighbours into what `forward` and `step` need, in place.

        Products of queries and keys do not change.
        """
        for layer in cast(Sequence[DecoderLayer], self.layers):
            attention = layer.self_attn
            heads, width = sum(attention.heads[:2]), attention.head_width
            attention.qkv_proj.reorder(functools.partial(split_pairs, heads=heads, head_width=width))
            for norm in attention.head_norms[:2]:
                if norm is not None:
                    norm.copy_(split_pairs(norm[:, None], 1, width)[:, 0])

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """The stack's rotary tables for int64 `positions` [...]: [..., 1, head width] each."""
        return self.config.rotary(positions, dtype)
