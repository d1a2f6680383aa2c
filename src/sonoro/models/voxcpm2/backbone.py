"""The modules of model.safetensors under the released names: both LMs, quantiser, local encoder and flow."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.bidirectional import BidirectionalStack
from sonoro.nn.linear import Linear, lay_out_by_input
from sonoro.nn.transformer import DecoderStack

from .config import ModelConfig, lm_config, local_config
from .flow import Flow


class VoxLM(nn.Module):
    """The base LM and the residual LM on top of it, with their encoder, projections, stop head and flow. Call
    `finalize` once the weights are final."""

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
        """A weight; its dtype and device are the model's."""
        return self.stop_head.weight

    @torch.no_grad()
    def finalize(self) -> None:
        """Derive what inference needs from the loaded weights. Call once."""
        self.requires_grad_(False).eval()
        self.feat_encoder.encoder.finalize()
        self.feat_decoder.finalize()
        if self.weight.device.type == "cpu":
            lay_out_by_input(self)

    def embed(self, ids: Tensor, patches: Tensor, is_audio: Tensor) -> Tensor:
        """The base LM's inputs [T, H]: embeddings of `ids` [T], or of `patches` [T, P, D] where `is_audio` [T]."""
        return torch.where(is_audio[:, None], self.embed_patches(patches), self.base_lm.embed_tokens(ids))

    def embed_patches(self, patches: Tensor) -> Tensor:
        """The base LM's inputs [T, H] for `patches` [T, P, D]."""
        return self.enc_to_lm_proj(self.feat_encoder(patches))

    def quantize(self, hidden: Tensor, is_audio: Tensor) -> Tensor:
        """The base LM's output `hidden` [T, H], quantised (FSQ) where `is_audio` [T]."""
        return torch.where(is_audio[:, None], self.fsq_layer(hidden), hidden)

    def fuse(self, hidden: Tensor, embedded: Tensor, is_audio: Tensor) -> Tensor:
        """The residual LM's inputs [T, H]: a projection of quantised `hidden` and `embedded` [T, H] (0 for text)."""
        return self.fusion_concat_proj(torch.cat((hidden, embedded * is_audio[:, None]), dim=-1))

    def condition(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """The flow's condition [B, 2, dit width], two tokens, from the outputs [B, H] of both LMs."""
        return torch.stack((self.lm_to_dit_proj(hidden), self.res_to_dit_proj(residual)), dim=1)

    def stop_logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, 2] of continuing, and of ending with the patch generated from `hidden` [B, H]."""
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
        stack = local_config(config, config.encoder_config)
        self.encoder = BidirectionalStack(stack, 1 + config.patch_size, slice(0, 1))

    def forward(self, patches: Tensor) -> Tensor:
        """Encode each of `patches` [T, P, D] by itself: [T, width], the output at its special token."""
        first = self.special_token[0].expand(patches.shape[0], 1, -1)
        tokens = torch.cat((first, self.in_proj(patches)), dim=1)
        return self.encoder.norm.fused(self.encoder.see(tokens))


class _Quantizer(nn.Module):
    def __init__(self, width: int, latents: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.in_proj, self.out_proj = Linear(width, latents), Linear(latents, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Finite scalar quantisation of `hidden` [T, H]: `latents` numbers of 2 * `scale` + 1 levels; ties to even."""
        return self.out_proj((self.in_proj(hidden).tanh() * self.scale).round() / self.scale)
