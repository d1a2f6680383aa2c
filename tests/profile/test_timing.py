"""Clocks: they time each call of the work, and memory at a speed that can be."""

import time

import pytest
import torch

from sonoro.profile.timing import copy_bandwidth, median_ms, times_ms

CPU = torch.device("cpu")


def test_each_call_is_timed_by_itself() -> None:
    waits_s = iter([0.03, 0.001, 0.03])
    times = times_ms(lambda: time.sleep(next(waits_s)), 3, CPU)
    assert times[0] >= 30
    assert 1 <= times[1] < 30
    assert times[2] >= 30


def test_the_median_leaves_out_the_warm_up() -> None:
    waits_s = iter([0.05, 0.05, 0.001, 0.02, 0.001])
    assert 1 <= median_ms(lambda: time.sleep(next(waits_s)), 3, 2, CPU) < 20


def test_memory_is_neither_a_disk_nor_a_gpu() -> None:
    assert 1e8 < copy_bandwidth(CPU) < 1e12


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    device = torch.device("cuda")
    times = times_ms(lambda: torch.cuda._sleep(20_000_000), 3, device)
    assert all(5 < time_ms < 50 for time_ms in times)  # 2e7 cycles at .4 to 4 GHz
    assert 1e11 < copy_bandwidth(device) < 2e13
