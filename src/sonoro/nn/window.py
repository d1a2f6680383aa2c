"""Transformer layers of a codec with causal sliding-window attention.

Sequences are [B, T, C]. A `Context` keeps the rotated keys and the values of the window, so that streaming is exact."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import CausalLayer
from sonoro.nn.history import Context
from sonoro.nn.linear import Linear, RMSNorm
from sonoro.nn.transformer import DecoderConfig, FeedForward, Rotary, rotate
from sonoro.ops.window import window_attention


@dataclass(frozen=True)
class WindowConfig(DecoderConfig):
    """Sizes of a decoder stack in which a column attends to itself and the `window` - 1 columns before it."""

    window: int

    def attend(self, qkv: Tensor, past: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """`ops.window.window_attention` over `qkv` [B, T, (heads + 2 * kv_heads) * D], with rotary embedding."""
        return window_attention(qkv, (self.heads, self.kv_heads), self.window, self.rope_theta, past)


class LayerScale(nn.Module):
    """Layer scale: a learned factor per channel of a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class WindowAttention(CausalLayer):
    """Causal attention over the last `window` columns; the history keeps the rotated keys and the values."""

    def __init__(self, config: WindowConfig) -> None:
        assert config.window > 1
        super().__init__(config.window - 1, 2 * config.kv_heads * config.head_width)
        self.heads = (config.heads, config.kv_heads, config.kv_heads)
        self.head_width = config.head_width
        self.qkv_proj = Linear(config.width, sum(self.heads) * config.head_width, bias=False)
        self.o_proj = Linear(config.heads * config.head_width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor, history: Context) -> Tensor:
        heads = self.qkv_proj(x).view(*x.shape[:2], -1, self.head_width)
        queries, keys, values = heads.split(self.heads, dim=2)
        pairs = torch.cat([rotate(keys, rotary), values], dim=2).flatten(2)
        pairs = history.recall(self.key, pairs)
        keys, values = pairs.view(*pairs.shape[:2], -1, self.head_width).transpose(1, 2).chunk(2, dim=1)
        queries, is_grouped = rotate(queries, rotary).transpose(1, 2), self.heads[0] != self.heads[1]
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=is_grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class WindowLayer(nn.Module):
    """One pre-norm layer with layer scales; Q, K and V are one projection, and so are gate and up.
    `folded` matrices are those of the fused form, where `nn.vocoder_fused.keep_folded` keeps them instead."""

    folded_qkv: Tensor | None
    folded_out: Tensor | None
    folded_gate_up: Tensor | None
    folded_down: Tensor | None

    def __init__(self, config: WindowConfig) -> None:
        super().__init__()
        for name in ("folded_qkv", "folded_out", "folded_gate_up", "folded_down"):
            self.register_buffer(name, None, persistent=False)
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = WindowAttention(config)
        self.self_attn_layer_scale = LayerScale(config.width)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config.width, config.intermediate)
        self.mlp_layer_scale = LayerScale(config.width)

    @property
    def folded(self) -> list[Tensor]:
        """The matrices that are kept: none, or all four."""
        kept = (self.folded_qkv, self.folded_out, self.folded_gate_up, self.folded_down)
        return [matrix for matrix in kept if matrix is not None]

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor, history: Context) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotary, mask, history))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class WindowLayers(nn.ModuleList):
    """A stack of layers without a final norm. `forward` advances the history: use one such stack per history."""

    def __init__(self, config: WindowConfig, layer: Callable[[WindowConfig], nn.Module] = WindowLayer) -> None:
        super().__init__(layer(config) for _ in range(config.layers))
        self.config = config

    def forward(self, x: Tensor, history: Context) -> Tensor:
        """Run `x` [B, T, width] through all layers and advance `history` by T columns."""
        config, columns = self.config, x.shape[1]
        positions = history.positions(columns, x.device)
        rotary = config.rotary(positions, x.dtype)
        known = history.recalled(cast(WindowLayer, self[0]).self_attn.key, columns, x.device)[:, None]
        distance = positions[:, :, None] - known
        mask = ((distance >= 0) & (distance < config.window) & (known >= 0))[:, None]
        for layer in self:
            x = layer(x, rotary, mask, history)
        history.advance(columns)
        return x


class WindowTransformer(nn.Module):
    """`WindowLayers` and a final norm."""

    def __init__(self, config: WindowConfig) -> None:
        super().__init__()
        self.layers = WindowLayers(config)
        self.norm = RMSNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        """Run `x` [B, T, width] through all layers and the final norm; advances `history` by T columns."""
        return self.norm(self.layers(x, history))
