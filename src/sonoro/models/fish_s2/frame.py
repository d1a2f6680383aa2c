"""One frame for a batch of slots: slow AR, codebook 0, fast AR, between the two kernels of `sonoro.models.step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sonoro.models.slots import DepthState, depth_passes
from sonoro.models.step import StepState, begin_step, finish_step
from sonoro.models.step import check_kernels as check_step
from sonoro.ops.repetition_aware import Resample, sample_repetition_aware
from sonoro.ops.repetition_aware import check_kernels as check_draws
from sonoro.ops.sample import gumbel_noise
from sonoro.runtime.sampling import BatchSampling

from .backbone import DualAR

__all__ = ["check_kernels", "frame", "parts"]

_WINDOW = 10
"""How many codes before it codebook 0 avoids to repeat. The first frame's is never counted."""


def frame(lm: DualAR, state: DepthState, slots: Tensor, record: list[Tensor] | None = None) -> None:
    """One frame for each of `slots` [B] int64, as `SpeechModel.frame` promises. Capturable; no sync.

    `record` is given the logits of this step in order of decision: [B, V] of the slow AR, then of each fast pass.
    """
    assert not torch.is_grad_enabled()
    stepped = StepState.of(state)
    start = begin_step(slots, stepped)
    row = state.samplers[0].read(start.slots)
    hidden, logits = _step_slow(lm, state, start.slots, start.inputs, start.position)
    codes, draw = _draws(lm, state, start.slots, start.length, row)
    decided, fed = [logits], [hidden, draw(0, logits)]
    for book, depth_logits in enumerate(_depth_logits(lm, state, start.slots, fed), start=1):
        decided.append(depth_logits)
        fed.append(draw(book, depth_logits))
    if record is not None:
        record.extend(decided)
    finish_step(codes, start, row.max_frames, stepped, lm.feedback)


def check_kernels(lm: DualAR, state: DepthState, rows: int) -> None:
    """Run each fused kernel of a frame of `rows` rows once against its reference. Synchronises; `state` stays."""
    lm.slow.check_kernels(rows, state.cache.page_table, state.cache.page_positions)
    for turns in (1, 2):
        lm.fast.check_kernels(rows, state.loop.page_table, state.loop.page_positions, turns)
    check_step(rows, StepState.of(state), lm.feedback)
    check_draws(rows, lm.codes + 1, lm.fast.embeddings.weight, _WINDOW)


def parts(lm: DualAR, state: DepthState) -> dict[str, Callable[[Tensor], object]]:
    """The pieces of a frame a profile times: `backbone`, `depth` without its draws, and `sample`, all draws of a frame.

    Each takes `slots` [B] int64, may be captured, and leaves the rows where they are.
    """

    def backbone(slots: Tensor) -> Tensor:
        return _step_slow(lm, state, slots, state.pending[slots], state.position[slots])[1]

    def depth(slots: Tensor) -> list[Tensor]:
        embedded = lm.fast.embeddings(state.length[slots] % lm.codes)
        return list(_depth_logits(lm, state, slots, [state.pending[slots]] + [embedded] * (lm.codebooks - 1)))

    def sample(slots: Tensor) -> list[Tensor]:
        codes, draw = _draws(lm, state, slots, state.length[slots], state.samplers[0].read(slots))
        logits = lm.head(state.pending[slots])
        for book in range(lm.codebooks):
            draw(book, logits[:, : lm.codes + (book == 0)])
        return list(codes.unbind(1))

    return {"backbone": backbone, "depth": depth, "sample": sample}


def _draws(
    lm: DualAR, state: DepthState, rows: Tensor, length: Tensor, row: BatchSampling
) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
    """Codes [B, K] of a step, and what draws them, by codebook and its logits [B, V]: the fast AR's input rows [B, H].

    The last id of codebook 0 is end of speech: it goes on as code 0.
    """
    codes, noise = rows.new_empty(rows.shape[0], lm.codebooks), _noise(lm, row, length)
    again = Resample(
        noise[:, -1], state.frames[:, :, 0], rows, length, temperature=1.0, top_p=0.9, window=_WINDOW, first=1
    )

    def draw(book: int, logits: Tensor) -> Tensor:
        given = (logits, noise[:, book, : logits.shape[1]], row.sampling)
        more = () if book else (row.ignore_eos, again)
        embedded: Tensor = sample_repetition_aware(*given, lm.fast.embeddings.weight, codes[:, book], *more)
        return embedded

    return codes, draw


def _step_slow(lm: DualAR, state: DepthState, rows: Tensor, inputs: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden rows [B, H] after the norm, which the fast AR begins with, and logits [B, V], of `inputs` [B, H]."""
    outputs, norm = lm.slow.step(inputs, state.rotary, state.cache, rows, position), lm.slow.norm
    return norm.fused(outputs), lm.head.after_norm(outputs, norm)


def _depth_logits(lm: DualAR, state: DepthState, rows: Tensor, fed: Sequence[Tensor]) -> Iterator[Tensor]:
    """Logits [B, V] of codebooks 1 to K - 1 in turn, of the inputs `fed` as `depth_passes` takes them."""
    for outputs in depth_passes(state, lm.fast, rows, fed):
        yield lm.fast.output.after_norm(outputs, lm.fast.norm)


def _noise(lm: DualAR, row: BatchSampling, length: Tensor) -> Tensor:
    """Gumbel noise [B, K + 1, V] of a frame: a codebook each, the last for codebook 0 drawn again."""
    return gumbel_noise(row.seed, row.segment, length, lm.codebooks + 1, lm.codes + 1)
