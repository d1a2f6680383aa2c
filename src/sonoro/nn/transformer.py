"""The decoder transformer that the language models share: rotary embedding, GQA, optional q/k RMSNorm, SwiGLU.

`forward` runs whole sequences, differentiably: `attend` takes (layer, queries, keys, values), each [B, T, heads, D],
returns [B, T, query heads, D], and may store keys and values (`sonoro.nn.kvcache`). `step` runs one or a few positions
per slot and `prefill` packed prompts, with fused kernels. Tests compare the three."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.core.errors import CheckpointError
from sonoro.nn.kvcache import Attend, PackedPrompts, PackedTokens, PagedKVCache
from sonoro.nn.linear import Linear, NormedRows, RMSNorm, random_like
from sonoro.nn.watch import HeadWatch
from sonoro.ops.attention import HeadNorms, PagedKV, decode_attention
from sonoro.ops.pointer import Watched, point
from sonoro.ops.prompt import keep_prompt
from sonoro.ops.varlen import varlen_attention

Rotary = tuple[Tensor, Tensor]
"""cos and signed sin, [..., T, 1, D] each, as `rotary_tables` returns them."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a stack: `heads` query heads, `kv_heads` key/value heads (GQA); and its rotary embedding.
    Raises `CheckpointError` unless `heads` is a multiple of `kv_heads` and `head_width` is even."""

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
            raise CheckpointError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads")
        if self.head_width % 2:
            raise CheckpointError(f"heads of width {self.head_width}: a rotary embedding needs an even width")

    def position_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of one position, over all layers, in `dtype`."""
        return 2 * self.layers * self.kv_heads * self.head_width * dtype.itemsize

    def kv_cache(self, table: Tensor, page_positions: int, pages: int, dtype: torch.dtype) -> PagedKVCache:
        """A zeroed cache of `pages` pages and a scratch page for the slots of `table` [slots, pages per slot] int32."""
        shape = (self.layers, pages + 1, page_positions, self.kv_heads, self.head_width)
        return PagedKVCache.allocate(shape, table, dtype)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """cos and sin of int64 `positions` [...] in `dtype`: [..., 1, head width] each."""
        return rotary_tables(positions, self.head_width, self.rope_theta, dtype)


def rotary_tables(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> Rotary:
    """cos and sin [..., 1, width] in `dtype` for `positions` [...] int64, computed in float32 or wider.
    Pairs are (i, i + width / 2), as in transformers' LLaMA; the first half of sin is negated."""
    wide = torch.promote_types(dtype, torch.float32)
    return rotary_of_angles(positions[..., None, None].to(wide), width, theta, dtype)


def rotary_of_angles(scaled: Tensor, width: int, theta: float, dtype: torch.dtype) -> Rotary:
    """`rotary_tables` of positions `scaled` for each pair: [..., 1, 1 or width / 2], float32 or wider."""
    exponents = torch.arange(0, width, 2, device=scaled.device, dtype=scaled.dtype) / width
    angles = scaled * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply the rotary embedding to `x` [..., T, heads, D]."""
    cos, signed_sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def split_pairs(weight: Tensor, heads: int, head_width: int) -> Tensor:
    """Reorder the rows of a QKV `weight` [rows, C] from interleaved rotary pairs (2i, 2i + 1) to half-split pairs
    (i, i + D / 2), which `rotate` uses.
    Applies to the first `heads` heads, queries and keys; the rows of values keep their order."""
    rotated, values = weight.tensor_split([heads * head_width])
    pairs = rotated.unflatten(0, (heads, head_width // 2, 2))
    return torch.cat([pairs.transpose(1, 2).flatten(0, 2), values])


def causal_attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """An `Attend` without KV cache: query t attends to keys 0 to t of the same sequence. Differentiable."""
    query, key, value = (rows.transpose(1, 2) for rows in (queries, keys, values))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=queries.shape[1] > 1, enable_gqa=True)
    return out.transpose(1, 2)


class Attention(nn.Module):
    """Self-attention with rotary embedding; Q, K and V are one projection."""

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
        """`queries` and `keys` before the rotary embedding; normed in a subclass."""
        return queries, keys

    @property
    def head_norms(self) -> HeadNorms:
        """Weights of the q/k norms, or none."""
        return HeadNorms()


class NormedAttention(Attention):
    """Attention with an RMSNorm on each head of queries and keys, before the rotary embedding."""

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
    """SwiGLU feed-forward; gate and up are one projection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, 2 * inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One pre-norm layer. A subclass may have another norm and feed-forward."""

    norm_type: Any = RMSNorm
    feed_type: Any = FeedForward

    def __init__(self, config: DecoderConfig, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.input_layernorm = self.norm_type(config.width, config.norm_eps)
        self.self_attn = attention(config)
        self.post_attention_layernorm = self.norm_type(config.width, config.norm_eps)
        self.mlp = self.feed_type(config.width, config.intermediate)

    def forward(self, x: Tensor, layer: int, rotary: Rotary, attend: Attend) -> Tensor:
        """Run `x` [B, T, width] through this layer, which has index `layer` in its stack."""
        x = x + self.self_attn(self.input_layernorm(x), layer, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    def project(self, x: NormedRows) -> Tensor:
        """Input norm and QKV projection of `x` [B, width]: [B, (heads + 2 * kv_heads) * D]. No autograd."""
        return self.self_attn.qkv_proj.after_norm(x.rows, self.input_layernorm, x.normed)

    def complete(self, x: Tensor, heads: Tensor, norm: RMSNorm | None) -> NormedRows:
        """Everything after the attention: output projection, residual and feed-forward; no autograd.
        `x` [B, width] is the layer's input, `heads` [B, heads * D] the attention's output, `norm` the next layer's
        input norm, which is fused where a kernel can."""
        attention, feed = self.self_attn, self.mlp
        rows = attention.o_proj.add_to(x, heads, self.post_attention_layernorm, feed.gate_up_proj)
        inner = feed.gate_up_proj.gate_up_after_norm(rows, self.post_attention_layernorm)
        # The sum is normed for the next layer's projection, which has the shape of this layer's.
        return feed.down_proj.add_to(rows.rows, inner, norm, attention.qkv_proj)

    def check_kernels(self, rows: int) -> None:
        """Compare the kernels of `project` and `complete` with their references on `rows` random rows.
        With one row, the E4M3 kernels are compared at all of their sizes: prompts have sizes that no batch has."""
        attention, feed, first, second = self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm
        random, tolerance = random_like(first.weight)
        if rows == 1:
            for part in (attention.qkv_proj, attention.o_proj, feed.gate_up_proj, feed.down_proj):
                self._check_e4m3(part, random, tolerance)
        widths = (attention.qkv_proj.in_features, attention.o_proj.in_features, feed.down_proj.in_features)
        x, heads, inner = (random(rows, width) for width in widths)
        attention.qkv_proj.check_after_norm(x, first, tolerance)
        attention.o_proj.check_add_to(x, heads, second, tolerance)
        is_normed = attention.o_proj.joins_norm(heads)
        feed.gate_up_proj.check_after_norm(x, second, tolerance, is_gated=True, is_normed=is_normed)
        feed.down_proj.check_add_to(x, inner, first, tolerance)
        attention.qkv_proj.check_alone(x, tolerance, is_normed=feed.down_proj.joins_norm(inner))

    def _check_e4m3(self, part: Linear, random: Callable[..., Tensor], tolerance: float) -> None:
        """Compare the kernels of `part` for rows in E4M3 with their references, at every size that has them."""
        first, second = self.input_layernorm, self.post_attention_layernorm
        for rows in part.e4m3_sizes:
            x = random(rows, part.in_features)
            if not part.takes_e4m3(x):
                continue
            if part is self.self_attn.qkv_proj:
                part.check_after_norm(x, first, tolerance)
            elif part is self.mlp.gate_up_proj:
                part.check_after_norm(x, second, tolerance, is_gated=True)
            else:
                following = second if part is self.self_attn.o_proj else first
                part.check_add_to(random(rows, part.out_features), x, following, tolerance)


def quantize_layers(module: nn.Module, quantization: str, *, row_terms: int = 0) -> None:
    """Mark the weights of each `DecoderLayer` in `module`: `weights.fill` quantises them to `quantization` (int8, fp8),
    and their products may take rows as `row_terms` terms in E4M3."""
    for _, part in _products(module):
        part.quantization, part.row_terms = quantization, row_terms


def widen_layers(module: nn.Module, rows: int) -> None:
    """Keep 16-bit copies of the 8-bit weights of each `DecoderLayer` in `module`, if products of `rows` rows gain."""
    for layer, part in _products(module) if rows > Linear.narrow_rows else ():
        part.widen(layer.input_layernorm.weight.dtype)


def bytes_read(module: nn.Module, rows: int) -> int:
    """Bytes of the parameters, or of their 16-bit copies, that a pass of `rows` rows through `module` reads."""
    more = sum(part.wide.nbytes - part.weight.nbytes for _, part in _products(module) if part.wide is not None)
    return sum(weight.nbytes for weight in module.parameters()) + (more if rows > Linear.narrow_rows else 0)


def _products(module: nn.Module) -> Iterator[tuple[DecoderLayer, Linear]]:
    layers = (layer for layer in module.modules() if isinstance(layer, DecoderLayer))
    return ((layer, part) for layer in layers for part in layer.modules() if isinstance(part, Linear))


class DecoderStack(nn.Module):
    """Decoder layers and a final norm. `forward` is capturable if its `attend` is."""

    def __init__(
        self, config: DecoderConfig, attention: type[Attention] = Attention, layer: type[DecoderLayer] = DecoderLayer
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layer(config, attention) for _ in range(config.layers))
        self.norm = layer.norm_type(config.width, config.norm_eps)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Run `x` [B, T, width] through all layers and the final norm; `rotary` broadcasts to [B, T, heads, D]."""
        for index, layer in enumerate(self.layers):
            x = layer(x, index, rotary, attend)
        return self.norm(x)

    def step(
        self,
        x: Tensor,
        rotary: Rotary,
        cache: PagedKVCache,
        slots: Tensor,
        positions: Tensor,
        *,
        watch: HeadWatch | None = None,
        prompts: PackedPrompts | None = None,
    ) -> Tensor:
        """Decode step: run T new positions of each slot (mostly 1) through all layers but not the final norm:
        `x` [T * B, width] to the same shape.

        Row t * B + b of `x` is position `positions[b]` + t of `slots[b]` ([B] int64 both); its keys and values are
        written to `cache`, and it attends to all positions up to its own. `rotary`: tables by position,
        [P, 1, head width]. `watch` records attention weights, if T is 1. `prompts`, which may be of these slots, are
        prefilled in the same pass over the weights: the result is that of `prefill`, then `step`, up to rounding.
        Capturable; no sync; no autograd."""
        count, last = x.shape[0], len(self.layers) - 1
        hidden = NormedRows(x if prompts is None else torch.cat((x, prompts.rows)))
        tokens = None if prompts is None else prompts.tokens.laid_out()
        for index, layer in enumerate(cast(Sequence[DecoderLayer], self.layers)):
            kv = PagedKV(cache.keys[index], cache.values[index], cache.page_table, slots)
            qkv, rows, more = layer.project(hidden), hidden.rows, None
            if prompts is not None and tokens is not None:
                # First: the step of a slot reads what its prompt writes.
                is_used = index < last or prompts.is_output_used
                more = self._attend_prompts(index, qkv[count:], rotary, cache, tokens, is_output_used=is_used)
            given = qkv[:count], layer.self_attn.head_norms, rotary, kv, positions
            heads = decode_attention(*given)
            if watch is not None:
                watch.keep(index, *given)
            if more is not None:
                heads = torch.cat((heads, more))
            hidden = layer.complete(rows[: heads.shape[0]], heads, self.norm_after(index))
        return hidden.rows

    def norm_after(self, index: int) -> RMSNorm | None:
        """The input norm of layer `index` + 1, or None after the last layer."""
        layers = cast(Sequence[DecoderLayer], self.layers)
        return layers[index + 1].input_layernorm if index + 1 < len(layers) else None

    def prefill(
        self, x: Tensor, rotary: Rotary, cache: PagedKVCache, tokens: PackedTokens, *, is_output_used: bool = True
    ) -> Tensor:
        """Run packed prompts through all layers but not the final norm: `x` [T, width] to the same shape.
        Writes keys and values to the pages of each token's slot. `rotary`: tables by position, [P, 1, head width].
        With `is_output_used` false the last layer only writes its keys and values, and the result is undefined. Equal
        to `forward` with `PagedKVCache.fill`, with fused kernels. Capturable; no sync; no autograd."""
        hidden, last, laid_out = NormedRows(x), len(self.layers) - 1, tokens.laid_out()
        for index, layer in enumerate(cast(Sequence[DecoderLayer], self.layers)):
            qkv, is_used = layer.project(hidden), is_output_used or index < last
            heads = self._attend_prompts(index, qkv, rotary, cache, laid_out, is_output_used=is_used)
            if heads is None:
                break
            hidden = layer.complete(hidden.rows, heads, self.norm_after(index))
        return hidden.rows

    def _attend_prompts(
        self,
        index: int,
        qkv: Tensor,
        rotary: Rotary,
        cache: PagedKVCache,
        laid_out: tuple[Tensor, Tensor, Tensor, Tensor],
        *,
        is_output_used: bool,
    ) -> Tensor | None:
        """Write the keys and values of packed prompts in layer `index`, `qkv` [T, (heads + 2 * kv_heads) * D]; if the
        output is used, attend: [T, heads * D]. `laid_out`: that of their `PackedTokens`."""
        attention = cast(DecoderLayer, self.layers[index]).self_attn
        slots, positions, starts, cached = laid_out
        kv = PagedKV(cache.keys[index], cache.values[index], cache.page_table, slots)
        rotated = keep_prompt(qkv, attention.head_norms, rotary, kv, positions)
        if not is_output_used:
            return None
        queries, keys = rotated.split(attention.heads[:2], dim=1)
        values = qkv.unflatten(-1, (-1, attention.head_width))[:, -attention.heads[2] :]
        heads: Tensor = varlen_attention(queries, keys, values, starts, cached, kv)
        return heads.flatten(1)

    def check_kernels(
        self, batch: int, table: Tensor, page: int, tokens: int = 1, *, watch: HeadWatch | None = None
    ) -> None:
        """Compare every kernel of `step`, at `tokens` positions of each of `batch` slots, and those of `prefill`, after
        a cached prefix, with their references; disable any that disagrees.
        Uses random inputs, the weights of the first layer, and contexts of up to two pages of `page` positions, or one
        if `table` [.., 1] (not written) has room for one. Synchronises; does nothing on a CPU."""
        layer, config = cast(DecoderLayer, self.layers[0]), self.config
        layer.check_kernels(tokens * batch)
        attention, weight = layer.self_attn, self.norm.weight
        random, tolerance = random_like(weight)
        norms, qkv = attention.head_norms, random(tokens * batch, attention.qkv_proj.out_features)
        index = torch.arange(batch, device=weight.device)
        # A view of a table of the serving width: another row stride would compile kernels that nothing else uses.
        table = torch.zeros_like(table[:1]).repeat(batch, 1)[:, :2]
        table.copy_(torch.arange(2 * batch, device=weight.device).view(batch, 2)[:, : table.shape[1]])
        length = table.shape[1] * page
        positions = (index * 7 + 3) % (length - tokens + 1)
        pages = random(2, 2 * batch, page, config.kv_heads, config.head_width)
        rotary = config.rotary(torch.arange(length, device=weight.device), weight.dtype)

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
            point.check(lambda: (qkv, norms, rotary, kv(), positions, Watched(heads, spans, out.clone())), tolerance)

    @torch.no_grad()
    def split_pairs(self) -> None:
        """Reorder QKV weights and q/k norms from interleaved to half-split rotary pairs (`split_pairs`), in place."""
        for layer in cast(Sequence[DecoderLayer], self.layers):
            attention = layer.self_attn
            heads, width = sum(attention.heads[:2]), attention.head_width
            attention.qkv_proj.reorder(functools.partial(split_pairs, heads=heads, head_width=width))
            for norm in attention.head_norms[:2]:
                if norm is not None:
                    norm.copy_(split_pairs(norm[:, None], 1, width)[:, 0])
