"""Graph sets: whatever was run before, a batch gives what the function alone gives, from a graph or without."""

import contextlib
import gc
import itertools
import logging
import random
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from without_gpu import FunctionPool

from sonoro.ops.dispatch import Operation
from sonoro.runtime.graphs import Compiled, GraphPool, GraphSet, Steps

CPU = torch.device("cpu")
SLOTS = 9


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def cuda_stream() -> Iterator[torch.device]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield torch.device("cuda")


class Counters:
    """Rows that grow by what their slot holds; an intermediate the size of the batch, and a buffer read past it."""

    def __init__(self, device: torch.device, weight: int = 3) -> None:
        self.steps = torch.zeros(SLOTS + 1, dtype=torch.int64, device=device)
        self.values = torch.zeros(SLOTS + 1, 64, device=device)
        self.weight = torch.linspace(0, 1, 64 * 64, device=device).view(64, 64) * weight / 64
        self.sizes: list[int] = []

    def step(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.sizes.append(len(rows))
        values = self.values[rows] @ self.weight + self.steps[rows, None].sin() + rows[:, None]
        self.values[rows] = values
        self.steps[rows] += 1
        return values * 2, self.steps[rows]


def fresh(batches: list[list[int]], device: torch.device, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """What the function alone gives for `batches` in turn, padded alike: other sizes may round differently."""
    counters, results = Counters(device), []
    for rows in batches:
        size = min((size for size in sizes if size >= len(rows)), default=len(rows))
        padded = torch.tensor(rows + [SLOTS] * (size - len(rows)), device=device)
        results.append(tuple(out[: len(rows)].clone() for out in counters.step(padded)))
    return results


def assert_runs_as_alone(graphs: GraphSet, counters: Counters, batches: list[list[int]]) -> None:
    device, sizes = counters.steps.device, graphs.sizes
    counters.values.zero_()
    counters.steps.zero_()
    results = [tuple(out[: len(rows)].clone() for out in graphs.run(rows)) for rows in batches]
    for rows, result, expected in zip(batches, results, fresh(batches, device, sizes), strict=True):
        for ours, alone in zip(result, expected, strict=True):
            assert torch.equal(ours, alone), rows


def random_batches(count: int, largest: int = 8) -> list[list[int]]:
    draw = random.Random(0)
    return [draw.sample(range(SLOTS), draw.randint(1, largest)) for _ in range(count)]


def test_a_step_takes_prompts_with_the_batches_that_have_a_set_for_them() -> None:
    """Two slots and more are padded to 4 or 8, which have sets for up to 32 tokens; one slot has none."""
    counters = Counters(CPU)
    frames = GraphSet("frame", counters.step, (1, 4, 8), SLOTS, CPU)
    packed = {
        tokens: (torch.zeros(tokens, dtype=torch.int64), GraphSet(f"{tokens}", counters.step, (4, 8), SLOTS, CPU))
        for tokens in (8, 32)
    }
    steps = Steps(frames, packed, 0, is_eager=True)
    assert [batch for batch in range(1, 9) if steps.take(batch, 5)] == [2, 3, 4, 5, 6, 7, 8]
    assert [tokens for tokens in (8, 9, 32, 33) if steps.take(2, tokens)] == [8, 9, 32]
    assert steps.of(9) is packed[32][1]
    assert steps.of(0) is frames


def test_compiled_code_runs_the_batches_that_it_takes_unless_all_is_eager() -> None:
    ran: list[tuple[str, int]] = []

    def counting(name: str) -> Callable[[Tensor], None]:
        return lambda slots: ran.append((name, len(slots)))

    for is_eager, expected in ((False, ["compiled", "compiled", "eager"]), (True, ["eager"] * 3)):
        ran.clear()
        compiled = Compiled(counting("compiled"), 2)
        graphs = GraphSet("test", counting("eager"), (), SLOTS, CPU, is_eager=is_eager, compiled=compiled)
        for batch in ([3], [1, 2], [4, 5, 6]):
            graphs.run(batch)
        assert ran == [*zip(expected, (1, 2, 3), strict=True)]
        counts = graphs.compiled_launches, graphs.eager_launches, graphs.graph_launches
        assert counts == (expected.count("compiled"), expected.count("eager"), 0)


def test_batches_of_changing_sizes_run_as_alone_on_a_cpu() -> None:
    counters = Counters(CPU)
    graphs = GraphSet("test", counters.step, (1, 2, 4, 8), SLOTS, CPU)
    graphs.capture()
    assert_runs_as_alone(graphs, counters, random_batches(40))
    assert (graphs.graph_launches, graphs.eager_launches) == (0, 40)
    assert graphs.captured == []


def test_a_batch_is_padded_with_scratch_to_the_next_size() -> None:
    seen: list[list[int]] = []
    graphs = GraphSet("test", lambda rows: seen.append(rows.tolist()), (2, 4), SLOTS, CPU)
    for rows in ([5], [1, 2, 3], [7], [7, 2], [0, 1, 2, 3, 4], [7]):
        assert graphs.run(rows) is None
    assert seen == [[5, 9], [1, 2, 3, 9], [7, 9], [7, 2], [0, 1, 2, 3, 4], [7, 9]]
    assert [graphs.padded(count) for count in range(1, 6)] == [2, 2, 4, 4, 5]


def test_without_sizes_nothing_is_padded() -> None:
    counters = Counters(CPU)
    graphs = GraphSet("test", counters.step, (), SLOTS, CPU)
    graphs.capture()
    assert_runs_as_alone(graphs, counters, random_batches(10))
    assert counters.sizes == [len(rows) for rows in random_batches(10)]


def test_until_a_size_is_captured_a_batch_is_padded_to_the_next_that_is() -> None:
    counters = Counters(CPU)
    graphs = GraphSet("test", counters.step, (1, 2, 4, 8), SLOTS, CPU, pool=FunctionPool())
    there: set[int] = set()
    for sizes, to_come in (((1, 8), (2, 4)), ((4,), (2,)), (None, ())):
        graphs.capture(sizes)
        there |= set(sizes or graphs.sizes)
        assert graphs.to_come == to_come
        expected = [min(size for size in there if size >= count) for count in range(1, 9)]
        assert [graphs.padded(count) for count in range(1, 9)] == expected
        counters.values.zero_()
        counters.steps.zero_()
        batches = random_batches(40)
        results = [tuple(out[: len(rows)].clone() for out in graphs.run(rows)) for rows in batches]
        # Bit by bit what the function gives at that size.
        for ours, alone in zip(results, fresh(batches, CPU, tuple(sorted(there))), strict=True):
            assert all(map(torch.equal, ours, alone))
    assert [one.size for one in graphs.captured] == [8, 1, 4, 2]
    assert (graphs.graph_launches, graphs.eager_launches) == (120, 0)


def test_the_size_that_all_can_be_padded_to_comes_first() -> None:
    graphs = GraphSet("test", Tensor.clone, (1, 2), SLOTS, CPU, pool=FunctionPool())
    with pytest.raises(AssertionError, match="largest"):
        graphs.capture((1,))


def test_a_size_that_cannot_be_captured_is_run_directly(caplog: pytest.LogCaptureFixture) -> None:
    class Unlucky(FunctionPool):
        def record(self, function, device):  # type: ignore[no-untyped-def]
            if len(graphs.captured) == 1:
                raise ValueError("it is out of luck")
            return super().record(function, device)

    counters = Counters(CPU)
    graphs = GraphSet("test", counters.step, (1, 2, 4), SLOTS, CPU, pool=Unlucky())
    with caplog.at_level(logging.WARNING):
        graphs.capture()
    assert "graphs=test size=2 status=eager error=ValueError: it is out of luck" in caplog.text
    assert_runs_as_alone(graphs, counters, [[1], [2, 3], [1, 2, 3], [4, 5]])
    assert (graphs.graph_launches, graphs.eager_launches) == (2, 2)


def test_garbage_in_the_scratch_row_reaches_no_other() -> None:
    counters = Counters(CPU)
    graphs = GraphSet("test", counters.step, (4, 8), SLOTS, CPU)
    expected = [tuple(out[:1].clone() for out in graphs.run([3])) for _ in range(3)]
    counters.values.zero_()
    counters.steps.zero_()
    for values, steps in expected:
        counters.values[SLOTS] = torch.nan
        ours = graphs.run([3])
        assert torch.equal(ours[0][:1], values)
        assert torch.equal(ours[1][:1], steps)


def test_a_pool_keeps_the_graphs_of_a_set_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuBLAS computes in is freed with the first graph of a stream, whatever others use it."""
    kept: list[weakref.ref] = []

    class Graph:
        def __init__(self) -> None:
            kept.append(weakref.ref(self))

        def replay(self) -> None:
            pass

    fakes = {
        "CUDAGraph": Graph,
        "current_stream": lambda device: "stream",
        "default_stream": lambda device: "default",
        "graph": lambda *how, **more: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "mem_get_info": lambda device: (0, 0),
        "synchronize": lambda device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(GraphPool, "can_record", lambda pool, device: True)
    pool = GraphPool()
    for _ in range(2):
        graphs = GraphSet("test", lambda rows: rows + 1, (1, 2), SLOTS, CPU, pool=pool)
        graphs.capture()
        assert not any(captured.error for captured in graphs.captured)
    del graphs
    gc.collect()
    assert [one() is not None for one in kept] == [True] * 4
    del pool
    gc.collect()
    assert [one() for one in kept] == [None] * 4


@pytest.mark.parametrize("sizes", [(2, 1), (1, 1), (0, 1)])
def test_sizes_must_ascend_from_one(sizes: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="sizes"):
        GraphSet("test", Tensor.clone, sizes, SLOTS, CPU)


def test_it_is_used_in_inference_mode() -> None:
    graphs = GraphSet("test", Tensor.clone, (1,), SLOTS, CPU)
    with torch.inference_mode(False), pytest.raises(AssertionError):
        graphs.run([0])


@pytest.mark.gpu
def test_a_graph_with_a_reference_in_place_of_a_kernel_is_counted_apart(
    cuda_stream: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(Operation, "known", [*Operation.known])
    plus = Operation(fails, lambda x: x + 1, name="plus")
    graphs = GraphSet("test", lambda slots: plus(slots) if len(slots) > 1 else slots + 1, (1, 2), SLOTS, cuda_stream)
    graphs.capture()
    for slots in ([0], [0, 1], [1, 0], [1]):
        graphs.run(slots)
    assert (graphs.graph_launches, graphs.reference_launches) == (4, 2)
    Operation.known.remove(plus)


@pytest.mark.gpu
def test_every_order_of_sizes_replays_as_alone(cuda_stream: torch.device) -> None:
    counters = Counters(cuda_stream)
    graphs = GraphSet("test", counters.step, (1, 2, 4, 8), SLOTS, cuda_stream)
    graphs.capture()
    assert [captured.size for captured in graphs.captured] == [8, 4, 2, 1]
    assert not any(captured.error for captured in graphs.captured)
    for lengths in itertools.permutations((1, 2, 3, 4, 5, 8), 3):
        batches = [[(start + at) % SLOTS for at in range(length)] for start, length in enumerate(lengths)]
        assert_runs_as_alone(graphs, counters, batches)
    assert_runs_as_alone(graphs, counters, random_batches(200))
    assert graphs.eager_launches == 0
    assert graphs.graph_launches == 120 * 3 + 200
    assert len(counters.sizes) == 4 * 3  # two warm-ups and the capture, at each size


@pytest.mark.gpu
def test_graph_and_eager_are_equal_bit_by_bit(cuda_stream: torch.device) -> None:
    batches = random_batches(50)
    results = []
    for is_eager in (False, True):
        counters = Counters(cuda_stream)
        graphs = GraphSet("test", counters.step, (1, 2, 4, 8), SLOTS, cuda_stream, is_eager=is_eager)
        graphs.capture()
        counters.values.zero_()
        counters.steps.zero_()
        results.append([[out.clone() for out in graphs.run(rows)] for rows in batches])
        assert (graphs.eager_launches, graphs.graph_launches)[is_eager] == 0
    for graph, eager in zip(*results, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(graph, eager, strict=True))


@pytest.mark.gpu
def test_families_that_share_a_pool_replay_in_every_order(cuda_stream: torch.device) -> None:
    pool, families = GraphPool(), [Counters(cuda_stream, weight) for weight in (2, 3, 5)]
    sets = [
        GraphSet(str(at), family.step, (1, 4, 8), SLOTS, cuda_stream, pool=pool) for at, family in enumerate(families)
    ]
    for graphs in sets:
        graphs.capture()
    serial = [Counters(cuda_stream, weight) for weight in (2, 3, 5)]
    for order in itertools.permutations(itertools.product(range(3), ([4], [1, 3, 2], [5, 0, 8, 7, 6])), 2):
        for at, rows in order:
            ours = sets[at].run(rows)
            size = sets[at].padded(len(rows))
            alone = serial[at].step(torch.tensor(rows + [SLOTS] * (size - len(rows)), device=cuda_stream))
            assert all(torch.equal(a[: len(rows)], b[: len(rows)]) for a, b in zip(ours, alone, strict=True)), order
            for counters in (families[at], serial[at]):  # scratch may differ; all else must not, nor may it overflow
                counters.values[SLOTS] = 0
                counters.steps[SLOTS] = 0
                counters.values.remainder_(8)


@pytest.mark.gpu
def test_launches_do_not_wait_and_row_vectors_in_flight_stay_whole(cuda_stream: torch.device) -> None:
    log, at = (
        torch.zeros(300, 4, dtype=torch.int64, device=cuda_stream),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )

    def record(rows: Tensor) -> None:
        log[at] = rows
        at.add_(1)

    graphs = GraphSet("test", record, (4,), SLOTS, cuda_stream)
    graphs.capture()
    at.zero_()
    torch.cuda._sleep(400_000_000)
    batches = [[index % 7, 7 + index % 2, index % 5] for index in range(300)]
    for rows in batches:
        graphs.run(rows)
    assert not torch.cuda.current_stream().query()
    assert log.tolist() == [[*rows, SLOTS] for rows in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("failure", ["raises", "synchronises"])
def test_a_size_that_cannot_be_captured_serves_on(
    failure: str, cuda_stream: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    pool, counters = GraphPool(), Counters(cuda_stream)

    def step(rows: Tensor) -> tuple[Tensor, Tensor]:
        results = counters.step(rows)
        if len(rows) == 4 and torch.cuda.is_current_stream_capturing():
            if failure == "raises":
                raise ValueError("size 4 is out of luck")
            results[0].sum().item()
        return results

    graphs = GraphSet("unlucky", step, (2, 4, 8), SLOTS, cuda_stream, pool=pool)
    with caplog.at_level(logging.WARNING):
        graphs.capture()
    other = Counters(cuda_stream)
    later = GraphSet("later", other.step, (1, 4), SLOTS, cuda_stream, pool=pool)
    later.capture()
    assert [bool(captured.error) for captured in graphs.captured] == [False, True, False]
    assert not any(captured.error for captured in later.captured)
    assert "graphs=unlucky size=4" in caplog.text
    assert failure == "synchronises" or "out of luck" in caplog.text
    batches = random_batches(60)
    assert_runs_as_alone(graphs, counters, batches)
    assert graphs.eager_launches == sum(2 < len(rows) <= 4 for rows in batches)
    assert graphs.graph_launches == 60 - graphs.eager_launches
    assert_runs_as_alone(later, other, [rows[:4] for rows in batches])
    torch.cuda.empty_cache()  # refused while the allocator still records for a capture
    assert "eager" in next(line for line in graphs.report() if line.startswith("unlucky 4"))


@pytest.mark.gpu
def test_it_says_what_a_size_took(cuda_stream: torch.device) -> None:
    large = GraphSet(
        "large", lambda rows: torch.ones(rows.shape[0], 1 << 24, device=cuda_stream), (4,), SLOTS, cuda_stream
    )
    large.capture()
    assert large.captured[0].memory_bytes >= 4 * 4 << 24
    assert large.captured[0].seconds > 0
    assert next(large.report()).startswith("large 4: graph, ")
