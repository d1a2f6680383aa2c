"""Kernel or reference: who serves, and that a kernel which fails or disagrees is left for good, with one warning."""

import logging

import pytest
import torch
from torch import Tensor

from sonoro.ops.dispatch import Operation, references_alone


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
    made = Operation("plus", kernel, plus_one, **given)  # type: ignore[arg-type]
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
    triton = pytest.importorskip("triton")
    nowhere, chosen = torch.ones(3, device="meta"), operation(lambda x: torch.cat((x, x)))
    with torch.inference_mode(), triton.knobs.runtime.scope():
        assert chosen(nowhere).shape == (3,)
        triton.knobs.runtime.jit_cache_hook = lambda **_: True
        assert chosen(nowhere).shape == (6,)
        chosen.check(lambda: (nowhere,), tolerance=0.0)
        assert chosen(nowhere).shape == (6,)


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
def test_a_kernel_that_disagrees_or_fails_is_left_for_good(
    on_gpu: Tensor, caplog: pytest.LogCaptureFixture, kernel: object, words: str
) -> None:
    chosen = operation(kernel)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        chosen.check(lambda: (on_gpu.clone(),), tolerance=1e-6)
        assert chosen(on_gpu).tolist() == [2.0] * 3
        assert chosen(on_gpu).tolist() == [2.0] * 3
    assert [record.message.split()[0] for record in caplog.records] == ["kernel=plus"]
    assert words in caplog.text


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
