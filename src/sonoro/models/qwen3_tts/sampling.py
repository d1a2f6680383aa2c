"""The checkpoint's order of logit processors, for codebook 0 and for the others. Follows transformers 4.57.3.

Works on rows of `sonoro.runtime.sampling`; capturable, no sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonoro.models.base import Controls
from sonoro.ops.sample import keep_top_k, keep_top_p, penalize_seen
from sonoro.runtime.sampling import Filters, RowControls, SamplingRow

from .config import MIN_FRAMES

__all__ = ["row_controls", "score_first", "score_rest"]


def row_controls(controls: Controls) -> tuple[RowControls, RowControls]:
    """The parameters of codebook 0 and of the others, of complete `controls` (as `ModelSpec.resolve` leaves them)."""
    sampling, options = controls.sampling, controls.options
    assert sampling.temperature is not None
    assert sampling.top_k is not None
    assert sampling.top_p is not None
    assert sampling.repetition_penalty is not None
    first = RowControls(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=controls.seed,
        segment=controls.segment,
        max_frames=controls.max_frames,
        ignore_eos=controls.ignore_eos,
    )
    rest = RowControls(
        temperature=float(options["subtalker_temperature"]) if options["subtalker_dosample"] else 0.0,
        top_k=int(options["subtalker_top_k"]),
        top_p=float(options["subtalker_top_p"]),
        seed=controls.seed,
        segment=controls.segment,
        max_frames=controls.max_frames,
    )
    return first, rest


def score_first(
    logits: Tensor, row: SamplingRow, filters: Filters, *, seen: Tensor, length: Tensor, suppressed: Tensor
) -> Tensor:
    """What codebook 0 is drawn from, [B, V] float32: `logits` [B, V], whose last column is end of speech, processed.

    `seen` [B, V] bool are the ids this segment has had, `suppressed` [V] bool the other control ids, `length` [B] the
    frames made so far. End of speech is banned for the first frames, and always where `ignore_eos` is set.
    """
    values = penalize_seen(logits.float(), seen, row.repetition_penalty)
    values = values.masked_fill(suppressed, -torch.inf)
    is_endless = row.ignore_eos | (length < MIN_FRAMES)[:, None]
    values[:, -1:].masked_fill_(is_endless, -torch.inf)
    return score_rest(values, row, filters)


def score_rest(logits: Tensor, row: SamplingRow, filters: Filters) -> Tensor:
    """What another codebook is drawn from, [B, V] float32: temperature, top-k, top-p, in this order."""
    values = logits.float() / row.temperature
    if filters.top_k_limit:
        values = keep_top_k(values, row.top_k, filters.top_k_limit)
    if filters.needs_top_p:
        values = keep_top_p(values, row.top_p)
    return values
