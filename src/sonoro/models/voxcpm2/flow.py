"""A patch by conditional flow matching: LocDiT and its solver.

Follows OpenBMB/VoxCPM voxcpm/modules/locdit/unified_cfm.py `UnifiedCFM` and local_dit_v2.py `VoxCPMLocDiT`. Everything
is computed in the model's dtype, times too: in bfloat16 those it was trained with differ much from exact ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sonoro.nn.flow import TimeMLP, guide, schedule, sinusoids
from sonoro.nn.transformer import WholeStack

from .config import ModelConfig, local_config

__all__ = ["FEWEST_STEPS", "MOST_STEPS", "Flow"]

FEWEST_STEPS, MOST_STEPS = 2, 10
"""Solver steps of a patch. The first changes nothing, so a single one would return the noise."""

_CALLS = MOST_STEPS - 1


class Flow(nn.Module):
    """The sampler. `times` [MOST_STEPS + 1, calls, width] are the embedded times of each count of steps, and `sizes`
    [MOST_STEPS + 1, calls] how far each call goes: nowhere beyond those of the count.
    """

    times: Tensor
    sizes: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.estimator = _LocalDiT(config)
        for name in ("times", "sizes"):
            self.register_buffer(name, None, persistent=False)

    def finalize(self) -> None:
        """Make the tables, which depend on nothing but the weights."""
        dit = self.estimator
        dit.decoder.finalize()
        weight = dit.in_proj.weight
        self.times = weight.new_zeros(MOST_STEPS + 1, _CALLS, weight.shape[0])
        self.sizes = weight.new_zeros(MOST_STEPS + 1, _CALLS)
        for steps in range(FEWEST_STEPS, MOST_STEPS + 1):
            times, sizes = schedule(steps, weight.dtype)
            self.times[steps, : steps - 1] = dit.embed_times(times)
            self.sizes[steps, : steps - 1] = sizes

    def sample(self, mu: Tensor, cond: Tensor, noise: Tensor, cfg: Tensor, steps: Tensor) -> Tensor:
        """Patches [B, P, D] from `noise`, that follow the patches `cond` (both [B, P, D]) as `mu` [B, 2, width] asks.

        Guided by `cfg` [B] float32; in `steps` [B] int64 steps. Rows with fewer than the most take as many calls, of
        which the last go nowhere: so rows of a batch may differ, and one graph serves all. Capturable; no sync.
        """
        fixed = self.estimator.fixed_tokens(mu, cond)
        times, sizes = self.times[steps], self.sizes[steps]
        x = noise
        for call in range(_CALLS):
            guided, free = self.estimator(x.repeat(2, 1, 1), fixed, times[:, call].repeat(2, 1)).chunk(2)
            x = x - sizes[:, call, None, None] * guide(guided, free, cfg)
        return x


class _LocalDiT(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.dit_config.hidden_dim
        self.in_proj, self.cond_proj = nn.Linear(config.feat_dim, width), nn.Linear(config.feat_dim, width)
        self.out_proj = nn.Linear(width, config.feat_dim)
        self.time_mlp, self.delta_time_mlp = TimeMLP(width), TimeMLP(width)
        self.decoder = WholeStack(local_config(config, config.dit_config), 3 + 2 * config.patch_size)

    def embed_times(self, times: Tensor) -> Tensor:
        """The token [..., width] of `times` [n], which are on the CPU: that of an interval of no length is added."""
        weight = self.in_proj.weight
        embedded, none = (
            sinusoids(moments, weight.shape[0]).to(weight) for moments in (times, torch.zeros_like(times[:1]))
        )
        return self.time_mlp(embedded) + self.delta_time_mlp(none)

    def fixed_tokens(self, mu: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
        """What stands before and after the time, of rows with condition and then of the same without: [2 B, n, width].

        The patch before is known to both.
        """
        return torch.cat((mu, torch.zeros_like(mu))), self.cond_proj(cond).repeat(2, 1, 1)

    def forward(self, x: Tensor, fixed: tuple[Tensor, Tensor], time: Tensor) -> Tensor:
        """Velocities at `x` [N, P, D] and the embedded `time` [N, width]: [N, P, D]."""
        mu, cond = fixed
        tokens = torch.cat((mu, time[:, None], cond, self.in_proj(x)), dim=1)
        return self.out_proj(self.decoder.see(tokens)[:, -x.shape[1] :])
