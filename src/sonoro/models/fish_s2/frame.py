"""One frame for a batch of slots: slow AR, codebook 0, fast AR, between the ends of `sonoro.models.ends`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.models.ends import EndRows, begin, finish
from sonoro.models.ends import check_kernels as check_ends
from sonoro.models.slots import SlotRows, depth_passes
from sonoro.ops.linear import norm_linear
from sonoro.ops.norm import rms_norm
from sonoro.ops.nucleus import Again, draw_nucleus
from sonoro.ops.sample import gumbel_noise
from sonoro.runtime.sampling import SamplingRow

from .backbone import DualAR

__all__ = ["check_kernels", "frame", "parts"]

# Codebook 0 avoids to repeat its last codes. The first frame's is never counted.
_WINDOW, _FIRST_COUNTED, _AGAIN_TEMPERATURE, _AGAIN_TOP_P = 10, 1, 1.0, 0.9


def frame(lm: DualAR, state: SlotRows, slots: Tensor, record: list[Tensor] | None = None) -> None:
    """One frame for each of `slots` [B] int64, as `SpeechModel.frame` promises. Capturable; no sync.

    `record` is given the logits of this step in order of decision: [B, V] of the slow AR, then of each fast pass.
    """
    assert not torch.is_grad_enabled()
    ends = EndRows.of(state)
    start = begin(slots, ends)
    row = state.samplers[0].read(start.rows)
    hidden, logits = _step_slow(lm, state, start.rows, start.inputs, start.position)
    decided, draws = [logits], _Draws.of(lm, state, start.rows, start.length, row)
    fed = [hidden, draws.first(logits)]
    for book, depth_logits in enumerate(_depth_logits(lm, state, start.rows, fed), start=1):
        decided.append(depth_logits)
        fed.append(draws.rest(book, depth_logits))
    if record is not None:
        record.extend(decided)
    finish(draws.codes, start, row.max_frames, ends, lm.feedback)


def check_kernels(lm: DualAR, state: SlotRows, rows: int) -> None:
    """Run each fused kernel of a frame of `rows` rows once against its reference. Synchronises; `state` stays."""
    lm.slow.check_kernels(rows, state.cache.page_positions)
    for turns in (1, 2):
        lm.fast.check_kernels(rows, state.loop.page_positions, turns)
    check_ends(rows, EndRows.of(state), lm.feedback)
    index = torch.arange(rows, device=lm.device)
    # Noise may differ by the rounding of two logarithms.
    gumbel_noise.check(lambda: (index * 7919, index % 3, index, 2, lm.codes + 1), tolerance=1e-5)
    noise = gumbel_noise.reference(index, index, index, 2, lm.codes + 1)
    logits = torch.randn(noise[:, 0].shape, device=lm.device, generator=torch.Generator(lm.device).manual_seed(0))
    said = logits.topk(8).indices
    again = Again(noise[:, 1], said, index, index % 8, _AGAIN_TEMPERATURE, _AGAIN_TOP_P, _WINDOW, _FIRST_COUNTED)
    one, column, table = torch.ones_like(logits[:, :1]), index[:, None], lm.fast.embeddings.weight
    parameters = (0.8 * one, 30 * one.long(), 0.8 * one, column % 5 == 4)
    given = (logits.to(table.dtype), noise[:, 0], *parameters, table)
    draw_nucleus.check(lambda: (*given, torch.zeros_like(index)), tolerance=0.0)
    draw_nucleus.check(lambda: (*given, torch.zeros_like(index), column % 3 == 0, again), tolerance=0.0)


def parts(lm: DualAR, state: SlotRows) -> dict[str, Callable[[Tensor], object]]:
    """The pieces of a frame a profile times: `backbone`, `depth` without its draws, and `sample`, all draws of a frame.

    Each takes `slots` [B] int64, may be captured, and leaves the rows where they are.
    """

    def backbone(slots: Tensor) -> Tensor:
        return _step_slow(lm, state, slots, state.pending[slots], state.position[slots])[1]

    def depth(slots: Tensor) -> list[Tensor]:
        embedded = lm.fast.embeddings(state.length[slots] % lm.codes)
        return list(_depth_logits(lm, state, slots, [state.pending[slots]] + [embedded] * (lm.codebooks - 1)))

    def sample(slots: Tensor) -> list[Tensor]:
        draws = _Draws.of(lm, state, slots, state.length[slots], state.samplers[0].read(slots))
        logits = F.linear(state.pending[slots], lm.head)
        draws.first(logits)
        for book in range(1, lm.codebooks):
            draws.rest(book, logits[:, :-1])
        return list(draws.codes.unbind(1))

    return {"backbone": backbone, "depth": depth, "sample": sample}


class _Draws(NamedTuple):
    """The draws of one step into `codes` [B, K]: parameters of its rows, their noise, what codebook 0 must not repeat.

    A draw returns the fast AR's input rows [B, H] for what it drew.
    """

    codes: Tensor
    row: SamplingRow
    noise: Tensor
    again: Again
    table: Tensor

    @classmethod
    def of(cls, lm: DualAR, state: SlotRows, rows: Tensor, length: Tensor, row: SamplingRow) -> _Draws:
        codes, noise = rows.new_empty(rows.shape[0], lm.codebooks), _noise(lm, row, length)
        limits = (_AGAIN_TEMPERATURE, _AGAIN_TOP_P, _WINDOW, _FIRST_COUNTED)
        again = Again(noise[:, -1], state.frames[:, :, 0], rows, length, *limits)
        return cls(codes, row, noise, again, lm.fast.embeddings.weight)

    def first(self, logits: Tensor) -> Tensor:
        """Codebook 0 of the slow AR's `logits` [B, V], whose last column is end of speech: it goes on as code 0."""
        return self._draw(0, logits, self.row.ignore_eos, self.again)

    def rest(self, book: int, logits: Tensor) -> Tensor:
        """Codebook `book` of the fast AR's `logits` [B, V]."""
        return self._draw(book, logits)

    def _draw(self, book: int, logits: Tensor, *more: Tensor | Again) -> Tensor:
        row = self.row
        noise, ids = self.noise[:, book, : logits.shape[1]], self.codes[:, book]
        given = (logits, noise, row.temperature, row.top_k, row.top_p, row.is_greedy, self.table, ids)
        embedded: Tensor = draw_nucleus(*given, *more)
        return embedded


def _step_slow(lm: DualAR, state: SlotRows, rows: Tensor, inputs: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden rows [B, H] after the norm, which the fast AR begins with, and logits [B, V], of `inputs` [B, H]."""
    outputs, norm = lm.slow.step(inputs, state.rotary, state.cache, rows, position), lm.slow.norm
    return rms_norm(outputs, norm.weight, norm.eps), norm_linear(outputs, norm.weight, norm.eps, lm.head)


def _depth_logits(lm: DualAR, state: SlotRows, rows: Tensor, fed: Sequence[Tensor]) -> Iterator[Tensor]:
    """Logits [B, V] of codebooks 1 to K - 1 in turn, of the inputs `fed` as `depth_passes` takes them."""
    norm = lm.fast.norm
    for outputs in depth_passes(state, lm.fast, rows, fed):
        yield norm_linear(outputs, norm.weight, norm.eps, lm.fast.output.weight)


def _noise(lm: DualAR, row: SamplingRow, length: Tensor) -> Tensor:
    """Gumbel noise [B, K + 1, V] of a frame: a codebook each, the last for codebook 0 drawn again."""
    return gumbel_noise(row.seed, row.segment, length, lm.codebooks + 1, lm.codes + 1)
