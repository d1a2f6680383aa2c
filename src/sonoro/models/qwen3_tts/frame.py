"""One frame for a batch of slots: talker, codebook 0, code predictor, feedback. And the state it runs on.

The state is rows by slot; the last row is scratch. A free slot is `done`. A step redirects rows that are done to the
scratch row, which is itself always done at length 0: so they are left as they are, without a branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sonoro.models.base import Capacity
from sonoro.nn.kvcache import KVCache, LoopCache
from sonoro.nn.transformer import Rotary
from sonoro.ops.sample import gumbel_noise, pick
from sonoro.runtime.sampling import SamplingRows

from .backbone import Talker
from .prompt import TalkerPrompt
from .sampling import row_controls, score_first, score_rest

__all__ = ["FrameState", "allocate", "frame", "prefill", "reset"]


@dataclass(frozen=True)
class FrameState:
    """Rows by slot, [N+1, ...] each, and tables shared by all of them. Mutated in place by the functions below.

    `pending` [H] is the talker's next input but for its text, at `position`; `text_ids` are the ids fed from the
    second frame on, padded by the pad id to one more than fits. `seen` [end id + 1] bool marks ids of codebook 0 made
    in this segment. Of `cache` only positions before `position` count.
    """

    done: Tensor
    length: Tensor
    frames: Tensor
    pending: Tensor
    position: Tensor
    text_ids: Tensor
    seen: Tensor
    first: SamplingRows
    rest: SamplingRows
    cache: KVCache
    suppressed: Tensor
    rotary: Rotary
    loop_rotary: tuple[Rotary, ...]
    pad_id: int

    @property
    def scratch(self) -> int:
        """The number of the scratch row."""
        return self.done.shape[0] - 1


def allocate(talker: Talker, capacity: Capacity, pad_id: int) -> FrameState:
    """Free rows for `capacity.slots` requests. `pad_id` is the text id fed once a row's text has ended."""
    device, dtype, config = talker.device, talker.dtype, talker.config
    rows, books, end = capacity.slots + 1, talker.codebooks, config.codec_eos_token_id
    ids = torch.arange(end + 1, device=device)
    inner = talker.code_predictor.model.rotary(torch.arange(books, device=device), dtype)
    # The predictor's first pass takes two rows (positions 0 and 1), each further pass one.
    passes = (slice(0, 2), *(slice(position, position + 1) for position in range(2, books)))
    return FrameState(
        done=torch.ones(rows, dtype=torch.bool, device=device),
        length=torch.zeros(rows, dtype=torch.int64, device=device),
        frames=torch.zeros(rows, capacity.max_frames, books, dtype=torch.int64, device=device),
        pending=torch.zeros(rows, config.hidden_size, dtype=dtype, device=device),
        position=torch.zeros(rows, dtype=torch.int64, device=device),
        text_ids=torch.full((rows, capacity.max_text + 1), pad_id, dtype=torch.int64, device=device),
        seen=torch.zeros(rows, end + 1, dtype=torch.bool, device=device),
        first=SamplingRows(capacity.slots, device),
        rest=SamplingRows(capacity.slots, device),
        cache=KVCache.allocate(talker.model.config, capacity.slots, capacity.max_positions, device=device, dtype=dtype),
        suppressed=(ids >= talker.codes) & (ids != end),
        rotary=talker.model.rotary(torch.arange(capacity.max_positions, device=device), dtype),
        loop_rotary=tuple((inner[0][rows_of], inner[1][rows_of]) for rows_of in passes),
        pad_id=pad_id,
    )


def reset(state: FrameState, slots: Tensor) -> None:
    """Make rows `slots` [B] int64 free and empty. Synchronises; not capturable."""
    numbers = slots.tolist()
    slots = slots.to(state.done.device)
    for rows, value in ((state.done, True), (state.seen, False), (state.text_ids, state.pad_id)):
        rows.index_fill_(0, slots, value)
    for rows in (state.length, state.frames, state.pending, state.position):
        rows.index_fill_(0, slots, 0)
    state.first.clear(numbers)
    state.rest.clear(numbers)


def prefill(talker: Talker, state: FrameState, prompts: Sequence[TalkerPrompt], slots: Tensor) -> None:
    """Reset rows `slots` [B] int64 and run all rows of each prompt but the last, which is left pending.

    Prompts are padded to the longest. Synchronises; not capturable.
    """
    assert not torch.is_grad_enabled()
    reset(state, slots)
    numbers = slots.tolist()
    slots = slots.to(state.done.device)
    cached = [prompt.positions - 1 for prompt in prompts]
    assert state.scratch not in numbers
    controls = [row_controls(prompt.controls) for prompt in prompts]
    state.first.set(numbers, [first for first, _ in controls])
    state.rest.set(numbers, [rest for _, rest in controls])
    rows = torch.zeros(len(prompts), max(cached), talker.config.hidden_size, device=slots.device, dtype=talker.dtype)
    for index, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        assert cached[index] + prompt.controls.max_frames <= state.rotary[0].shape[0]
        assert prompt.controls.max_frames <= state.frames.shape[1]
        assert prompt.text_ids < state.text_ids.shape[1]
        embedded = talker.embed_prompt(prompt)
        rows[index, : cached[index]] = embedded[:-1]
        state.pending[number] = embedded[-1]
        state.text_ids[number, : prompt.text_ids] = prompt.trail.to(slots.device)
    if max(cached):
        rotary = (state.rotary[0][: max(cached)], state.rotary[1][: max(cached)])
        talker.model(rows, rotary, state.cache.fill(slots))
    state.position[slots] = torch.tensor(cached, device=slots.device)
    state.done.index_fill_(0, slots, False)


def frame(talker: Talker, state: FrameState, slots: Tensor, record: list[Tensor] | None = None) -> None:
    """One frame for each of `slots` [B] int64, as `SpeechModel.frame` promises. Capturable; no sync.

    `record` is given the logits of this step in order of decision: [B, V] of the talker, then of each predictor pass.
    """
    assert not torch.is_grad_enabled()
    was_done = state.done[slots]
    rows = slots.masked_fill(was_done, state.scratch)
    length = state.length[rows]
    hidden, logits = _step_talker(talker, state, rows, length)
    decidable = state.seen.shape[1]
    row = state.first.read(rows)
    ids = max(decidable, talker.config.code_predictor_config.vocab_size)
    noise = gumbel_noise(row.seed, row.segment, length, talker.codebooks, ids)
    scores = score_first(
        logits[:, :decidable],
        row,
        state.first.filters,
        seen=state.seen[rows],
        length=length,
        suppressed=state.suppressed,
    )
    first = pick(scores, noise[:, 0, :decidable], row.is_greedy)
    is_end = first == decidable - 1
    books = _complete_frame(talker, state, rows, hidden, first=first.masked_fill(is_end, 0), noise=noise)
    if record is not None:
        record.extend((logits, *books.logits))
    stopped = was_done | is_end
    # A row that ends here is sent to the scratch row as well: its last decision leaves nothing behind but `done`.
    kept = rows.masked_fill(stopped, state.scratch)
    made = (length + 1).masked_fill(stopped, 0)
    state.frames[kept, length] = books.codes
    state.seen[kept, books.codes[:, 0]] = ~stopped
    state.pending[kept] = talker.embed_frames(books.codes)
    state.position[kept] = (state.position[rows] + 1).masked_fill(stopped, 0)
    state.length[kept] = made
    state.done[rows] = stopped | (made >= row.max_frames)


def _step_talker(talker: Talker, state: FrameState, rows: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden rows [B, H] and logits [B, V] of the pending inputs, with their text added from the second frame on."""
    position = state.position[rows]
    text = talker.embed_text(state.text_ids[rows, (length - 1).clamp(0, state.text_ids.shape[1] - 1)])
    inputs = state.pending[rows] + text.masked_fill((length == 0)[:, None], 0.0)
    rotary = (state.rotary[0][position, None], state.rotary[1][position, None])
    hidden = talker.model(inputs[:, None], rotary, state.cache.decode(rows, position))[:, 0]
    return hidden, talker.codec_head(hidden)


class _Books(NamedTuple):
    """Frames [B, K] int64 and the logits [B, V] behind their codes 1 .. K-1."""

    codes: Tensor
    logits: list[Tensor]


def _complete_frame(
    talker: Talker, state: FrameState, rows: Tensor, hidden: Tensor, *, first: Tensor, noise: Tensor
) -> _Books:
    """The frames that begin with `first` [B]: the K - 1 passes of the predictor."""
    predictor, books = talker.code_predictor, talker.codebooks
    loop = LoopCache(predictor.model.config, rows.shape[0], books, device=hidden.device, dtype=hidden.dtype)
    row, filters = state.rest.read(rows), state.rest.filters
    codes, logits = [first], []
    inputs = torch.stack((predictor.small_to_mtp_projection(hidden), predictor.embed(0, first)), dim=1)
    for book, head in enumerate(predictor.lm_head, start=1):
        # The first pass takes two rows, at positions 0 and 1.
        outputs = predictor.model(inputs, state.loop_rotary[book - 1], loop.at(0 if book == 1 else book))
        logits.append(head(outputs[:, -1]))
        scores = score_rest(logits[-1], row, filters)
        codes.append(pick(scores, noise[:, book, : scores.shape[1]], row.is_greedy))
        if book < books - 1:
            inputs = predictor.embed(book, codes[-1])[:, None]
    return _Books(torch.stack(codes, dim=1), logits)
