"""Pre-norm layers with LayerNorm and a feed-forward of two matrices and GELU (tanh form), for a language model
(`GeluLayer`) and for a codec's windows (`GeluWindowLayer`)."""

import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.history import Context
from sonoro.nn.linear import Linear, NormedRows, RMSNorm, random_like
from sonoro.nn.transformer import DecoderLayer, Rotary
from sonoro.nn.window import LayerScale, WindowAttention, WindowConfig


class LayerNorm(nn.LayerNorm):
    """LayerNorm of the last axis with a weight and a bias, computed in float32 or wider."""

    def fused(self, x: Tensor) -> Tensor:
        """`forward`, which is one kernel already. Capturable."""
        return self(x)


class GeluFeedForward(nn.Module):
    """Two matrices, GELU between them, `approximate` as in torch."""

    def __init__(self, width: int, inner: int, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """What the second matrix is given."""
        return F.gelu(self.up_proj(x), approximate=self.approximate)


class GeluLayer(DecoderLayer):
    """A layer of `DecoderStack`."""

    norm_type, feed_type = LayerNorm, GeluFeedForward

    def project(self, x: NormedRows) -> Tensor:
        return self.self_attn.qkv_proj(self.input_layernorm(x.rows))

    def complete(self, x: Tensor, heads: Tensor, norm: RMSNorm | None) -> NormedRows:
        rows = self.self_attn.o_proj.add_to(x, heads).rows
        return self.mlp.down_proj.add_to(rows, self.mlp.inner(self.post_attention_layernorm(rows)))

    def check_kernels(self, rows: int) -> None:
        attention, feed = self.self_attn, self.mlp
        random, tolerance = random_like(self.input_layernorm.weight)
        x, heads, inner = (
            random(rows, part.in_features) for part in (attention.qkv_proj, attention.o_proj, feed.down_proj)
        )
        attention.qkv_proj.check_alone(x, tolerance)
        feed.up_proj.check_alone(x, tolerance)
        attention.o_proj.check_add_to(x, heads, None, tolerance)
        feed.down_proj.check_add_to(x, inner, None, tolerance)


class GeluWindowLayer(nn.Module):
    """A layer of `WindowLayers`, with layer scales."""

    def __init__(self, config: WindowConfig, approximate: str = "tanh") -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(config.width, config.norm_eps)
        self.self_attn = WindowAttention(config)
        self.self_attn_layer_scale = LayerScale(config.width)
        self.post_attention_layernorm = LayerNorm(config.width, config.norm_eps)
        self.mlp = GeluFeedForward(config.width, config.intermediate, approximate)
        self.mlp_layer_scale = LayerScale(config.width)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor, history: Context) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotary, mask, history))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
