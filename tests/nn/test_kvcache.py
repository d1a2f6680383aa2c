"""Prefill and steps from pages against the whole sequence, in float64: same sums, other order, so within 1e-12."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sonoro.nn.kvcache import PackedTokens, PagedKVCache
from sonoro.nn.linear import Linear
from sonoro.nn.transformer import (
    Attention,
    DecoderConfig,
    DecoderStack,
    NormedAttention,
    causal_attention,
)

CONFIG = DecoderConfig(
    width=12, intermediate=20, layers=2, heads=4, kv_heads=2, head_width=6, norm_eps=1e-6, rope_theta=1e4
)
POSITIONS, PAGE, SLOTS = 16, 4, 4
TOLERANCE = {"atol": 1e-12, "rtol": 0.0}


@pytest.fixture(params=[False, True], ids=["norms apart", "norms joined"])
def stack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DecoderStack:
    """Whose products make the norm after them too, or none does."""
    monkeypatch.setattr(Linear, "joins_norm", lambda *_: request.param)
    torch.manual_seed(5)
    return DecoderStack(CONFIG, NormedAttention).double().requires_grad_(False)


def new_cache(fill: float = 0.0) -> PagedKVCache:
    """Four slots and scratch; the pages of a slot are scattered."""
    pages = torch.randperm(SLOTS * POSITIONS // PAGE, generator=torch.Generator().manual_seed(2)).view(SLOTS, -1)
    table = torch.cat((pages, torch.full((1, POSITIONS // PAGE), pages.numel()))).int()
    cache = CONFIG.kv_cache(table, PAGE, pages.numel(), torch.float64)
    cache.keys.fill_(fill)
    cache.values.fill_(fill)
    return cache


def whole(stack: DecoderStack, rows: Tensor) -> Tensor:
    return stack(rows[None], stack.config.rotary(torch.arange(len(rows)), rows.dtype), causal_attention)[0]


def prefill(stack: DecoderStack, cache: PagedKVCache, slots: list[int], sequences: list[Tensor]) -> list[Tensor]:
    """All sequences in one pack, with two rows of padding behind them."""
    lengths = [len(sequence) for sequence in sequences]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    count = sum(lengths)
    rows = PackedTokens(
        torch.tensor([slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)] + [SLOTS] * 2),
        torch.tensor([position for length in lengths for position in range(length)] + [0] * 2),
        torch.tensor([start for start, n in zip(starts, lengths, strict=True) for _ in range(n)] + [count, count + 1]),
    )
    x = torch.cat([*sequences, torch.ones(2, CONFIG.width, dtype=torch.float64)])
    out = stack(x[None], stack.config.rotary(rows.positions, x.dtype), cache.fill(rows))[0]
    return list(out[:count].split(lengths))


def go_on(stack: DecoderStack, cache: PagedKVCache, parts: list[tuple[int, Tensor, int]]) -> list[Tensor]:
    """Of each (slot, sequence, first) the rows from `first` on, in one pack, with a row of padding behind them."""
    lengths = [len(sequence) - first for _, sequence, first in parts]
    ends = torch.tensor([*lengths, 1]).cumsum(0)
    own = torch.tensor([*lengths, 1])
    rows = PackedTokens(
        torch.tensor([*(slot for slot, _, _ in parts), SLOTS]).repeat_interleave(own),
        torch.tensor([at for _, sequence, first in parts for at in range(first, len(sequence))] + [0]),
        (ends - own).repeat_interleave(own),
    )
    x = torch.cat([*(sequence[first:] for _, sequence, first in parts), torch.ones(1, CONFIG.width).double()])
    out = stack(x[None], stack.config.rotary(rows.positions, x.dtype), cache.fill(rows))[0]
    return list(out[:-1].split(lengths))


def step(stack: DecoderStack, cache: PagedKVCache, slots: list[int], positions: list[int], rows: Tensor) -> Tensor:
    tables = stack.config.rotary(torch.arange(POSITIONS), rows.dtype)
    with torch.no_grad():
        return stack.norm(stack.step(rows, tables, cache, torch.tensor(slots), torch.tensor(positions)))


def test_steps_equal_the_whole_sequence(stack: DecoderStack) -> None:
    sequences = torch.randn(3, POSITIONS, CONFIG.width, dtype=torch.float64)
    cache = new_cache()
    found = [step(stack, cache, [2, 0, 3], [at] * 3, sequences[:, at]) for at in range(POSITIONS)]
    expected = torch.stack([whole(stack, rows) for rows in sequences])
    torch.testing.assert_close(torch.stack(found, dim=1), expected, **TOLERANCE)


@pytest.mark.parametrize("attention", [Attention, NormedAttention])
def test_prompts_out_of_fused_operations_equal_the_forward(attention: type[Attention]) -> None:
    """Two prompts from their beginning, one that goes on from two pages, and padding."""
    torch.manual_seed(7)
    stack = DecoderStack(CONFIG, attention).double().requires_grad_(False)
    lengths, firsts = (5, 3, 6, 1, 1), (0, 0, 2 * PAGE, 0, 0)
    own = torch.tensor(lengths)
    tokens = PackedTokens(
        torch.repeat_interleave(torch.tensor([2, 0, 3, SLOTS, SLOTS]), own),
        torch.cat([torch.arange(length) + first for length, first in zip(lengths, firsts, strict=True)]),
        torch.repeat_interleave(own.cumsum(0) - own, own),
    )
    x, caches = torch.randn(len(tokens.slots), CONFIG.width).double(), [new_cache(0.5) for _ in range(3)]
    tables = stack.config.rotary(torch.arange(POSITIONS), x.dtype)
    turns = (tables[0][tokens.positions], tables[1][tokens.positions])
    expected = stack(x[None], turns, caches[0].fill(tokens))[0]
    torch.testing.assert_close(stack.norm.fused(stack.prefill(x, tables, caches[1], tokens)), expected, **TOLERANCE)
    stack.prefill(x, tables, caches[2], tokens, is_output_used=False)
    for cache in caches[1:]:
        torch.testing.assert_close(cache.keys, caches[0].keys, **TOLERANCE)
        torch.testing.assert_close(cache.values, caches[0].values, **TOLERANCE)


def test_positions_at_once_equal_the_whole_sequence(stack: DecoderStack) -> None:
    sequences = torch.randn(3, POSITIONS, CONFIG.width, dtype=torch.float64)
    cache, expected = new_cache(torch.nan), torch.stack([whole(stack, rows) for rows in sequences])
    for at in range(0, POSITIONS, 2):
        lines = torch.cat((sequences[:, at], sequences[:, at + 1]))
        found = step(stack, cache, [2, 0, 3], [at] * 3, lines).unflatten(0, (2, 3)).transpose(0, 1)
        torch.testing.assert_close(found, expected[:, at : at + 2], **TOLERANCE)


def test_stacks_share_pages_and_keep_apart(stack: DecoderStack) -> None:
    """Two of them, one behind the other in the cache of both: each as if it were alone."""
    torch.manual_seed(6)
    other = (
        DecoderStack(dataclasses.replace(CONFIG, layers=3, width=8, intermediate=10), NormedAttention)
        .double()
        .requires_grad_(False)
    )
    table = new_cache().page_table
    cache = dataclasses.replace(CONFIG, layers=5).kv_cache(table, PAGE, int(table.max()), torch.float64)
    parts = {stack: cache.part(slice(2)), other: cache.part(slice(2, None))}
    sequences = {one: torch.randn(9, one.config.width, dtype=torch.float64) for one in parts}
    found: dict[DecoderStack, list[Tensor]] = {one: [] for one in parts}
    for at in range(9):
        for one, part in parts.items():
            found[one].append(step(one, part, [1], [at], sequences[one][at : at + 1]))
    for one, rows in sequences.items():
        torch.testing.assert_close(torch.cat(found[one]), whole(one, rows), **TOLERANCE)


def test_rows_out_of_step_and_in_any_order_equal_the_whole(stack: DecoderStack) -> None:
    sequences = torch.randn(3, POSITIONS, CONFIG.width, dtype=torch.float64)
    expected = [whole(stack, rows) for rows in sequences]
    lengths = {0: 5, 1: 2, 2: 9}
    slot_of = {0: 1, 1: 3, 2: 0}
    cache = new_cache()
    order = [2, 0, 1]
    filled = prefill(stack, cache, [slot_of[key] for key in order], [sequences[key, : lengths[key]] for key in order])
    for row, key in enumerate(order):
        torch.testing.assert_close(filled[row], expected[key][: lengths[key]], **TOLERANCE)
    for running in ([0, 1, 2], [2, 0], [1], [1, 0, 2], [0, 1]):
        rows = torch.stack([sequences[key, lengths[key]] for key in running])
        found = step(stack, cache, [slot_of[key] for key in running], [lengths[key] for key in running], rows)
        for row, key in enumerate(running):
            torch.testing.assert_close(found[row], expected[key][lengths[key]], **TOLERANCE)
            lengths[key] += 1


def test_what_lies_past_the_live_length_does_not_matter(stack: DecoderStack) -> None:
    sequences = [torch.randn(length, CONFIG.width, dtype=torch.float64) for length in (7, 3)]
    new = torch.randn(2, CONFIG.width, dtype=torch.float64)
    found = []
    for fill in (0.0, torch.nan, torch.inf):
        cache = new_cache(fill)
        prefill(stack, cache, [2, 1], sequences)
        found.append(step(stack, cache, [2, 1], [7, 3], new))
    assert torch.isfinite(found[0]).all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a system that tells its memory otherwise")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_takes_memory_as_it_is_written(dtype: torch.dtype) -> None:
    def resident_mb() -> float:
        status = Path("/proc/self/status").read_text("ascii")
        return int(status.split("RssAnon:")[1].split()[0]) / 1024

    table = torch.arange(513, dtype=torch.int32)[:, None]
    before_mb = resident_mb()
    # Larger than any free block of the heap, which would be cleared by writing.
    large = CONFIG.kv_cache(table, 2048, 4096, dtype)
    assert large.keys.shape == large.values.shape == (2, 4097, 2048, 2, 6)
    assert large.keys.dtype == dtype
    size_mb = 2 * large.keys.nbytes / 2**20
    assert size_mb > 700
    assert resident_mb() - before_mb < size_mb / 4
    assert not large.keys[1, 7].any()
    large.keys[:, 3] = 1
    assert large.keys[:, 3].all()


def test_only_the_given_positions_are_written(stack: DecoderStack) -> None:
    cache = new_cache(7.0)
    prefill(stack, cache, [1], [torch.randn(4, CONFIG.width, dtype=torch.float64)])
    step(stack, cache, [1], [4], torch.randn(1, CONFIG.width, dtype=torch.float64))
    for rows in (cache.keys, cache.values):
        by_slot = rows[:, cache.page_table[:SLOTS].long()].flatten(2, 3)
        assert (by_slot[:, [0, 2, 3]] == 7).all()
        assert (by_slot[:, 1, 5:] == 7).all()
        assert (by_slot[:, 1, :5] != 7).any(dim=-1).all()


@pytest.mark.parametrize("fill", [0.0, torch.nan])
def test_prompts_that_begin_alike_share_what_was_run_once(stack: DecoderStack, fill: float) -> None:
    """Two go on from pages of a third, in a pack with one of its own; then all four step. The shared pages stay."""
    prefix = torch.randn(8, CONFIG.width, dtype=torch.float64)
    tails = [torch.randn(length, CONFIG.width, dtype=torch.float64) for length in (3, 1, 6, 5)]
    sequences = [torch.cat((prefix, tail)) for tail in tails[:3]] + [tails[3]]
    expected = [whole(stack, sequence) for sequence in sequences]
    cache = new_cache(fill)
    go_on(stack, cache, [(1, sequences[0][:-1], 0)])
    shared = cache.page_table[1, :2].long()
    before = cache.keys[:, shared].clone(), cache.values[:, shared].clone()
    cache.page_table[[3, 0], :2] = shared.int()
    found = go_on(stack, cache, [(3, sequences[1], 8), (2, sequences[3], 0), (0, sequences[2], 8)])
    for rows, (of, first) in zip(found, ((1, 8), (3, 0), (2, 8)), strict=True):
        torch.testing.assert_close(rows, expected[of][first:], **TOLERANCE)
    last = torch.stack([sequence[-1] for sequence in sequences])
    stepped = step(stack, cache, [1, 3, 0, 2], [len(sequence) - 1 for sequence in sequences], last)
    torch.testing.assert_close(stepped, torch.stack([rows[-1] for rows in expected]), **TOLERANCE)
    assert torch.equal(cache.keys[:, shared], before[0])
    assert torch.equal(cache.values[:, shared], before[1])
