"""The flow head: a small network, modulated by a condition, that makes a latent of noise in one step or a few. Such a
network is described by Li et al., "Autoregressive Image Generation without Vector Quantization" (2024)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.linear import Linear

from .config import FlowConfig

FEWEST_STEPS, MOST_STEPS = 1, 16
"""Limits of its steps; the released heads were distilled for one."""

TIMES = {"lsd": 2, "pointwise": 0, "drifting": 0}
"""The number of times that each kind is given: start and target of a step, or none."""

BLOCK_EPS, _TIME_EPS, _FREQUENCIES = 1e-6, 1e-5, 128


class FlowHead(nn.Module):
    """Noise [B, D] and a condition [B, Z] to a latent [B, D]. `kind` "lsd" integrates a velocity in steps from noise;
    "pointwise" adds its output to the noise; "drifting" returns it.

    `modulations` and their `offsets` are those of all blocks, then of the output, as one product. `times` [steps, F],
    what the times of each step add to the condition, is derived by `make_times`."""

    offsets: Any
    times: Tensor

    def __init__(self, config: FlowConfig, latents: int, condition: int) -> None:
        super().__init__()
        self.kind, self.latents, width = config.type, latents, config.dim
        self.time_embed = nn.ModuleList(_TimeEmbedding(width) for _ in range(TIMES[self.kind]))
        self.cond_embed, self.input_proj = Linear(condition, width), Linear(latents, width)
        self.modulations, self.offsets = Linear(width, (3 * config.depth + 2) * width, bias=False), nn.Module()
        self.offsets.bias = nn.Parameter(torch.empty(self.modulations.out_features))
        self.res_blocks = nn.ModuleList(FlowBlock(width) for _ in range(config.depth))
        self.output = Linear(width, latents)
        self.register_buffer("times", None, persistent=False)

    @torch.no_grad()
    def make_times(self, steps: int = FEWEST_STEPS) -> None:
        """Take `steps` steps from now on, and compute their `times`."""
        weight = self.input_proj.weight
        self.times = weight.new_zeros(steps, len(weight))
        if self.kind == "lsd":
            start, target = self.time_embed
            moments = torch.arange(steps + 1, device=weight.device, dtype=weight.dtype) / steps
            self.times = (start(moments[:-1]) + target(moments[1:])) / 2

    def forward(self, noise: Tensor, condition: Tensor) -> Tensor:
        y = self.cond_embed(condition)
        if self.kind == "lsd":
            for time in self.times:
                noise = noise + self._output(noise, y + time) / len(self.times)
            return noise
        return noise + self._output(noise, y) if self.kind == "pointwise" else self._output(noise, y)

    def _output(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.modulations(F.silu(y)) + self.offsets.bias
        *blocks, shift, scale = rows.split(self.input_proj.out_features, dim=-1)
        x = self.input_proj(x)
        for index, block in enumerate(self.res_blocks):
            x = block(x, *blocks[3 * index : 3 * index + 3])
        normed = F.layer_norm(x, x.shape[-1:], eps=BLOCK_EPS)
        return self.output(torch.addcmul(normed + shift, normed, scale))


class FlowBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=BLOCK_EPS)
        self.mlp = nn.ModuleDict({"0": Linear(width, width), "2": Linear(width, width)})

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        normed = self.in_ln(x)
        inner = F.silu(self.mlp["0"](torch.addcmul(normed + shift, normed, scale)))
        return torch.addcmul(x, gate, self.mlp["2"](inner))


class _TimeEmbedding(nn.Module):
    """Times [N] to [N, F]. Its last step divides by the root of the variance about the mean, which stays."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.empty(_FREQUENCIES))
        self.mlp = nn.ModuleDict({"0": Linear(2 * _FREQUENCIES, width), "2": Linear(width, width)})
        self.alpha = nn.Parameter(torch.empty(width))

    def forward(self, times: Tensor) -> Tensor:
        angles = times[:, None] * self.freqs
        embedded = self.mlp["2"](F.silu(self.mlp["0"](torch.cat((angles.cos(), angles.sin()), dim=-1))))
        return embedded * self.alpha / (embedded.var(-1, keepdim=True) + _TIME_EPS).sqrt()
