"""Kernel or reference: who serves, and that a kernel which fails or disagrees is left for good, with one warning."""

import importlib
import inspect
import logging
import pkgutil

import pytest
import torch
from torch import Tensor

import sonoro.models
import sonoro.ops
from sonoro.ops.chunk import advance_counts, begin_chunk, end_chunk
from sonoro.ops.device import CARDS, recorded
from sonoro.ops.dispatch import Operation, fallbacks, references_alone, shrunk


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that are made here are not known to the tests of other files."""
    monkeypatch.setattr(Operation, "known", [*Operation.known])


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def plus_two(x: Tensor) -> Tensor:
    return x + 2


def failing(x: Tensor) -> Tensor:
    raise RuntimeError("no such instruction")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A CPU tensor that says it is on a GPU, which is all that the choice looks at."""

    class Elsewhere(torch.Tensor):
        is_cuda = True

    return torch.ones(3).as_subclass(Elsewhere)


def operation(kernel: object, **given: object) -> Operation:
    made = Operation(kernel, plus_one, name="plus", **given)  # type: ignore[arg-type]
    made.is_broken = False
    return made


def test_the_reference_serves_the_cpu() -> None:
    assert operation(plus_two)(torch.ones(3)).tolist() == [2.0] * 3


def test_the_kernel_serves_what_it_supports(on_gpu: Tensor) -> None:
    chosen = operation(plus_two, is_supported=lambda x: len(x) == 3)
    with torch.inference_mode():
        assert chosen(on_gpu).tolist() == [3.0] * 3
        assert chosen(on_gpu[:2]).tolist() == [2.0] * 2


def test_without_memory_the_kernel_serves_where_launches_are_noted_and_nothing_is_compared() -> None:
    """Anywhere else it would be run on addresses that are not there."""
    pytest.importorskip("triton")
    nowhere, chosen = torch.ones(3, device="meta"), operation(lambda x: torch.cat((x, x)))
    with torch.inference_mode():
        assert chosen(nowhere).shape == (3,)
        with recorded(CARDS["NVIDIA H200"]):
            assert chosen(nowhere).shape == (6,)
            chosen.check(lambda: (nowhere,), tolerance=0.0)
            assert chosen(nowhere).shape == (6,)
        assert chosen(nowhere).shape == (3,)


def test_references_may_serve_alone(on_gpu: Tensor) -> None:
    chosen = operation(plus_two)
    with torch.inference_mode():
        with references_alone():
            assert chosen(on_gpu).tolist() == [2.0] * 3
            chosen.check(lambda: (on_gpu,), tolerance=0.0)
        assert chosen(on_gpu).tolist() == [3.0] * 3
    assert not chosen.is_broken


def test_gradients_go_through_the_reference(on_gpu: Tensor) -> None:
    assert operation(plus_two)(on_gpu).tolist() == [2.0] * 3


@pytest.mark.parametrize(("kernel", "words"), [(plus_two, "disagrees"), (failing, "no such instruction")])
def test_a_kernel_that_disagrees_or_fails_is_left(
    on_gpu: Tensor, caplog: pytest.LogCaptureFixture, kernel: object, words: str
) -> None:
    chosen = operation(kernel)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        chosen.check(lambda: (on_gpu.clone(),), tolerance=1e-6)
        assert chosen(on_gpu).tolist() == [2.0] * 3
        assert chosen(on_gpu).tolist() == [2.0] * 3
    assert [record.message.split()[0] for record in caplog.records] == ["kernel=plus"]
    assert words in caplog.text
    assert words in chosen.failure


def test_a_kernel_that_disagrees_is_left_whatever_the_shapes(on_gpu: Tensor) -> None:
    chosen = operation(plus_two)
    with torch.inference_mode():
        chosen.check(lambda: (on_gpu.clone(),), tolerance=1e-6)
        assert chosen(on_gpu[:2]).tolist() == [2.0] * 2


def failing_from(length: int) -> object:
    """A kernel that says 3, but for too many elements nothing."""

    def kernel(x: Tensor) -> Tensor:
        if len(x) >= length:
            raise RuntimeError("too much shared memory")
        return x + 2

    return kernel


def test_a_launch_that_fails_leaves_other_shapes_to_the_kernel(
    on_gpu: Tensor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = operation(failing_from(3))
    monkeypatch.setattr(Operation, "known", [chosen])
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert chosen(on_gpu).tolist() == [2.0] * 3
            assert chosen(on_gpu[:2]).tolist() == [3.0] * 2
            assert chosen(on_gpu[:1]).tolist() == [3.0]
    # What it costs: how long the reference takes, and what the memory alone would.
    (record,) = caplog.records
    assert "shape=3 fallback=reference cost=" in record.message
    assert "bandwidth_floor=" in record.message
    assert fallbacks() == {"plus": {"reference": 1}}


def test_a_reference_that_counts_is_not_called_again_to_measure_it(
    on_gpu: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(x: Tensor, counts: Tensor) -> None:
        raise RuntimeError("too much shared memory")

    def reference(x: Tensor, counts: Tensor) -> None:
        counts.add_(x)

    monkeypatch.setattr(Operation, "known", [])
    counts, chosen = torch.zeros(3), Operation(kernel, reference, is_repeatable=False)
    chosen.is_broken = False
    with torch.inference_mode():
        chosen(on_gpu, counts)
    assert counts.tolist() == [1.0] * 3
    assert chosen.fallbacks
    assert not any(one.is_repeatable for one in (begin_chunk, end_chunk, advance_counts))


def test_shapes_are_those_of_everything_that_is_given(on_gpu: Tensor) -> None:
    calls: list[int] = []

    def kernel(x: Tensor, others: tuple[Tensor, int]) -> Tensor:
        calls.append(len(others[0]))
        if len(others[0]) == 2:
            raise RuntimeError("too much")
        return x

    made = Operation(kernel, lambda x, others: x, name="first")
    made.is_broken = False
    with torch.inference_mode():
        for length in (2, 2, 3, 2, 3):
            made(on_gpu, (torch.ones(length), 5))
    assert calls == [2, 3, 3]


def halving(most: int, asked: list[int]) -> object:
    """A kernel that runs in blocks of at most `most`, of 8 if it is asked for no smaller ones; the smallest are 2."""

    def kernel(x: Tensor, *, shrink: int = 0) -> Tensor:
        asked.append(shrink)
        block = shrunk(8, lambda block: block // 2 if block > 2 else None, shrink)
        if block > most:
            raise RuntimeError("too many registers")
        return x + block

    return kernel


def test_smaller_blocks_are_tried_before_the_reference(
    on_gpu: Tensor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    chosen = operation(halving(2, asked), can_shrink=True)
    monkeypatch.setattr(Operation, "known", [chosen])
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert chosen(on_gpu).tolist() == [3.0] * 3
        assert asked == [0, 1, 2, 2, 2]
        assert chosen(on_gpu[:2]).tolist() == [3.0] * 2
    assert [record.message.split()[2:4] for record in caplog.records] == [["fallback=smaller_blocks", "steps=2"]] * 2
    assert fallbacks() == {"plus": {"smaller": 2}}


def test_where_no_blocks_are_small_enough_the_reference_serves(on_gpu: Tensor) -> None:
    asked: list[int] = []
    chosen = operation(halving(1, asked), can_shrink=True)
    with torch.inference_mode():
        assert [chosen(on_gpu).tolist() for _ in range(2)] == [[2.0] * 3] * 2
    assert asked == [0, 1, 2, 3]


def test_a_kernel_that_agrees_stays(on_gpu: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Tensor] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(x)
        return x + 1

    chosen = operation(counted)
    with torch.inference_mode():
        chosen.check(lambda: (on_gpu.clone(),), tolerance=0.0)
        chosen(on_gpu)
    assert len(calls) == 2
    assert not caplog.records


def test_what_is_given_to_both_is_not_compared(on_gpu: Tensor) -> None:
    """A weight is large, and in float64 several times as large; this one is not even equal to itself."""
    weight = torch.full((3,), torch.nan)

    def with_weight(x: Tensor, weight: Tensor) -> Tensor:
        return x + 1

    chosen = Operation(with_weight, with_weight, name="plus")
    with torch.inference_mode():
        chosen.check(lambda: (on_gpu.clone(), weight), tolerance=0.0)
        assert not chosen.is_broken
        chosen.check(lambda: (on_gpu.clone(), weight.clone()), tolerance=0.0)
        assert chosen.is_broken


def test_a_kernel_is_compared_with_references_alone(on_gpu: Tensor) -> None:
    """One that its reference is made of may disagree, or not be compiled yet."""
    part = operation(plus_two)
    whole = Operation(plus_one, part, name="whole")
    whole.is_broken = False
    whole.check(lambda: (on_gpu.clone(),), tolerance=0.0)
    assert not whole.is_broken


def test_a_failure_at_run_time_is_remembered(on_gpu: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    chosen = operation(failing)
    with torch.inference_mode():
        assert [chosen(on_gpu).tolist() for _ in range(2)] == [[2.0] * 3] * 2
    assert len(caplog.records) == 1


def test_a_kernel_out_of_memory_is_not_a_broken_one(on_gpu: Tensor) -> None:
    def greedy(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("full")

    chosen = operation(greedy)
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError, match="full"):
        chosen(on_gpu)
    assert not chosen.is_broken


def test_references_that_serve_for_a_kernel_are_counted_and_no_others(on_gpu: Tensor) -> None:
    """A graph that was captured meanwhile is not one of kernels alone."""
    broken, wrong, sound = operation(failing), operation(plus_two), operation(plus_one)
    with torch.inference_mode():
        broken(on_gpu)
        wrong.check(lambda: (on_gpu,), tolerance=0.0)
        before = Operation.references
        sound(on_gpu)
        sound(torch.ones(3))
        with references_alone():
            sound(on_gpu)
        assert Operation.references == before
        broken(on_gpu)
        assert Operation.references == before + 1
        wrong(on_gpu)
        assert Operation.references == before + 2


def test_a_kernel_takes_the_arguments_of_its_reference() -> None:
    """On a CPU references alone are called: nothing else says that a kernel would be given what it takes."""
    for package in (sonoro.ops, sonoro.models):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    ours = [one for one in Operation.known if one.kernel.__module__.startswith("sonoro.")]
    assert len(ours) > 20
    for one in ours:
        asked = list(inspect.signature(one.reference).parameters)
        taken = inspect.signature(one.kernel).parameters
        assert list(taken)[: len(asked)] == asked, one.name
        own = [
            taken[name] for name in list(taken)[len(asked) :] if taken[name].kind is not inspect.Parameter.VAR_KEYWORD
        ]
        assert all(parameter.default is not inspect.Parameter.empty for parameter in own), one.name
        inspect.signature(one.is_supported).bind(*asked)
