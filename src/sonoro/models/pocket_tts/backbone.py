"""The modules of `flow_lm`, under the released names: text embedding, transformer, end of speech and flow head."""

import torch
from torch import Tensor, nn

from sonoro.nn.gelu import GeluLayer
from sonoro.nn.linear import Linear, lay_out_by_input
from sonoro.nn.transformer import DecoderStack

from .config import ModelConfig
from .flow import FlowHead


class FlowLM(nn.Module):
    """The language model and its flow head, which makes a latent of noise. Call `finalize` once the weights are final.
    Everything behind the last norm is in float32 or wider: latents are fed back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, sizes = config, config.flow_lm
        width, latents = sizes.transformer.d_model, config.latents
        self.emb_std, self.emb_mean, self.bos_emb = (nn.Parameter(torch.empty(latents)) for _ in range(3))
        if sizes.insert_bos_before_voice:
            self.bos_before_voice = nn.Parameter(torch.empty(1, 1, width))
        self.speaker_proj = Linear(config.mimi.inner_dim, width, bias=False)
        table = sizes.lookup_table
        self.conditioner = nn.ModuleDict({"embed": nn.Embedding(table.n_bins + 1, table.rank or width)})
        if table.rank:
            self.conditioner["proj"] = Linear(table.rank, width, bias=False)
        self.input_linear = Linear(latents, width, bias=False)
        self.transformer = DecoderStack(config.backbone, layer=GeluLayer)
        self.z_proj = Linear(width, sizes.z_dim, bias=False) if sizes.z_dim else None
        self.out_eos = Linear(sizes.z_dim or width, 1)
        self.flow_net = FlowHead(sizes.flow, latents, sizes.z_dim or width)

    @staticmethod
    def is_wide(name: str) -> bool:
        """Whether the tensor `name` is in float32 in any dtype."""
        return name.startswith(("flow_net.", "out_eos.", "z_proj.", "input_linear.", "emb_", "bos_emb"))

    @property
    def weight(self) -> Tensor:
        """A weight; its dtype and device are the model's."""
        return self.speaker_proj.weight

    @torch.no_grad()
    def finalize(self) -> None:
        """Derive what inference needs from the loaded weights. Call once."""
        self.requires_grad_(False).eval()
        # The files have interleaved rotary pairs.
        self.transformer.split_pairs()
        self.flow_net.make_times()
        if self.weight.device.type == "cpu":
            lay_out_by_input(self)

    def embed(self, ids: Tensor) -> Tensor:
        """The transformer's inputs [T, H] for `ids` [T]: of text, or one past them for the first frame."""
        text = self.conditioner["embed"](ids)
        text = self.conditioner["proj"](text) if "proj" in self.conditioner else text
        first = self.embed_latents(self.bos_emb)
        return torch.where((ids == self.config.flow_lm.lookup_table.n_bins)[:, None], first, text)

    def embed_latents(self, latents: Tensor) -> Tensor:
        """The transformer's inputs [..., H] for normalised `latents` [..., D]."""
        return self.input_linear(latents).to(self.weight.dtype)

    def embed_voice(self, latents: Tensor) -> Tensor:
        """The transformer's inputs [P, H] for a recording's `latents` [V, inner width]."""
        rows = self.speaker_proj(latents.to(self.weight.dtype))
        return torch.cat((self.bos_before_voice[0], rows)) if hasattr(self, "bos_before_voice") else rows

    def read_out(self, hidden: Tensor) -> Tensor:
        """What flow head and end of speech are given, [B, Z], of the last layer's output [B, H]."""
        normed = self.transformer.norm(hidden).to(self.out_eos.weight.dtype)
        return normed if self.z_proj is None else self.z_proj(normed)

    def denormalize(self, latents: Tensor) -> Tensor:
        """Normalised `latents` [B, D] as the codec's."""
        return latents * self.emb_std + self.emb_mean
