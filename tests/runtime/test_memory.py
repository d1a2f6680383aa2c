"""The memory plan: as many pages as fit and are of use, and a refusal that names the field."""

import pytest
import torch

from sonoro.core.errors import ConfigError
from sonoro.runtime.memory import MemoryBudget, device_memory, map_in_pieces, plan_pages, report

MIB = 2**20


def budget(total: int = 1000, fraction: float = 0.9, weights: int = 300, graphs: int = 100) -> MemoryBudget:
    in_use, reserved = {"weights": weights * MIB}, {"graphs": graphs * MIB}
    return MemoryBudget(total * MIB, fraction, in_use, reserved)


def test_pages_fill_what_is_left_less_the_scratch_page() -> None:
    assert budget().left_bytes == 500 * MIB
    assert plan_pages(budget(), 10 * MIB, slots=64, pages_per_slot=8) == 49
    assert plan_pages(budget(), 10 * MIB + 1, slots=64, pages_per_slot=8) == 48


def test_no_more_pages_than_the_slots_can_use_or_a_third_of_many() -> None:
    assert plan_pages(budget(), MIB, slots=4, pages_per_slot=8) == 32
    assert plan_pages(budget(), MIB, slots=11, pages_per_slot=8) == 32
    assert plan_pages(budget(), MIB, slots=64, pages_per_slot=8) == plan_pages(None, MIB, 64, 8) == 22 * 8
    assert plan_pages(None, MIB, slots=4, pages_per_slot=8) == 32


def test_wanted_pages_are_taken_if_they_fit() -> None:
    assert plan_pages(budget(), 10 * MIB, slots=64, pages_per_slot=8, wanted_pages=49) == 49
    assert plan_pages(None, 10 * MIB, slots=64, pages_per_slot=8, wanted_pages=1000) == 1000
    with pytest.raises(ConfigError, match=r"^pages: 50 is not allowed; at most 49 .* memory_fraction 0\.9"):
        plan_pages(budget(), 10 * MIB, slots=64, pages_per_slot=8, wanted_pages=50)


@pytest.mark.parametrize("given", [None, budget()])
def test_wanted_pages_must_hold_one_request(given: MemoryBudget | None) -> None:
    with pytest.raises(ConfigError, match=r"^pages: 7 is not allowed; at least 8:"):
        plan_pages(given, MIB, slots=64, pages_per_slot=8, wanted_pages=7)


@pytest.mark.parametrize("wanted", [0, 50])
def test_a_card_too_full_for_one_request_names_the_fraction_and_who_takes_what(wanted: int) -> None:
    assert plan_pages(budget(), 10 * MIB, slots=64, pages_per_slot=49) == 49
    with pytest.raises(ConfigError, match=r"^memory_fraction: 0\.9 is not allowed; 10\.0 MiB more .* weights 300\.0"):
        plan_pages(budget(), 10 * MIB, slots=64, pages_per_slot=50, wanted_pages=wanted)
    with pytest.raises(ConfigError, match="memory_fraction"):
        plan_pages(budget(weights=2000), 10 * MIB, slots=1, pages_per_slot=1)


def test_the_report_adds_up() -> None:
    assert list(report(budget(), 10 * MIB, 40)) == [
        "weights: 300.0 MiB",
        "graphs, reserved: 100.0 MiB",
        "40 pages of 10485760 bytes: 410.0 MiB",
        "left of 0.9 of 1,000.0 MiB: 90.0 MiB",
    ]
    assert list(report(None, MIB, 3)) == ["3 pages of 1048576 bytes: 4.0 MiB"]


@pytest.mark.parametrize("given", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", ""])
@pytest.mark.parametrize("is_started", [False, True])
def test_memory_is_in_pieces_where_nobody_said_otherwise_before_the_gpu_is_used(
    given: str, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_started)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(given, "backend:native")
    map_in_pieces()
    assert told == ([] if given or is_started else ["expandable_segments:True"])


def test_a_cpu_has_no_budget() -> None:
    assert device_memory(torch.device("cpu")) is None


@pytest.mark.gpu
def test_a_gpu_tells_what_is_used() -> None:
    device = torch.device("cuda")
    total, before = device_memory(device) or (0, 0)
    held = torch.zeros(256 * MIB, dtype=torch.uint8, device=device)
    _, after = device_memory(device) or (0, 0)
    assert after - before >= len(held)
    assert 0 < after < total
