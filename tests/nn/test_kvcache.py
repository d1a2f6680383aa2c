"""Prefill and decoding from a cache against the whole sequence, in float64: same sums, other order, so within 1e-12."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from sonoro.nn.kvcache import KVCache, LoopCache
from sonoro.nn.transformer import Attend, DecoderConfig, DecoderStack, causal_attention

CONFIG = DecoderConfig(
    width=12, intermediate=20, layers=2, heads=4, kv_heads=2, head_width=6, norm_eps=1e-6, rope_theta=1e4
)
POSITIONS = 16
Decode = Callable[[KVCache, Tensor, Tensor], Attend]
TOLERANCE = {"atol": 1e-12, "rtol": 0.0}


@pytest.fixture
def stack() -> DecoderStack:
    torch.manual_seed(5)
    return DecoderStack(CONFIG).double().requires_grad_(False)


@pytest.fixture(params=["decode", "decode_rows", "decode_masked"])
def decode(request: pytest.FixtureRequest) -> Decode:
    return lambda cache, slots, positions: getattr(cache, request.param)(slots, positions)


def new_cache(slots: int, fill: float = 0.0) -> KVCache:
    cache = KVCache.allocate(CONFIG, slots, POSITIONS, device=torch.device("cpu"), dtype=torch.float64)
    cache.keys.fill_(fill)
    cache.values.fill_(fill)
    return cache


def whole(stack: DecoderStack, rows: Tensor) -> Tensor:
    return stack(rows[None], stack.rotary(torch.arange(len(rows)), rows.dtype), causal_attention)[0]


def prefill(stack: DecoderStack, cache: KVCache, slots: list[int], sequences: list[Tensor]) -> Tensor:
    rows = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    rotary = stack.rotary(torch.arange(rows.shape[1]), rows.dtype)
    return stack(rows, rotary, cache.fill(torch.tensor(slots)))


def step(
    stack: DecoderStack, cache: KVCache, slots: list[int], positions: list[int], rows: Tensor, *, decode: Decode
) -> Tensor:
    at = torch.tensor(positions)
    attend = decode(cache, torch.tensor(slots), at)
    return stack(rows[:, None], stack.rotary(at[:, None], rows.dtype), attend)[:, 0]


def test_steps_equal_the_whole_sequence(stack: DecoderStack, decode: Decode) -> None:
    sequences = torch.randn(3, POSITIONS, CONFIG.width, dtype=torch.float64)
    cache = new_cache(4)
    found = [
        step(stack, cache, [2, 0, 3], [position] * 3, sequences[:, position], decode=decode)
        for position in range(POSITIONS)
    ]
    expected = torch.stack([whole(stack, rows) for rows in sequences])
    torch.testing.assert_close(torch.stack(found, dim=1), expected, **TOLERANCE)


def test_rows_out_of_step_and_in_any_order_equal_the_whole(stack: DecoderStack, decode: Decode) -> None:
    sequences = torch.randn(3, POSITIONS, CONFIG.width, dtype=torch.float64)
    expected = [whole(stack, rows) for rows in sequences]
    lengths = {0: 5, 1: 2, 2: 9}
    slot_of = {0: 1, 1: 3, 2: 0}
    cache = new_cache(4)
    order = [2, 0, 1]
    filled = prefill(stack, cache, [slot_of[key] for key in order], [sequences[key, : lengths[key]] for key in order])
    for row, key in enumerate(order):
        torch.testing.assert_close(filled[row, : lengths[key]], expected[key][: lengths[key]], **TOLERANCE)
    for running in ([0, 1, 2], [2, 0], [1], [1, 0, 2], [0, 1]):
        rows = torch.stack([sequences[key, lengths[key]] for key in running])
        found = step(
            stack, cache, [slot_of[key] for key in running], [lengths[key] for key in running], rows, decode=decode
        )
        for row, key in enumerate(running):
            torch.testing.assert_close(found[row], expected[key][lengths[key]], **TOLERANCE)
            lengths[key] += 1


def test_what_lies_past_the_live_length_does_not_matter(stack: DecoderStack, decode: Decode) -> None:
    sequences = [torch.randn(length, CONFIG.width, dtype=torch.float64) for length in (7, 3)]
    new = torch.randn(2, CONFIG.width, dtype=torch.float64)
    found = []
    for fill in (0.0, torch.nan, torch.inf):
        cache = new_cache(3, fill)
        prefill(stack, cache, [2, 1], sequences)
        found.append(step(stack, cache, [2, 1], [7, 3], new, decode=decode))
    assert torch.isfinite(found[0]).all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_only_the_given_slots_are_written(stack: DecoderStack, decode: Decode) -> None:
    cache = new_cache(3, 7.0)
    prefill(stack, cache, [1], [torch.randn(4, CONFIG.width, dtype=torch.float64)])
    step(stack, cache, [1], [4], torch.randn(1, CONFIG.width, dtype=torch.float64), decode=decode)
    for rows in (cache.keys, cache.values):
        assert (rows[:, [0, 2, 3]] == 7).all()
        assert (rows[:, 1, 5:] == 7).all()
        assert (rows[:, 1, :5] != 7).any(dim=-1).all()


@pytest.fixture
def _empty_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_empty_memory_is_nan")
def test_a_loop_equals_the_whole_and_reads_no_stale_row(stack: DecoderStack) -> None:
    assert torch.isnan(torch.empty(3)).all()
    sequences = torch.randn(3, 6, CONFIG.width, dtype=torch.float64)
    rotary = stack.rotary(torch.arange(6), torch.float64)
    loop = LoopCache(CONFIG, 3, 6, device=torch.device("cpu"), dtype=torch.float64)
    found = []
    for start, end in ((0, 2), (2, 3), (3, 4), (4, 5), (5, 6)):
        tables = (rotary[0][start:end], rotary[1][start:end])
        found.append(stack(sequences[:, start:end], tables, loop.at(start)))
    expected = torch.stack([whole(stack, rows) for rows in sequences])
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **TOLERANCE)
