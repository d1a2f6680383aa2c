"""Logit processing of codebook 0, in the order of transformers 4.57.3; checks of the sampling kernels."""

import torch
from torch import Tensor

from sonoro.ops.device import seeded
from sonoro.ops.sample import Sampling, gumbel_noise, mask_logits, sample, sample_and_embed
from sonoro.runtime.sampling import BatchSampling

from .config import MIN_FRAMES


def mask_first(
    logits: Tensor, controls: BatchSampling, seen: Tensor, length: Tensor, *, suppressed: Tensor, is_end: Tensor
) -> Tensor:
    """Apply repetition penalty and bans to the `logits` [B, V] of codebook 0: [B, V] float32.

    `seen` [B, V] bool: ids sampled in this segment; `suppressed` [V] bool: control ids; `is_end` [V] bool: the
    end-of-speech id; `length` [B]: frames so far. The end is banned in the first frames and with `ignore_eos`.
    Capturable; no sync."""
    is_endless = controls.ignore_eos | (length < MIN_FRAMES)[:, None]
    return mask_logits(logits, seen, controls.repetition_penalty, suppressed | (is_end & is_endless))


def check_kernels(batch: int, vocabulary: int, table: Tensor) -> None:
    """Compare the sampling kernels with their references, for `batch` ids of `vocabulary`. Synchronises.
    Ids must be equal; noise may differ by the rounding of two logarithms."""
    device = table.device
    index = torch.arange(batch, device=device)
    gumbel_noise.check(lambda: (index * 7919, index % 3, index, 2, vocabulary), tolerance=1e-5)
    logits = torch.randn(batch, vocabulary, device=device, generator=seeded(device))
    noise = gumbel_noise.reference(index, index, index, 1, vocabulary)[:, 0]
    temperature, top_p = torch.full((batch, 1), 0.9, device=device), torch.ones(batch, 1, device=device)
    given = Sampling(temperature, (index[:, None] * 13) % 60, top_p, index[:, None] % 5 == 4)
    sample.check(lambda: (logits, noise, given), tolerance=0.0)
    sample.check(lambda: (logits, noise, given._replace(top_p=0.8 * top_p)), tolerance=0.0)
    sample_and_embed.check(
        lambda: (logits, noise, given, table, torch.stack((index, index), dim=1)[:, 1]), tolerance=0.0
    )
    seen, banned = logits > 1, logits < -1
    mask_logits.check(lambda: (logits, seen, 1.05 * top_p, banned), tolerance=1e-6)
