"""Per-slot state of a model that steps a backbone once a frame, with or without a depth model; staging and prefill.

The last slot is scratch; a free slot is `done` and has the scratch page throughout. Prompts are staged by two copies:
one row of slot state per prompt, and the ids of all prompt tokens, packed. `admit_staged` and `fill_backbone` read only
the staging area, so their graphs depend on the indices of slots and staged tokens alone."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sonoro.core.options import OptionValue
from sonoro.core.types import SpeechRequest
from sonoro.models.base import Capacity, Pages, Prompt, Voice
from sonoro.models.shared.prompts import Ids, StoredPrefix, TextSpanned
from sonoro.nn.kvcache import PackedPrompts, PackedTokens, PagedKVCache
from sonoro.nn.transformer import DecoderConfig, DecoderStack, Rotary
from sonoro.nn.watch import HeadWatch
from sonoro.ops.clear import clear_rows
from sonoro.runtime.ring import overwrite, upload
from sonoro.runtime.sampling import CLEARED, SamplingState
from sonoro.words.heads import MOST_COLUMNS, WordHeads
from sonoro.words.tracking import Pointing

State = TypeVar("State", bound="BackboneState")

_LOOP_PAGE = 16
_TOKEN_COLUMNS, _PAGE_COLUMN = 4, 3

_EMBEDDED_AT_ONCE = 256
"""Tokens embedded at once: a sum of embeddings needs up to 16 times the memory of its result (Qwen3-TTS 1.7B: 134 MB
for 2,048 tokens)."""


@dataclass(frozen=True)
class StagedPrompts:
    """The staging area that `admit_staged` and `fill_backbone` read; indexed by staged prompt, not by slot.

    `slots` [N+1, W] int64, a row per prompt: position, start and count of its text, page table, controls of each
    sampler, additions of the model; the last row is that of a free slot. `tokens` [M+1, 4 + V] int64, a row per prompt
    token, the last scratch: slot, position, packed index where its prompt starts, the slot whose pending input it is
    (scratch for all but a prompt's last token), V ids of the model."""

    slots: Tensor
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class BackboneState:
    """State by slot, [N+1, ...] each, and tables shared by all slots. Mutated in place by the functions of this file
    and of the model.

    `pending` [N+1, H] is the backbone's next input at `position`, before pending text is added. `cache`, which may hold
    the layers of several stacks, is valid before `position`. `samplers` has an entry for each set of sampling controls
    of a frame. `spans` [N+1, 2] int64 are start and count of the text's positions; `watch`, if not None, records the
    attention of some heads of the backbone to them."""

    done: Tensor
    length: Tensor
    frames: Tensor
    pending: Tensor
    position: Tensor
    spans: Tensor
    staged: StagedPrompts
    samplers: tuple[SamplingState, ...]
    cache: PagedKVCache
    rotary: Rotary
    is_prefill_fused: bool
    watch: HeadWatch | None = None

    @property
    def scratch(self) -> int:
        """Index of the scratch slot."""
        return self.done.shape[0] - 1

    @property
    def page_table(self) -> Tensor:
        """The page table of `cache`."""
        return self.cache.page_table

    @property
    def zeroed(self) -> tuple[Tensor, ...]:
        """The tensors whose rows are zeros in an admitted slot."""
        return self.length, self.frames, self.pending


@dataclass(frozen=True, kw_only=True)
class DepthState(BackboneState):
    """The state of a model with a depth model: `loop` holds its keys and values during one frame, `loop_positions`
    [K, N+1 or more] int64 its positions."""

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
    """State of `capacity.slots` free slots. `config`: sizes of the backbone, with all layers that have paged KV;
    `rotary`: its tables for `capacity.max_positions`, whose dtype and device the state takes.

    `frame` is an empty frame, `ids` those of a padding token, `added` the model's additions to a free slot,
    `word_heads` the heads to watch."""
    device, dtype, rows = rotary[0].device, rotary[0].dtype, capacity.slots + 1
    zeros = functools.partial(torch.zeros, device=device)
    table = torch.full((rows, capacity.pages_per_slot), capacity.pages, dtype=torch.int32, device=device)
    free = [0, 0, 0, *[capacity.pages] * table.shape[1], *CLEARED * samplers, *added]
    padding, spans = [capacity.slots, 0, 0, capacity.slots, *ids], zeros(rows, 2, dtype=torch.int64)
    return BackboneState(
        done=torch.ones(rows, dtype=torch.bool, device=device),
        length=zeros(rows, dtype=torch.int64),
        frames=zeros(rows, capacity.max_frames, *frame.shape, dtype=frame.dtype),
        pending=zeros(rows, config.width, dtype=dtype),
        position=zeros(rows, dtype=torch.int64),
        spans=spans,
        staged=StagedPrompts(
            slots=torch.tensor(free, device=device).repeat(rows, 1),
            tokens=torch.tensor(padding, device=device).repeat(capacity.max_tokens + 1, 1),
        ),
        samplers=tuple(SamplingState(capacity.slots, device) for _ in range(samplers)),
        cache=config.kv_cache(table, capacity.page_positions, capacity.pages, dtype),
        rotary=rotary,
        is_prefill_fused=capacity.is_prefill_fused,
        watch=_allocate_watch(word_heads, spans, capacity.max_positions),
    )


def allocate_depth(
    backbone: DecoderStack,
    depth: DecoderStack,
    capacity: Capacity,
    *,
    codebooks: int,
    ids: Sequence[int],
    added: Sequence[int] = (),
    samplers: int = 1,
    word_heads: WordHeads | None = None,
) -> DepthState:
    """As `allocate_backbone`, plus the KV cache of `depth`; frames are `codebooks` codes, dtype and device those of
    `backbone`."""
    weight = backbone.norm.weight
    device, dtype, rows = weight.device, weight.dtype, capacity.slots + 1
    common = allocate_backbone(
        backbone.config,
        backbone.config.rotary(torch.arange(capacity.max_positions, device=device), dtype),
        capacity,
        frame=torch.zeros(codebooks, dtype=torch.int64),
        ids=ids,
        added=added,
        samplers=samplers,
        word_heads=word_heads,
    )
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    loop_page = max(_LOOP_PAGE, 1 << (codebooks - 1).bit_length())
    return DepthState(
        **vars(common),
        loop=depth.config.kv_cache(numbers[:, None], loop_page, rows - 1, dtype),
        loop_rotary=depth.config.rotary(torch.arange(codebooks, device=device), dtype),
        # An even width, so that rows are aligned to 16 bytes, as the kernels that read them are specialised.
        loop_positions=torch.arange(codebooks, device=device)[:, None].repeat(1, rows + rows % 2),
    )


def clear_slots(state: BackboneState, slots: Sequence[int], *more: tuple[Tensor, int]) -> None:
    """Free and clear `slots`; for each (tensor, value) of `more` set their rows to the value. No sync; not
    capturable."""
    index = upload(slots, torch.int64, state.done.device)
    state.done.index_fill_(0, index, True)
    state.cache.page_table.index_fill_(0, index, state.cache.keys.shape[1] - 1)
    clear_rows(index, state.zeroed)
    for rows, value in ((state.position, 0), (state.spans, 0), *more):
        rows.index_fill_(0, index, value)
    for sampler in state.samplers:
        sampler.clear(slots)


def stage_prompts(  # noqa: PLR0917 (all by row, in one order)
    state: BackboneState,
    prompts: Sequence[TextSpanned],
    slots: Sequence[int],
    pages: Sequence[Pages],
    ids: Sequence[Ids],
    added: Sequence[Sequence[int] | Ids],
    stored: Sequence[StoredPrefix | None] | None = None,
) -> int:
    """Stage `prompts` with their `slots` and `pages` for `admit_staged`, and their uncached tokens for `fill_backbone`;
    returns the number of these. No sync; not capturable.

    Per prompt: `ids` [P, V] of all of its tokens, `added`, the packed controls of each sampler, then the model's
    additions, and what is `stored`, which is written to the pages that are not cached."""
    assert state.scratch not in slots
    prefixes = stored or [None] * len(pages)
    known = [_write_stored(state.cache, *pair) for pair in zip(pages, prefixes, strict=True)]
    lengths = [prompt.positions - count for prompt, count in zip(prompts, known, strict=True)]
    tokens, table = sum(lengths), state.cache.page_table.shape[1]
    assert tokens < state.staged.tokens.shape[0], f"{tokens} prompt rows"
    packed = np.empty((tokens, state.staged.tokens.shape[1]), np.int64)
    rows = np.full((len(slots), state.staged.slots.shape[1]), state.cache.keys.shape[1] - 1)
    start = 0
    for row, prompt, slot, own_pages, count, length, all_ids, more in zip(
        rows, prompts, slots, pages, known, lengths, ids, added, strict=True
    ):
        numbers = own_pages.numbers
        _check_room(state, prompt, *own_pages)
        row[0], row[1:_PAGE_COLUMN] = prompt.positions - 1, _watched(state, prompt)
        row[_PAGE_COLUMN : _PAGE_COLUMN + len(numbers)] = numbers
        row[_PAGE_COLUMN + table :] = more
        own = packed[start : start + length]
        own[:, 0], own[:, 1], own[:, 2] = slot, np.arange(count, prompt.positions), start
        own[:, 3], own[-1, 3], own[:, _TOKEN_COLUMNS:] = state.scratch, slot, all_ids[count:]
        start += length
    overwrite(state.staged.slots[: len(slots)], torch.from_numpy(rows))
    overwrite(state.staged.tokens[:tokens], torch.from_numpy(packed))
    return tokens


def _write_stored(cache: PagedKVCache, pages: Pages, stored: StoredPrefix | None) -> int:
    """Write the positions of `stored` that are not cached to `pages`; returns how many positions these hold then."""
    start = pages.cached
    if stored is None or start >= stored.positions:
        return start
    numbers, offset = np.divmod(np.arange(start, stored.positions), cache.page_positions)
    # Places are computed on the host: five small kernels fewer at each admission.
    rows = np.asarray(pages.numbers)[numbers] * cache.page_positions + offset
    at = upload(rows.tolist(), torch.int64, cache.keys.device)
    for kept, given in ((cache.keys, stored.keys), (cache.values, stored.values)):
        kept.flatten(1, 2).index_copy_(1, at, given[:, start:].to(kept))
    return stored.positions


def admit_staged(state: BackboneState, slots: Tensor) -> Tensor:
    """Reset `slots` [B] int64 and write the staged state to them, in order; returns the model's additions, [B, A].
    Capturable; no sync."""
    is_scratch, table = slots == state.scratch, state.cache.page_table
    staged = torch.where(is_scratch[:, None], state.staged.slots[-1], state.staged.slots[: slots.shape[0]])
    end = _PAGE_COLUMN + table.shape[1]
    ends = (1, _PAGE_COLUMN, end, end + len(CLEARED) * len(state.samplers))
    position, spans, pages, controls, added = staged.tensor_split(ends, dim=1)
    clear_rows(slots, state.zeroed)
    state.position.index_copy_(0, slots, position[:, 0])
    state.spans.index_copy_(0, slots, spans)
    table.index_copy_(0, slots, pages.to(table.dtype))
    for sampler, packed in zip(state.samplers, controls.split(len(CLEARED), dim=1), strict=True):
        sampler.put(slots, packed)
    state.done.index_copy_(0, slots, is_scratch)
    return added


def check_admission(state: BackboneState) -> None:
    """Compare the kernel of `admit_staged` with its reference, on two rows of ones; disable it if they disagree.
    Synchronises; `state` is unchanged."""
    slots = torch.ones(2, dtype=torch.int64, device=state.done.device)
    clear_rows.check(lambda: (slots, [torch.ones_like(rows[:2]) for rows in state.zeroed]), tolerance=0.0)


def staged_tokens(state: BackboneState, tokens: Tensor) -> tuple[PackedTokens, Tensor, Tensor]:
    """Look up the staged tokens with indices `tokens` [T] int64, from 0 on: their place in packed prompts, the slot [T]
    whose pending input each is (scratch for all but a prompt's last token), and their ids [T, V]. Capturable."""
    ids = state.staged.tokens[tokens]
    slots, positions, starts, pending = ids[:, :_TOKEN_COLUMNS].unbind(1)
    # Each padding token is a sequence of its own.
    starts = torch.where(slots == state.scratch, torch.arange(tokens.shape[0], device=tokens.device), starts)
    return PackedTokens(slots, positions, starts), pending, ids[:, _TOKEN_COLUMNS:]


def prompt_inputs(state: BackboneState, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> PackedPrompts:
    """The inputs of the staged tokens with indices `tokens` [T] int64, from 0 on; each prompt's last one becomes
    pending. `embed` maps their ids [T, V] to the backbone's inputs [T, H]. Capturable."""
    packed, pending, ids = staged_tokens(state, tokens)
    parts = ids.split(_EMBEDDED_AT_ONCE)
    rows = embed(ids) if len(parts) == 1 else torch.cat([embed(part) for part in parts])
    state.pending[pending] = rows
    return PackedPrompts(rows, packed)


def fill_backbone(
    state: BackboneState,
    tokens: Tensor,
    backbone: DecoderStack,
    embed: Callable[[Tensor], Tensor],
    run: Callable[[Tensor, PackedTokens], None] | None = None,
) -> None:
    """Prefill `prompt_inputs`. Capturable.

    The last token of a prompt is run here and again by the first step, which overwrites its keys and values with the
    same. `run`, if given, runs the inputs in place of `backbone`."""
    rows, packed, _ = prompt_inputs(state, tokens, embed)
    if run is None:
        run_prompts(state, backbone, rows, state.rotary, state.cache, packed, is_output_used=False)
    else:
        run(rows, packed)


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
    """Run `rows` [T, H] of packed prompts through `stack` and, if the output is used, its final norm; writes keys and
    values to `cache`. `rotary`: tables by position. Fused kernels if `state.is_prefill_fused`. Capturable."""
    if state.is_prefill_fused:
        rows = stack.prefill(rows, rotary, cache, tokens, is_output_used=is_output_used)
        return stack.norm.fused(rows) if is_output_used else rows
    cos, signed_sin = (table[tokens.positions] for table in rotary)
    out: Tensor = stack(rows[None], (cos, signed_sin), cache.fill(tokens))[0]
    return out


def depth_passes(
    state: DepthState, depth: DecoderStack, rows: Tensor, fed: Sequence[Tensor | None]
) -> Iterator[Tensor]:
    """Run the depth model over one frame: yields its output [B, width], before the final norm, for each input but the
    first. `rows` [B] are indices into its KV cache.

    `fed` are the inputs, [B, width] each: the backbone's hidden state, then the embedding of each codebook's code. The
    caller appends the next one before it asks for the next output. The first two are known together: one pass."""
    hidden, embedded, count = fed[0], fed[1], rows.shape[0]
    assert hidden is not None
    assert embedded is not None
    step = functools.partial(depth.step, rotary=state.loop_rotary, cache=state.loop, slots=rows)
    yield step(torch.cat((hidden, embedded)), positions=state.loop_positions[0, :count])[count:]
    for book, positions in enumerate(state.loop_positions[2:, :count], start=2):
        inputs = fed[book]
        assert inputs is not None
        yield step(inputs, positions=positions)


def _check_room(state: BackboneState, prompt: Prompt, pages: Sequence[int], cached: int) -> None:
    assert cached < prompt.positions, (cached, prompt.positions)
    page_positions = state.cache.keys.shape[2]
    assert not cached % page_positions, (cached, page_positions)
    limit = prompt.controls.max_frames
    positions = prompt.positions - 1 + limit
    assert positions <= state.rotary[0].shape[0], (positions, state.rotary[0].shape[0])
    assert prompt.positions <= len(pages) * page_positions, (prompt.positions, len(pages))
    assert limit <= state.frames.shape[1], (limit, state.frames.shape[1])


def _allocate_watch(heads: WordHeads | None, spans: Tensor, max_positions: int) -> HeadWatch | None:
    """A `HeadWatch` of `heads` for all slots, which have `spans`; None without heads."""
    if heads is None or not heads.places:
        return None
    columns = max_positions if heads.candidates else min(max_positions, MOST_COLUMNS)
    return HeadWatch.allocate(heads.places, spans, columns, is_whole=bool(heads.candidates))


class ReadsText:
    """`sonoro.models.words.ShowsWords` for a model whose prompt holds all of the text."""

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
        return replace(state, watch=_allocate_watch(self.word_heads, state.spans, state.rotary[0].shape[0]))

    def attention(self, state: BackboneState) -> Tensor | None:
        return None if state.watch is None else state.watch.attention


class SpeaksFrames(ReadsText):
    """What a `SpeechModel` has `frames` and `states` for, the modules of its decode step and of its state, whose
    functions take its language model."""

    frames: Any
    states: Any
    position_bytes: int
    _modules: Any
    _prompts: Any

    def allocate(self, capacity: Capacity) -> Any:
        return self.states.allocate(self._modules.lm, capacity, self.word_heads)

    def prefill(self, state: Any, tokens: Tensor) -> None:
        self.states.prefill(self._modules.lm, state, tokens)

    def frame(self, state: Any, slots: Tensor, record: list[Tensor] | None = None) -> None:
        self.frames.frame(self._modules.lm, state, slots, record)

    def check_kernels(self, state: Any, batch: int) -> None:
        check_admission(state)
        self.frames.check_kernels(self._modules.lm, state, batch)

    def parts(self, state: Any) -> dict[str, Callable[[Tensor], object]]:
        return self.frames.parts(self._modules.lm, state)

    def frame_bytes(self, batch: int, context: int) -> int:
        return int(self.frames.floor_bytes(self._modules.lm)) + batch * context * self.position_bytes

    def token_spans(self, text: str) -> Sequence[tuple[int, int]]:
        return self._prompts.token_spans(text)


class PacksPrompts(SpeaksFrames):
    """`PackingModel` for a model whose `states` has `prompts`, and whose `frames` take them."""

    def prefill_and_frame(self, state: Any, tokens: Tensor, slots: Tensor) -> None:
        prompts = self.states.prompts(self._modules.lm, state, tokens)
        self.frames.frame(self._modules.lm, state, slots, prompts=prompts)


def _watched(state: BackboneState, prompt: TextSpanned) -> tuple[int, int]:
    """Start and count of the positions of `prompt` to watch."""
    if state.watch is not None and state.watch.is_whole:
        return 0, state.watch.attention.shape[2]
    return prompt.text_start, prompt.text_count
