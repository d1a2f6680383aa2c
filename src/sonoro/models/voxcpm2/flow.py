"""A patch by conditional flow matching: LocDiT and its ODE solver with classifier-free guidance.

Follows OpenBMB/VoxCPM voxcpm/modules/locdit/unified_cfm.py `UnifiedCFM` and local_dit_v2.py `VoxCPMLocDiT`. Everything,
times included, is computed in the model's dtype: the bfloat16 times of training differ much from exact ones."""

import torch
from torch import Tensor, nn

from sonoro.nn.bidirectional import BidirectionalStack
from sonoro.nn.flow import TimeMLP, calls, schedule, sinusoids
from sonoro.nn.linear import Linear, random_like
from sonoro.ops.flow import PatchProjections, SolverStep, advance

from .config import ModelConfig, local_config

FEWEST_STEPS, MOST_STEPS, OFFICIAL_STEPS = 1, 10, 100
"""Limits of ODE steps per patch, and the official package's limit. The first step is skipped (CFG-Zero*), so one step
returns the noise."""

_CLOCK = 2
"""Token index of the time embedding: after the two condition tokens, before both patches."""


class Flow(nn.Module):
    """The flow sampler, of at most `most_steps` ODE steps. `times` [most_steps + 1, calls, width] are the time
    embeddings for each number of steps, `sizes` [most_steps + 1, calls] the step sizes: 0 for calls beyond those of the
    number."""

    times: Tensor
    sizes: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.estimator = _LocalDiT(config)
        self.most_steps = MOST_STEPS
        for name in ("times", "sizes"):
            self.register_buffer(name, None, persistent=False)

    def finalize(self) -> None:
        """Compute what is derived from the weights. Not capturable."""
        self.estimator.decoder.finalize()
        self.make_tables()

    def make_tables(self) -> None:
        """Compute the tables for up to `most_steps` steps from the weights."""
        dit = self.estimator
        weight = dit.in_proj.weight
        counts = [schedule(steps, weight.dtype) for steps in range(FEWEST_STEPS + 1, self.most_steps + 1)]
        self.times = weight.new_zeros(self.most_steps + 1, self.calls, weight.shape[0])
        self.sizes = weight.new_zeros(self.most_steps + 1, self.calls)
        for steps, (times, sizes) in enumerate(counts, FEWEST_STEPS + 1):
            self.times[steps, : len(times)] = dit.embed_times(times)
            self.sizes[steps, : len(sizes)] = sizes

    @property
    def calls(self) -> int:
        """Network calls per frame."""
        return max(calls(steps) for steps in range(FEWEST_STEPS, self.most_steps + 1))

    def sample(self, mu: Tensor, cond: Tensor, noise: Tensor, cfg: Tensor, steps: Tensor) -> Tensor:
        """Generate patches [B, P, D] from `noise` [B, P, D], given the previous patches `cond` [B, P, D] and the
        condition `mu` [B, 2, width].
        `cfg` [B] float32 is the guidance scale, `steps` [B] int64 the ODE steps. Every request takes all calls, with
        step size 0 beyond its own steps, so one graph serves a batch of different `steps`. Capturable; no sync."""
        dit, times, sizes = self.estimator, self.times[steps], self.sizes[steps]
        ends, tokens = dit.ends, dit.fixed_tokens(mu, cond)
        x = advance(noise, None, SolverStep(sizes[:, 0], cfg, times[:, 0]), ends, tokens, _CLOCK)
        for call in range(self.calls):
            # After the last call the time is not used.
            then = times[:, min(call + 1, self.calls - 1)]
            x = advance(x, dit.velocities(tokens), SolverStep(sizes[:, call], cfg, then), ends, tokens, _CLOCK)
        return x

    def check_kernels(self, batch: int) -> None:
        """Compare every kernel of `sample` with its reference at batch size `batch`. Synchronises; idle on a CPU."""
        dit = self.estimator
        latents, width = dit.out_proj.weight.shape
        random, tolerance = random_like(dit.out_proj.weight)
        dit.decoder.check_bidirectional(2 * batch)
        x = random(batch, dit.decoder.kept.stop - dit.decoder.kept.start, latents)
        hidden, velocities = random(2 * batch * x.shape[1], width), random(2 * batch * x.shape[1], latents)
        dit.out_proj.check_after_norm(hidden, dit.decoder.norm, tolerance)
        # Contiguous as in a frame: `full_like` of a one-row view would keep the view's stride.
        cfg = torch.full((batch,), 2.0, device=x.device)
        tokens = random(2 * batch, dit.decoder.tokens, width)
        given = (SolverStep(x[:, 0, 0], cfg, random(batch, width)), dit.ends)
        advance.check(lambda: (x, velocities, *given, tokens.clone(), _CLOCK), tolerance)
        advance.check(lambda: (x, None, *given, tokens.clone(), _CLOCK), tolerance)


class _LocalDiT(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.dit_config.hidden_dim
        self.in_proj, self.cond_proj = Linear(config.feat_dim, width), Linear(config.feat_dim, width)
        self.out_proj = Linear(width, config.feat_dim)
        self.time_mlp, self.delta_time_mlp = TimeMLP(width), TimeMLP(width)
        stack, tokens = local_config(config, config.dit_config), _CLOCK + 1 + 2 * config.patch_size
        self.decoder = BidirectionalStack(stack, tokens, slice(tokens - config.patch_size, tokens))

    def embed_times(self, times: Tensor) -> Tensor:
        """Time embeddings [n, width] of `times` [n] on the CPU, plus that of a zero interval (delta time)."""
        weight = self.in_proj.weight
        embedded, none = (
            sinusoids(moments, weight.shape[0]).to(weight) for moments in (times, torch.zeros_like(times[:1]))
        )
        return self.time_mlp(embedded) + self.delta_time_mlp(none)

    @property
    def ends(self) -> PatchProjections:
        """Weights and biases of the patch projections, for `advance`."""
        return PatchProjections(self.in_proj.weight, self.in_proj.bias, self.out_proj.bias)

    def fixed_tokens(self, mu: Tensor, cond: Tensor) -> Tensor:
        """The network's input tokens [2 B, tokens, width], first conditional, then unconditional (`mu` zero); those of
        time and patch are left zero. Both halves have the previous patch."""
        tokens = mu.new_zeros(2, mu.shape[0], self.decoder.tokens, mu.shape[2])
        tokens[0, :, :_CLOCK] = mu
        tokens[:, :, _CLOCK + 1 : self.decoder.kept.start] = self.cond_proj(cond)
        return tokens.flatten(0, 1)

    def velocities(self, tokens: Tensor) -> Tensor:
        """Velocities [2 B P, D] for the input `tokens`, without the output bias."""
        return self.out_proj.after_norm(self.decoder.see(tokens), self.decoder.norm)
