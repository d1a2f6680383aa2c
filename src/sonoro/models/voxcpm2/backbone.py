"""All of model.safetensors, under the released names: both LMs, the quantiser between them, the local encoder, and the
flow of `flow.py`. Keeps no state of a request.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.bidirectional import BidirectionalStack
from sonoro.nn.linear import Linear, lay_out_by_input
from sonoro.nn.transformer import DecoderStack

from .config import ModelConfig, lm_config, local_config
from .flow import Flow

__all__ = ["VoxLM"]


class VoxLM(nn.Module):
    """Two language models, one above the other, with what goes into them and what is asked of them. `finalize` lays it
    out for speaking, once the weights are final.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, width = config, config.lm_config.hidden_size
        local, dit = config.encoder_config.hidden_dim, config.dit_config.hidden_dim
        self.base_lm = _BaseLM(config)
        self.residual_lm = DecoderStack(lm_config(config, config.residual_lm_num_layers))
        self.feat_encoder = _LocalEncoder(config)
        self.feat_decoder = Flow(config)
        self.fsq_layer = _Quantizer(width, config.scalar_quantization_latent_dim, config.scalar_quantization_scale)
        self.enc_to_lm_proj = Linear(local, width)
        self.lm_to_dit_proj, self.res_to_dit_proj = Linear(width, dit), Linear(width, dit)
        self.fusion_concat_proj = Linear(2 * width, width)
        self.stop_proj, self.stop_head = Linear(width, width), Linear(width, 2, bias=False)

    @property
    def weight(self) -> Tensor:
        """One whose dtype and device are the model's."""
        return self.stop_head.weight

    @torch.no_grad()
    def finalize(self) -> None:
        """Derive what speaking needs from the weights as they were loaded. To be called once."""
        self.requires_grad_(False).eval()
        self.feat_encoder.encoder.finalize()
        self.feat_decoder.finalize()
        if self.weight.device.type == "cpu":
            lay_out_by_input(self)

    def embed(self, ids: Tensor, patches: Tensor, is_audio: Tensor) -> Tensor:
        """What the base LM is given, [T, H], of text `ids` [T], or of `patches` [T, P, D] where `is_audio` [T]."""
        return torch.where(is_audio[:, None], self.embed_patches(patches), self.base_lm.embed_tokens(ids))

    def embed_patches(self, patches: Tensor) -> Tensor:
        """What the base LM is given of `patches` [T, P, D]: [T, H]."""
        return self.enc_to_lm_proj(self.feat_encoder(patches))

    def quantize(self, hidden: Tensor, is_audio: Tensor) -> Tensor:
        """`hidden` [T, H] of the base LM as all that comes after takes it: rounded where `is_audio` [T]."""
        return torch.where(is_audio[:, None], self.fsq_layer(hidden), hidden)

    def fuse(self, hidden: Tensor, embedded: Tensor, is_audio: Tensor) -> Tensor:
        """What the residual LM is given, [T, H], of quantised `hidden` and, where `is_audio`, what was `embedded`."""
        return self.fusion_concat_proj(torch.cat((hidden, embedded * is_audio[:, None]), dim=-1))

    def condition(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """What the flow is given of both LMs [B, H]: two tokens, [B, 2, dit width]."""
        return torch.stack((self.lm_to_dit_proj(hidden), self.res_to_dit_proj(residual)), dim=1)

    def stop_logits(self, hidden: Tensor) -> Tensor:
        """Whether to go on, or to end with the patch that is made of `hidden` [B, H]: [B, 2]."""
        return self.stop_head(F.silu(self.stop_proj(hidden)))


class _BaseLM(DecoderStack):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(lm_config(config, config.lm_config.num_hidden_layers))
        self.embed_tokens = nn.Embedding(config.lm_config.vocab_size, config.lm_config.hidden_size)


class _LocalEncoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.encoder_config.hidden_dim
        self.special_token = nn.Parameter(torch.empty(1, 1, 1, width))
        self.in_proj = Linear(config.feat_dim, width)
        self.encoder = BidirectionalStack(
            local_config(config, config.encoder_config), 1 + config.patch_size, slice(0, 1)
        )

    def forward(self, patches: Tensor) -> Tensor:
        """`patches` [T, P, D], each by itself: [T, width], what its first token has gathered."""
        first = self.special_token[0].expand(patches.shape[0], 1, -1)
        tokens = torch.cat((first, self.in_proj(patches)), dim=1)
        return self.encoder.norm.fused(self.encoder.see(tokens))


class _Quantizer(nn.Module):
    def __init__(self, width: int, latents: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.in_proj, self.out_proj = Linear(width, latents), Linear(latents, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` [T, H] by way of `latents` numbers of 2 `scale` + 1 levels each; halves are rounded to even."""
        return self.out_proj((self.in_proj(hidden).tanh() * self.scale).round() / self.scale)
