"""One frame for a batch of slots: slow AR, codebook 0, fast AR, feedback.

A step redirects rows that are done to the scratch row, which is itself always done at length 0: so they are left as
they are, without a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.models.slots import SlotRows, append_frames, depth_passes
from sonoro.ops.linear import norm_linear
from sonoro.ops.norm import rms_norm
from sonoro.ops.sample import gumbel_noise
from sonoro.runtime.sampling import SamplingRow

from .backbone import DualAR
from .sampling import WINDOW, draw_first, draw_rest

__all__ = ["check_kernels", "frame", "parts"]


def frame(lm: DualAR, state: SlotRows, slots: Tensor, record: list[Tensor] | None = None) -> None:
    """One frame for each of `slots` [B] int64, as `SpeechModel.frame` promises. Capturable; no sync.

    `record` is given the logits of this step in order of decision: [B, V] of the slow AR, then of each fast pass.
    """
    assert not torch.is_grad_enabled()
    rows = slots.masked_fill(state.done[slots], state.scratch)
    length, position, row = state.length[rows], state.position[rows], state.samplers[0].read(rows)
    hidden, logits = _step_slow(lm, state, rows, position)
    decided = [logits]
    noise = _noise(lm, row, length)
    first = draw_first(logits, noise[:, 0], noise[:, -1], row, _recent(state, rows, length))
    codes = [first.masked_fill(first == lm.codes, 0)]
    fed = [hidden, lm.fast.embeddings(codes[0])]
    for book, depth_logits in enumerate(_depth_logits(lm, state, rows, fed), start=1):
        decided.append(depth_logits)
        codes.append(draw_rest(depth_logits, noise[:, book, : lm.codes], row))
        fed.append(lm.fast.embeddings(codes[-1]))
    if record is not None:
        record.extend(decided)
    made = torch.stack(codes, dim=1)
    pending = lm.embed(torch.cat((lm.tokens(first)[:, None], made), dim=1))
    # The first frame cannot be the end: as in the official code it is kept, and fed back as the token it is.
    is_end = (first == lm.codes) & (length > 0)
    append_frames(state, rows, length, position, made, pending, is_end=is_end, max_frames=row.max_frames)


def check_kernels(lm: DualAR, state: SlotRows, rows: int) -> None:
    """Run each fused kernel of a frame of `rows` rows once against its reference. Synchronises; `state` stays."""
    lm.slow.check_kernels(rows, state.cache.page_positions)
    for turns in (1, 2):
        lm.fast.check_kernels(rows, state.loop.page_positions, turns)
    index = torch.arange(rows, device=lm.device)
    # Noise may differ by the rounding of two logarithms.
    gumbel_noise.check(lambda: (index * 7919, index % 3, index, 2, lm.codes + 1), tolerance=1e-5)


def parts(lm: DualAR, state: SlotRows) -> dict[str, Callable[[Tensor], object]]:
    """The pieces of a frame a profile times: `backbone`, `depth` without its draws, and `sample`, all draws of a frame.

    Each takes `slots` [B] int64, may be captured, and leaves the rows where they are.
    """

    def backbone(slots: Tensor) -> Tensor:
        return _step_slow(lm, state, slots, state.position[slots])[1]

    def depth(slots: Tensor) -> list[Tensor]:
        embedded = lm.fast.embeddings(state.length[slots] % lm.codes)
        return list(_depth_logits(lm, state, slots, [state.pending[slots]] + [embedded] * (lm.codebooks - 1)))

    def sample(slots: Tensor) -> list[Tensor]:
        row, length = state.samplers[0].read(slots), state.length[slots]
        logits, noise = F.linear(state.pending[slots], lm.head), _noise(lm, row, length)
        first = draw_first(logits, noise[:, 0], noise[:, -1], row, _recent(state, slots, length))
        return [first, *(draw_rest(logits[:, :-1], noise[:, book, :-1], row) for book in range(1, lm.codebooks))]

    return {"backbone": backbone, "depth": depth, "sample": sample}


def _step_slow(lm: DualAR, state: SlotRows, rows: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden rows [B, H] after the norm, which the fast AR begins with, and logits [B, V], of what is pending."""
    outputs = lm.slow.step(state.pending[rows], state.rotary, state.cache, rows, position)
    hidden = rms_norm(outputs, lm.slow.norm.weight, lm.slow.norm.eps)
    return hidden, F.linear(hidden, lm.head)


def _depth_logits(lm: DualAR, state: SlotRows, rows: Tensor, fed: Sequence[Tensor]) -> Iterator[Tensor]:
    """Logits [B, V] of codebooks 1 to K - 1 in turn, of the inputs `fed` as `depth_passes` takes them."""
    norm = lm.fast.norm
    for outputs in depth_passes(state, lm.fast, rows, fed):
        yield norm_linear(outputs, norm.weight, norm.eps, lm.fast.output.weight)


def _noise(lm: DualAR, row: SamplingRow, length: Tensor) -> Tensor:
    """Gumbel noise [B, K + 1, V] of a frame: a codebook each, the last for codebook 0 drawn again."""
    return gumbel_noise(row.seed, row.segment, length, lm.codebooks + 1, lm.codes + 1)


def _recent(state: SlotRows, rows: Tensor, length: Tensor) -> Tensor:
    """The last codes of codebook 0, [B, WINDOW] int64, -1 where there is none. The first frame's is never counted."""
    at = length[:, None] + torch.arange(-WINDOW, 0, device=rows.device)
    return state.frames[rows[:, None], at.clamp(min=0), 0].masked_fill(at < 1, -1)
