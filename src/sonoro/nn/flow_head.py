"""A flow head: a small network, modulated by a condition, that makes a latent of noise in one step or a few. Such a
network is described by Li et al., "Autoregressive Image Generation without Vector Quantization" (2024)."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.linear import Linear

_FREQUENCIES, _BLOCK_EPS, _TIME_EPS = 128, 1e-6, 1e-5


class FlowHead(nn.Module):
    """Noise [B, D] and a condition [B, Z] to a latent [B, D].
    `kind`: "lsd" integrates a velocity in `steps` steps from noise; "pointwise" adds its output to the noise;
    "drifting" returns it. `finalize` derives `modulations`, those of all blocks as one product, and `times`
    [steps, F], what each step's times add to the condition."""

    modulations: Linear
    modulation_bias: Tensor
    times: Tensor

    def __init__(self, kind: str, width: int, depth: int, latents: int, condition: int) -> None:
        super().__init__()
        self.kind, self.steps, self.latents, self.eps = kind, 1, latents, _BLOCK_EPS
        if self.kind == "lsd":
            self.time_embed = nn.ModuleList(_TimeEmbedding(width) for _ in range(2))
        self.cond_embed, self.input_proj = Linear(condition, width), Linear(latents, width)
        self.res_blocks = nn.ModuleList(FlowBlock(width) for _ in range(depth))
        self.final_layer = nn.ModuleDict(
            {"linear": Linear(width, latents), "adaLN_modulation": nn.ModuleDict({"1": Linear(width, 2 * width)})}
        )
        for name in ("modulation_bias", "times"):
            self.register_buffer(name, None, persistent=False)

    @property
    def modulators(self) -> list[Linear]:
        """The layers whose products are one."""
        parts = [*(block.adaLN_modulation for block in self.res_blocks), self.final_layer["adaLN_modulation"]]
        return [cast(Linear, cast(nn.ModuleDict, part)["1"]) for part in parts]

    def finalize(self) -> None:
        self.modulations = Linear.derived(torch.cat([part.weight for part in self.modulators]))
        self.modulation_bias = torch.cat([cast(Tensor, part.bias) for part in self.modulators])
        self.share()
        self.make_times(self.steps)

    def share(self) -> None:
        """Let the `modulators` be views of `modulations`: the matrices are kept once."""
        row = 0
        for part in self.modulators:
            part.weight.data = self.modulations.weight[row : row + part.out_features]
            row += part.out_features

    @torch.no_grad()
    def make_times(self, steps: int) -> None:
        """Take `steps` steps from now on, and compute their `times`."""
        self.steps, bias = steps, cast(Tensor, self.cond_embed.bias)
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


class FlowBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=_BLOCK_EPS)
        self.mlp = nn.ModuleDict({"0": Linear(width, width), "2": Linear(width, width)})
        self.adaLN_modulation = nn.ModuleDict({"1": Linear(width, 3 * width)})

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
