"""Sampling rows: what is set is read back by slot."""

import pytest
import torch

from sonoro.core.types import SamplingParams
from sonoro.ops.sample import sample
from sonoro.runtime.sampling import BatchSampling, Controls, SamplingState


def row(
    temperature: float = 0.9, top_k: int = 50, top_p: float = 1.0, repetition_penalty: float = 1.0, **more: int
) -> tuple[int, ...]:
    given = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
    return Controls(given, **{"seed": 1, "segment": 0, "max_frames": 10} | more).pack()


def tensors_of(found: BatchSampling) -> list[torch.Tensor]:
    return [*found.sampling, *found[1:]]


def test_rows_are_read_back_in_the_order_of_the_slots() -> None:
    rows = SamplingState(4, torch.device("cpu"))
    rows.set([3, 1], [row(0.7, 5, 0.5, seed=2**63 - 1, repetition_penalty=1.3), row(segment=6, ignore_eos=True)])
    found = rows.read(torch.tensor([1, 3, 1]))
    assert found.sampling.temperature.flatten().tolist() == torch.tensor([0.9, 0.7, 0.9]).tolist()
    assert found.sampling.top_k.tolist() == [[50], [5], [50]]
    assert found.sampling.top_p.tolist() == [[1.0], [0.5], [1.0]]
    assert found.repetition_penalty.flatten().tolist() == torch.tensor([1.0, 1.3, 1.0]).tolist()
    assert found.sampling.is_greedy.tolist() == [[False]] * 3
    assert found.ignore_eos.tolist() == [[True], [False], [True]]
    assert found.seed.tolist() == [1, 2**63 - 1, 1]
    assert found.segment.tolist() == [6, 0, 6]
    assert found.max_frames.tolist() == [10, 10, 10]


def test_a_cleared_row_is_as_if_never_set() -> None:
    rows, fresh = (SamplingState(4, torch.device("cpu")) for _ in range(2))
    rows.set([0, 1], [row(0.7, 3, 0.9, ignore_eos=True), row(top_k=100)])
    rows.clear([1, 0])
    everything = torch.arange(5)
    for found, expected in zip(tensors_of(rows.read(everything)), tensors_of(fresh.read(everything)), strict=True):
        assert torch.equal(found, expected)


def test_a_greedy_row_filters_nothing_and_divides_by_nothing() -> None:
    rows = SamplingState(2, torch.device("cpu"))
    rows.set([0], [row(temperature=0, top_k=7, top_p=0.3)])
    found = rows.read(torch.tensor([0]))
    assert found.sampling.is_greedy.item()
    assert (found.sampling.temperature.item(), found.sampling.top_k.item(), found.sampling.top_p.item()) == (
        1.0,
        0,
        1.0,
    )


@pytest.mark.parametrize("temperature", [1e-38, 5e-324])
def test_a_temperature_close_to_zero_divides_to_finite_logits(temperature: float) -> None:
    rows = SamplingState(1, torch.device("cpu"))
    rows.set([0], [row(temperature=temperature)])
    found = rows.read(torch.tensor([0]))
    logits, noise = torch.tensor([[1.0, 30.0, 29.0]]), torch.tensor([[9.0, 0.0, 0.0]])
    assert (logits / found.sampling.temperature).isfinite().all()
    assert sample(logits, noise, found.sampling).tolist() == [1]


def test_rows_never_set_end_at_once() -> None:
    found = SamplingState(2, torch.device("cpu")).read(torch.tensor([0, 2]))
    assert found.max_frames.tolist() == [0, 0]
    assert found.sampling.is_greedy.all()


@pytest.mark.gpu
def test_rows_set_behind_running_work_do_not_wait_for_it() -> None:
    device = torch.device("cuda")
    rows, index = SamplingState(3, device), torch.tensor([2, 1], device=device)
    rows.set([0], [row()])
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    for seed in range(20):
        rows.set([1, 2], [row(seed=seed), row(seed=seed + 100)])
    assert not torch.cuda.current_stream().query()
    assert rows.read(index).seed.tolist() == [119, 19]
