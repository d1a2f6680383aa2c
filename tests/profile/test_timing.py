"""Clocks: they time each call of the work, and memory at a speed that can be."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from sonoro.profile import timing
from sonoro.profile.timing import copy_bandwidth, median_ms, times_ms

CPU = torch.device("cpu")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], None]]:
    """Calls of so many seconds each, by a clock that only they move."""
    now_s = 0.0

    def make(*seconds: float) -> Callable[[], None]:
        waits_s = iter(seconds)

        def wait() -> None:
            nonlocal now_s
            now_s += next(waits_s)

        return wait

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now_s))
    return make


def test_each_call_is_timed_by_itself(work: Callable[..., Callable[[], None]]) -> None:
    assert times_ms(work(0.25, 0.125, 0.5), 3, CPU) == [250, 125, 500]


def test_the_median_leaves_out_the_warm_up(work: Callable[..., Callable[[], None]]) -> None:
    assert median_ms(work(0.5, 0.5, 0.125, 0.25, 0.125), 3, 2, CPU) == 125


def test_memory_is_neither_a_disk_nor_a_gpu() -> None:
    assert 1e8 < copy_bandwidth(CPU) < 1e12


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    device = torch.device("cuda")
    times = times_ms(lambda: torch.cuda._sleep(20_000_000), 3, device)
    assert all(5 < time_ms < 50 for time_ms in times)  # 2e7 cycles at .4 to 4 GHz
    assert 1e11 < copy_bandwidth(device) < 2e13
