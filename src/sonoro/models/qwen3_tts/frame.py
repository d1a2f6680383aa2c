"""One frame for a batch of slots: talker, codebook 0, code predictor, feedback. The state it runs on is in `state.py`.

A step redirects rows that are done to the scratch row, which is itself always done at length 0: so they are left as
they are, without a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sonoro.ops.linear import norm_linear
from sonoro.ops.norm import rms_norm
from sonoro.ops.sample import gumbel_noise
from sonoro.runtime.sampling import SamplingRow

from . import sampling
from .backbone import Talker
from .sampling import draw_row, mask_first
from .state import FrameState

__all__ = ["check_kernels", "frame", "parts"]


def frame(talker: Talker, state: FrameState, slots: Tensor, record: list[Tensor] | None = None) -> None:
    """One frame for each of `slots` [B] int64, as `SpeechModel.frame` promises. Capturable; no sync.

    `record` is given the logits of this step in order of decision: [B, V] of the talker, then of each predictor pass.
    """
    assert not torch.is_grad_enabled()
    was_done = state.done[slots]
    rows = slots.masked_fill(was_done, state.scratch)
    length = state.length[rows]
    hidden, logits = _step_talker(talker, state, rows, length)
    draw = _Draws.of(talker, state, rows, length)
    first = draw.first(logits)
    is_end = first == state.is_end.shape[0] - 1
    first = first.masked_fill(is_end, 0)
    books = [first]
    for book, depth_logits in enumerate(_depth_logits(talker, state, rows, hidden, books), start=1):
        books.append(draw.rest(book, depth_logits))
        if record is not None:
            record.append(depth_logits)
    if record is not None:
        record.insert(len(record) - len(books) + 1, logits)
    codes = torch.stack(books, dim=1)
    stopped = was_done | is_end
    # A row that ends here is sent to the scratch row as well: its last decision leaves nothing behind but `done`.
    kept = rows.masked_fill(stopped, state.scratch)
    made = (length + 1).masked_fill(stopped, 0)
    state.frames[kept, length] = codes
    state.seen[kept, first] = ~stopped
    state.pending[kept] = talker.embed_frames(codes)
    state.position[kept] = (state.position[rows] + 1).masked_fill(stopped, 0)
    state.length[kept] = made
    state.done[rows] = stopped | (made >= draw.first_row.max_frames)


def check_kernels(talker: Talker, state: FrameState, rows: int) -> None:
    """Run each fused kernel of a frame of `rows` rows once against its reference. Synchronises; `state` stays."""
    talker.model.check_kernels(rows, state.cache.page_positions)
    talker.code_predictor.model.check_kernels(rows, state.loop.page_positions)
    decidable, codes = state.is_end.shape[0], talker.config.code_predictor_config.vocab_size
    sampling.check_kernels(rows, decidable, state.done.device)
    sampling.check_kernels(rows, codes, state.done.device)


def parts(talker: Talker, state: FrameState) -> dict[str, Callable[[Tensor], object]]:
    """The pieces of a frame a profile times: `backbone`, `depth` without its draws, and `sample`, all draws of a frame.

    Each takes `slots` [B] int64, may be captured, and leaves the rows where they are.
    """
    codes = torch.zeros(state.scratch + 1, dtype=torch.int64, device=state.done.device)

    def backbone(slots: Tensor) -> Tensor:
        return _step_talker(talker, state, slots, state.length[slots])[1]

    def depth(slots: Tensor) -> list[Tensor]:
        books, outputs = [codes[slots]], []
        for logits in _depth_logits(talker, state, slots, state.pending[slots], books):
            outputs.append(logits)
            books.append(codes[slots])
        return outputs

    def sample(slots: Tensor) -> list[Tensor]:
        length = state.length[slots]
        first = talker.codec_head(state.pending[slots])
        rest = first[:, : talker.config.code_predictor_config.vocab_size].contiguous()
        draw = _Draws.of(talker, state, slots, length)
        return [draw.first(first), *(draw.rest(book, rest) for book in range(1, talker.codebooks))]

    return {"backbone": backbone, "depth": depth, "sample": sample}


class _Draws(NamedTuple):
    """The draws of one step: parameters of its rows, noise [B, K, V], and what codebook 0 must not be."""

    first_row: SamplingRow
    rest_row: SamplingRow
    noise: Tensor
    seen: Tensor
    length: Tensor
    state: FrameState

    @classmethod
    def of(cls, talker: Talker, state: FrameState, rows: Tensor, length: Tensor) -> _Draws:
        first, rest = state.first.read(rows), state.rest.read(rows)
        ids = max(state.is_end.shape[0], talker.config.code_predictor_config.vocab_size)
        noise = gumbel_noise(first.seed, first.segment, length, talker.codebooks, ids)
        return cls(first, rest, noise, state.seen[rows], length, state)

    def first(self, logits: Tensor) -> Tensor:
        """Codebook 0 [B] of the talker's `logits` [B, V]; the last decidable id is the end of speech."""
        decidable, state = self.seen.shape[1], self.state
        scores = mask_first(
            logits[:, :decidable],
            self.first_row,
            self.seen,
            self.length,
            suppressed=state.suppressed,
            is_end=state.is_end,
        )
        return draw_row(scores, self.noise[:, 0, :decidable], self.first_row)

    def rest(self, book: int, logits: Tensor) -> Tensor:
        """Codebook `book` [B] of the predictor's `logits` [B, V]."""
        return draw_row(logits, self.noise[:, book, : logits.shape[1]], self.rest_row)


def _step_talker(talker: Talker, state: FrameState, rows: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden rows [B, H] and logits [B, V] of the pending inputs, with their text added from the second frame on."""
    position = state.position[rows]
    text = talker.embed_text(state.text_ids[rows, (length - 1).clamp(0, state.text_ids.shape[1] - 1)])
    inputs = state.pending[rows] + text.masked_fill((length == 0)[:, None], 0.0)
    outputs = talker.model.step(inputs, state.rotary, state.cache, rows, position)
    hidden = rms_norm(outputs, talker.model.norm.weight, talker.model.norm.eps)
    return hidden, talker.codec_head(hidden)


def _depth_logits(
    talker: Talker, state: FrameState, rows: Tensor, hidden: Tensor, books: list[Tensor]
) -> Iterator[Tensor]:
    """Logits [B, V] of codebooks 1 to K - 1 in turn: a pass of the predictor each, after the one over `hidden` [B, H].

    `books` holds codebook 0 [B]; whoever asks for the next logits has appended the codes drawn from the last.
    """
    predictor, norm = talker.code_predictor, talker.code_predictor.model.norm
    positions = torch.arange(talker.codebooks, device=rows.device)[:, None].repeat(1, rows.shape[0])
    inputs = predictor.small_to_mtp_projection(hidden)
    for book, position in enumerate(positions):
        if book:
            inputs = predictor.embed(book - 1, books[-1])
        outputs = predictor.model.step(inputs, state.loop_rotary, state.loop, rows, position)
        if book:
            yield norm_linear(outputs, norm.weight, norm.eps, predictor.lm_head[book - 1].weight)
