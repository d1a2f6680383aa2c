"""The modules of `flow_lm`, under the released names: text embedding, transformer, end of speech and flow head."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.gelu import GeluLayer
from sonoro.nn.linear import Linear, lay_out_by_input
from sonoro.nn.transformer import DecoderStack

from .config import FlowConfig, ModelConfig

FEWEST_STEPS, MOST_STEPS = 1, 16
"""Limits of the flow head's steps; the released heads were distilled for one."""

_FREQUENCIES, _BLOCK_EPS, _TIME_EPS = 128, 1e-6, 1e-5


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
        self.conditioner = _TextEmbedding(config)
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
        self.flow_net.finalize()
        if self.weight.device.type == "cpu":
            lay_out_by_input(self)

    def embed(self, ids: Tensor) -> Tensor:
        """The transformer's inputs [T, H] for `ids` [T]: of text, or one past them for the first frame."""
        text = self.conditioner(ids)
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


class _TextEmbedding(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        table = config.flow_lm.lookup_table
        self.embed = nn.Embedding(table.n_bins + 1, table.rank or table.dim)
        self.proj = Linear(table.rank, table.dim, bias=False) if table.rank else None

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.embed(ids)
        return rows if self.proj is None else self.proj(rows)


class FlowHead(nn.Module):
    """Noise [B, D] and a condition [B, Z] to a latent [B, D].
    `kind`: "lsd" integrates a velocity in `steps` steps from noise; "pointwise" adds its output to the noise;
    "drifting" returns it. `finalize` derives `modulations`, those of all blocks as one product, and `times`
    [steps, F], what each step's times add to the condition."""

    modulations: Linear
    modulation_bias: Tensor
    times: Tensor

    def __init__(self, sizes: FlowConfig, latents: int, condition: int) -> None:
        super().__init__()
        width = sizes.dim
        self.kind, self.steps = sizes.type, FEWEST_STEPS
        if self.kind == "lsd":
            self.time_embed = nn.ModuleList(_TimeEmbedding(width) for _ in range(2))
        self.cond_embed, self.input_proj = Linear(condition, width), Linear(latents, width)
        self.res_blocks = nn.ModuleList(_Block(width) for _ in range(sizes.depth))
        self.final_layer = nn.ModuleDict(
            {"linear": Linear(width, latents), "adaLN_modulation": nn.ModuleDict({"1": Linear(width, 2 * width)})}
        )
        for name in ("modulation_bias", "times"):
            self.register_buffer(name, None, persistent=False)

    def finalize(self) -> None:
        blocks = [cast(_Block, block).modulation for block in self.res_blocks]
        parts = [*blocks, cast(Linear, cast(nn.ModuleDict, self.final_layer["adaLN_modulation"])["1"])]
        self.modulations = Linear.derived(torch.cat([part.weight for part in parts]))
        self.modulation_bias = torch.cat([cast(Tensor, part.bias) for part in parts])
        row = 0
        for part in parts:  # views: the matrices are kept once
            part.weight.data = self.modulations.weight[row : row + part.out_features]
            row += part.out_features
        self.make_times()

    def make_times(self) -> None:
        """Compute `times` for `steps` steps."""
        bias = cast(Tensor, self.cond_embed.bias)
        self.times = bias.new_zeros(self.steps, len(bias))
        if self.kind == "lsd":
            start, target = (cast(Callable[[Tensor], Tensor], embed) for embed in self.time_embed)
            moments = torch.arange(self.steps + 1, device=bias.device, dtype=bias.dtype) / self.steps
            self.times = (start(moments[:-1]) + target(moments[1:])) / 2

    def forward(self, noise: Tensor, condition: Tensor) -> Tensor:
        y = self.cond_embed(condition)
        if self.kind == "lsd":
            for time in self.times:
                noise = noise + self._output(noise, y + time) / self.steps
            return noise
        return noise + self._output(noise, y) if self.kind == "pointwise" else self._output(noise, y)

    def _output(self, x: Tensor, y: Tensor) -> Tensor:
        modulations = (self.modulations(F.silu(y)) + self.modulation_bias).split(self.input_proj.out_features, dim=-1)
        x = self.input_proj(x)
        for index, block in enumerate(self.res_blocks):
            x = block(x, *modulations[3 * index : 3 * index + 3])
        shift, scale = modulations[-2:]
        normed = F.layer_norm(x, x.shape[-1:], eps=_BLOCK_EPS)
        return self.final_layer["linear"](torch.addcmul(normed + shift, normed, scale))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=_BLOCK_EPS)
        self.mlp = nn.ModuleDict({"0": Linear(width, width), "2": Linear(width, width)})
        self.adaLN_modulation = nn.ModuleDict({"1": Linear(width, 3 * width)})

    @property
    def modulation(self) -> Linear:
        return cast(Linear, self.adaLN_modulation["1"])

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        normed = self.in_ln(x)
        inner = F.silu(self.mlp["0"](torch.addcmul(normed + shift, normed, scale)))
        return torch.addcmul(x, gate, self.mlp["2"](inner))


class _TimeEmbedding(nn.Module):
    """Times [N] to [N, F]. Its last step divides by the root of the variance about the mean, which stays."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.empty(_FREQUENCIES))
        scale = nn.Module()
        scale.alpha = nn.Parameter(torch.empty(width))
        self.mlp = nn.ModuleDict({"0": Linear(2 * _FREQUENCIES, width), "2": Linear(width, width), "3": scale})

    def forward(self, times: Tensor) -> Tensor:
        angles = times[:, None] * self.freqs
        embedded = self.mlp["2"](F.silu(self.mlp["0"](torch.cat((angles.cos(), angles.sin()), dim=-1))))
        spread = (embedded.var(-1, keepdim=True) + _TIME_EPS).sqrt()
        return embedded * cast(Tensor, self.mlp["3"].alpha) / spread
