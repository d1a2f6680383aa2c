"""State by slot of a model that steps a backbone once a frame, with or without a depth stack; staging and prefill.

The last slot is scratch; a free slot is `done`, its pages are the scratch page. Prompts are staged in two copies: what
their slots need, a row each, and their tokens as ids, packed back to back. `admit_staged` and `fill_backbone` read only
that, so they depend on nothing but the indices of slots and of staged tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonoro.core.types import OptionValue, SpeechRequest
from sonoro.models.base import Capacity, Pages, Prompt, Voice
from sonoro.models.words import MOST_COLUMNS
from sonoro.nn.kvcache import PagedKVCache
from sonoro.nn.transformer import DecoderConfig, DecoderStack, PackedTokens, Rotary
from sonoro.nn.watch import HeadWatch
from sonoro.runtime.ring import overwrite, upload
from sonoro.runtime.sampling import CLEARED, SamplingControls, SamplingState, pack
from sonoro.words.heads import WordHeads
from sonoro.words.tracking import Pointing

__all__ = [
    "BackboneState",
    "DepthState",
    "Ids",
    "ReadsText",
    "StagedPrompts",
    "admit_staged",
    "allocate_backbone",
    "allocate_depth",
    "append_frames",
    "clear_slots",
    "depth_passes",
    "fill_backbone",
    "run_prompts",
    "stage_prompts",
    "staged_tokens",
    "watch_text",
]

Ids = npt.NDArray[np.int64]

State = TypeVar("State", bound="BackboneState")

_LOOP_PAGE = 16
_TOKEN_COLUMNS = 4

_EMBEDDED_AT_ONCE = 256
"""Tokens: what is summed of one takes up to 16 times what is kept of it, 134 MB for 2,048 of the 1.7B."""


@dataclass(frozen=True)
class StagedPrompts:
    """What is waiting for `admit_staged` and `fill_backbone`: by prompt, not by slot.

    `slots` [N+1, W] int64, one for each staged prompt: position, page table, a row of each sampler, what the model
    added; the last is that of a slot which is free. `tokens` [M+1, 4 + V] int64, one for each prompt token, the last
    scratch: slot, position, where the prompt begins in the pack, the slot whose pending input this row is (scratch for
    all but a prompt's last token), V ids of the model's own.
    """

    slots: Tensor
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class BackboneState:
    """State by slot, [N+1, ...] each, and tables shared by all. Mutated in place by the functions of this file and the
    model's own.

    `pending` [H] is the backbone's next input, or all that is known of it, at `position`. Of `cache`, which may be that
    of several stacks, one behind the other, only positions before `position` count. `samplers` are the ways in which a
    frame is drawn. `watch`, if there is one, holds what some heads of the backbone look at.
    """

    done: Tensor
    length: Tensor
    frames: Tensor
    pending: Tensor
    position: Tensor
    staged: StagedPrompts
    samplers: tuple[SamplingState, ...]
    cache: PagedKVCache
    rotary: Rotary
    is_prefill_fused: bool
    watch: HeadWatch | None = None

    @property
    def scratch(self) -> int:
        """The index of the scratch slot."""
        return self.done.shape[0] - 1

    @property
    def page_table(self) -> Tensor:
        """That of `cache`."""
        return self.cache.page_table


@dataclass(frozen=True, kw_only=True)
class DepthState(BackboneState):
    """Those of a model whose frames are completed by a depth stack.

    `loop` holds its keys and values during one step, `loop_positions` [K, N+1 or more] its positions.
    """

    loop: PagedKVCache
    loop_rotary: Rotary
    loop_positions: Tensor


def allocate_backbone(
    config: DecoderConfig,
    rotary: Rotary,
    capacity: Capacity,
    *,
    frame: Tensor,
    ids: Sequence[int],
    added: Sequence[int] = (),
    samplers: int = 1,
    word_heads: WordHeads | None = None,
) -> BackboneState:
    """Free slots for `capacity.slots` requests. `config` are sizes of a backbone, its layers all that live on pages;
    `rotary` its tables of `capacity.max_positions`, in the dtype and on the device that it has.

    `frame` is an empty one, `ids` are a padding token's, `added` is what the model adds to a slot that is free.
    `word_heads` of the backbone are watched.
    """
    device, dtype, rows = rotary[0].device, rotary[0].dtype, capacity.slots + 1
    zeros = functools.partial(torch.zeros, device=device)
    table = torch.full((rows, capacity.pages_per_slot), capacity.pages, dtype=torch.int32, device=device)
    free = [0, *[capacity.pages] * table.shape[1], *CLEARED * samplers, *added]
    padding = [capacity.slots, 0, 0, capacity.slots, *ids]
    return BackboneState(
        done=torch.ones(rows, dtype=torch.bool, device=device),
        length=zeros(rows, dtype=torch.int64),
        frames=zeros(rows, capacity.max_frames, *frame.shape, dtype=frame.dtype),
        pending=zeros(rows, config.width, dtype=dtype),
        position=zeros(rows, dtype=torch.int64),
        staged=StagedPrompts(
            slots=torch.tensor(free, device=device).repeat(rows, 1),
            tokens=torch.tensor(padding, device=device).repeat(capacity.max_tokens + 1, 1),
        ),
        samplers=tuple(SamplingState(capacity.slots, device) for _ in range(samplers)),
        cache=PagedKVCache.allocate(config, table, capacity.page_positions, capacity.pages, dtype),
        rotary=rotary,
        is_prefill_fused=capacity.is_prefill_fused,
        watch=_allocate_watch(word_heads, rows, capacity.max_positions, device),
    )


def allocate_depth(
    backbone: DecoderStack,
    depth: DecoderStack,
    capacity: Capacity,
    *,
    codebooks: int,
    **more: Any,
) -> DepthState:
    """As `allocate_backbone`, which takes `more`, in the dtype and on the device of `backbone`, frames being
    `codebooks` codes."""
    weight = backbone.norm.weight
    device, dtype, rows = weight.device, weight.dtype, capacity.slots + 1
    common = allocate_backbone(
        backbone.config,
        backbone.rotary(torch.arange(capacity.max_positions, device=device), dtype),
        capacity,
        frame=torch.zeros(codebooks, dtype=torch.int64),
        **more,
    )
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    loop_page = max(_LOOP_PAGE, 1 << (codebooks - 1).bit_length())
    return DepthState(
        **vars(common),
        loop=PagedKVCache.allocate(depth.config, numbers[:, None], loop_page, rows - 1, dtype),
        loop_rotary=depth.rotary(torch.arange(codebooks, device=device), dtype),
        # An even width: every line starts at 16 bytes, as the kernels that read it were compiled for.
        loop_positions=torch.arange(codebooks, device=device)[:, None].repeat(1, rows + rows % 2),
    )


def clear_slots(state: BackboneState, slots: Sequence[int], *more: tuple[Tensor, int]) -> None:
    """Make `slots` free and empty, and fill theirs of each tensor of `more`. No sync; not capturable."""
    index = upload(slots, torch.int64, state.done.device)
    state.done.index_fill_(0, index, True)
    state.cache.page_table.index_fill_(0, index, state.cache.keys.shape[1] - 1)
    for rows, value in (*((own, 0) for own in (state.length, state.frames, state.pending, state.position)), *more):
        rows.index_fill_(0, index, value)
    for sampler in state.samplers:
        sampler.clear(slots)


def stage_prompts(  # noqa: PLR0917 (all by row, in one order)
    state: BackboneState,
    prompts: Sequence[Prompt],
    slots: Sequence[int],
    pages: Sequence[Pages],
    ids: Sequence[Ids],
    added: Sequence[tuple[Sequence[SamplingControls], Sequence[int] | Ids]],
) -> int:
    """Stage what `slots` need to speak `prompts`, each on its `pages`, for `admit_staged`, and for `fill_backbone` the
    prompts' tokens `ids` [P, V] that are not cached; returns how many. No sync; not capturable.

    `added` are for each the controls of its samplers, and what the model adds to its slot.
    """
    assert state.scratch not in slots
    lengths = [prompt.positions - cached for prompt, (_, cached) in zip(prompts, pages, strict=True)]
    tokens, table = sum(lengths), state.cache.page_table.shape[1]
    assert tokens < state.staged.tokens.shape[0], f"{tokens} prompt rows"
    packed = np.empty((tokens, state.staged.tokens.shape[1]), np.int64)
    rows = np.full((len(slots), state.staged.slots.shape[1]), state.cache.keys.shape[1] - 1)
    start = 0
    for row, prompt, slot, (numbers, cached), length, all_ids, (controls, more) in zip(
        rows, prompts, slots, pages, lengths, ids, added, strict=True
    ):
        _check_room(state, prompt, numbers, cached)
        row[0], row[1 : 1 + len(numbers)] = prompt.positions - 1, numbers
        packed_controls = [number for own in controls for number in pack(own)]
        row[1 + table : 1 + table + len(packed_controls)] = packed_controls
        row[1 + table + len(packed_controls) :] = more
        own = packed[start : start + length]
        own[:, 0], own[:, 1], own[:, 2] = slot, np.arange(cached, prompt.positions), start
        own[:, 3], own[-1, 3], own[:, _TOKEN_COLUMNS:] = state.scratch, slot, all_ids[cached:]
        start += length
    overwrite(state.staged.slots[: len(slots)], torch.from_numpy(rows))
    overwrite(state.staged.tokens[:tokens], torch.from_numpy(packed))
    return tokens


def admit_staged(state: BackboneState, slots: Tensor) -> Tensor:
    """Reset `slots` [B] int64 and give each what was staged for it in order; returns what the model added, [B, A].

    Capturable; no sync.
    """
    is_scratch, table = slots == state.scratch, state.cache.page_table
    staged = torch.where(is_scratch[:, None], state.staged.slots[-1], state.staged.slots[: slots.shape[0]])
    ends = (1, 1 + table.shape[1], 1 + table.shape[1] + len(CLEARED) * len(state.samplers))
    position, pages, controls, added = staged.tensor_split(ends, dim=1)
    for rows in (state.length, state.frames, state.pending):
        rows.index_fill_(0, slots, 0)
    state.position.index_copy_(0, slots, position[:, 0])
    table.index_copy_(0, slots, pages.to(table.dtype))
    for sampler, packed in zip(state.samplers, controls.split(len(CLEARED), dim=1), strict=True):
        sampler.put(slots, packed)
    state.done.index_copy_(0, slots, is_scratch)
    return added


def staged_tokens(state: BackboneState, tokens: Tensor) -> tuple[PackedTokens, Tensor, Tensor]:
    """Where the staged tokens `tokens` [T] int64, from the first on, belong; the slots [T] that each waits in (scratch
    for all but a prompt's last token); and their ids [T, V]. Capturable.
    """
    ids = state.staged.tokens[tokens]
    slots, positions, starts, pending = ids[:, :_TOKEN_COLUMNS].unbind(1)
    # A padding row is a sequence of its own.
    starts = torch.where(slots == state.scratch, torch.arange(tokens.shape[0], device=tokens.device), starts)
    return PackedTokens(slots, positions, starts), pending, ids[:, _TOKEN_COLUMNS:]


def fill_backbone(
    state: BackboneState, tokens: Tensor, backbone: DecoderStack, embed: Callable[[Tensor], Tensor]
) -> None:
    """Run the staged tokens `tokens` [T] int64 from the first on, and leave each prompt's last one pending. Capturable.

    `embed` makes of their ids [T, V] what the backbone is given, [T, H]. The last row is run too, though the first step
    runs it again: what it leaves is overwritten by the same.
    """
    packed, pending, ids = staged_tokens(state, tokens)
    parts = ids.split(_EMBEDDED_AT_ONCE)
    rows = embed(ids) if len(parts) == 1 else torch.cat([embed(part) for part in parts])
    run_prompts(state, backbone, rows, state.rotary, state.cache, packed, is_output_used=False)
    state.pending[pending] = rows


def run_prompts(  # noqa: PLR0917 (what `DecoderStack.prefill` is given)
    state: BackboneState,
    stack: DecoderStack,
    rows: Tensor,
    rotary: Rotary,
    cache: PagedKVCache,
    tokens: PackedTokens,
    *,
    is_output_used: bool = True,
) -> Tensor:
    """`rows` [T, H] of packed prompts through `stack` and its final norm, if the output is used, their keys and values
    kept in `cache`; out of fused operations, unless `state` says otherwise. `rotary` are tables. Capturable."""
    if state.is_prefill_fused:
        rows = stack.prefill(rows, rotary, cache, tokens, is_output_used=is_output_used)
        return stack.norm.fused(rows) if is_output_used else rows
    cos, signed_sin = (table[tokens.positions] for table in rotary)
    out: Tensor = stack(rows[None], (cos, signed_sin), cache.fill(tokens))[0]
    return out


def depth_passes(
    state: DepthState, depth: DecoderStack, rows: Tensor, fed: Sequence[Tensor | None]
) -> Iterator[Tensor]:
    """What `depth` makes of each of its inputs after the first, [B, width] before its final norm, in turn.

    `fed` [B, width] are the inputs: the backbone's hidden row, then what each codebook is embedded as. Whoever asks for
    the next has appended what was drawn from the last. The first two, known together, are one pass.
    """
    hidden, embedded, count = fed[0], fed[1], rows.shape[0]
    assert hidden is not None
    assert embedded is not None
    step = functools.partial(depth.step, rotary=state.loop_rotary, cache=state.loop, slots=rows)
    yield step(torch.cat((hidden, embedded)), positions=state.loop_positions[0, :count])[count:]
    for book, positions in enumerate(state.loop_positions[2:, :count], start=2):
        inputs = fed[book]
        assert inputs is not None
        yield step(inputs, positions=positions)


class _FrameTensors(Protocol):
    """Those of `BackboneState` that a frame is appended to."""

    @property
    def done(self) -> Tensor: ...
    @property
    def length(self) -> Tensor: ...
    @property
    def frames(self) -> Tensor: ...
    @property
    def pending(self) -> Tensor: ...
    @property
    def position(self) -> Tensor: ...


def append_frames(  # noqa: PLR0917 (where the rows stand, and what they are given)
    state: _FrameTensors,
    rows: Tensor,
    length: Tensor,
    position: Tensor,
    made: Tensor,
    pending: Tensor,
    *,
    is_end: Tensor,
    max_frames: Tensor,
) -> Tensor:
    """Append `made`, a frame each [B, ...], to `rows` [B], which stand at `length` and `position` [B].

    `pending` [B, H] are their next inputs; they end at `max_frames` [B], and those that `is_end` [B] end without it.
    Capturable; no sync.

    Returns the rows that go on, [B], scratch for the others: whatever else is kept of a frame belongs there.
    """
    scratch = state.done.shape[0] - 1
    stopped = is_end | (rows == scratch)
    # A slot that ends here is sent to the scratch slot as well: its last decision leaves nothing behind but `done`.
    kept = rows.masked_fill(stopped, scratch)
    count = (length + 1).masked_fill(stopped, 0)
    state.position[kept] = (position + 1).masked_fill(stopped, 0)
    state.frames[kept, length] = made
    state.pending[kept] = pending
    state.length[kept] = count
    state.done[rows] = stopped | (count >= max_frames)
    return kept


def _check_room(state: BackboneState, prompt: Prompt, pages: Sequence[int], cached: int) -> None:
    assert cached < prompt.positions, (cached, prompt.positions)
    assert not cached % state.cache.page_positions, (cached, state.cache.page_positions)
    limit = prompt.controls.max_frames
    positions = prompt.positions - 1 + limit
    assert positions <= state.rotary[0].shape[0], (positions, state.rotary[0].shape[0])
    assert prompt.positions <= len(pages) * state.cache.page_positions, (prompt.positions, len(pages))
    assert limit <= state.frames.shape[1], (limit, state.frames.shape[1])


def _allocate_watch(heads: WordHeads | None, slots: int, max_positions: int, device: torch.device) -> HeadWatch | None:
    """What watches `heads` in `slots` slots, the scratch slot among them; None if there are none."""
    if heads is None or not heads.places:
        return None
    columns = max_positions if heads.candidates else min(max_positions, MOST_COLUMNS)
    return HeadWatch.allocate(heads.places, slots, columns, device, is_whole=bool(heads.candidates))


class ReadsText:
    """`sonoro.models.words.ShowsWords` of a model whose `backbone` is given all of its text first."""

    backbone: DecoderStack
    word_heads = WordHeads()
    text_layouts: Mapping[str, Mapping[str, OptionValue]] = MappingProxyType({"text_first": {}})

    @property
    def attention_heads(self) -> tuple[int, int]:
        return self.backbone.config.layers, self.backbone.config.heads

    def pointing(self, request: SpeechRequest, voice: Voice | None) -> Pointing | None:
        return self.word_heads.text_first

    def text_start(self, prompt: Any) -> int:
        return prompt.text_start

    def watching(self, state: State) -> State:
        rows, positions = state.done.shape[0], state.rotary[0].shape[0]
        return replace(state, watch=_allocate_watch(self.word_heads, rows, positions, state.done.device))

    def attention(self, state: BackboneState) -> Tensor | None:
        return None if state.watch is None else state.watch.attention


def watch_text(state: BackboneState, slots: Sequence[int], spans: Sequence[tuple[int, int]]) -> None:
    """From now on watch for `slots`, which are free, the stretches `spans` (start, count) of their positions, if heads
    are watched. No sync; not capturable."""
    if state.watch is None:
        return
    device, columns = state.done.device, state.watch.attention.shape[2]
    watched = [(0, columns) if state.watch.is_whole else span for span in spans]
    state.watch.spans.index_copy_(0, upload(slots, torch.int64, device), upload(watched, torch.int64, device))
