"""What devices can do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sonoro.ops import device as module
from sonoro.ops.device import CARDS, TYPICAL, Card, card, is_recorded, recorded, shared_limit

KIB = 1024


def pretend(monkeypatch: pytest.MonkeyPatch, **properties: Any) -> torch.device:
    """A GPU that says this of itself."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    module._device_card.cache_clear()
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    module._device_card.cache_clear()
    shared_limit(1 << 30)


def test_numbers_of_amd_are_not_taken_for_those_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300 says (9, 4), and is no Hopper."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    device = pretend(
        monkeypatch, name="AMD", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=228
    )
    assert card(device).capability == (0, 0)
    assert card(device).gfx == "gfx942"
    assert card(device).shared_bytes == 64 * KIB
    assert card(device).multiprocessors == 228


@pytest.mark.parametrize(
    ("number", "kib"),
    [((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99), ((12, 1), 99)],
)
def test_a_card_is_what_it_says_of_itself(number: tuple[int, int], kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"memory_clock_rate": 10_000_000, "memory_bus_width": 256, "multi_processor_count": 46}
    device = pretend(monkeypatch, name="A card", major=number[0], minor=number[1], **properties)
    found = card(device)
    assert found == Card("A card", number, 46, kib * KIB, 6.4e11)
    shared_limit(48 * KIB)
    assert card(device).shared_bytes == 48 * KIB


def test_a_card_that_says_little_is_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend(monkeypatch, name="A card", major=8, minor=9, multi_processor_count=58)
    assert card(device).bandwidth == TYPICAL[8, 9].bandwidth
    assert card(torch.device("cpu")) == Card()


def test_units_are_those_of_the_kind() -> None:
    lacking = {kind for kind, one in TYPICAL.items() if not one.has_e4m3}
    assert lacking == {(7, 5), (8, 0), (8, 6), "gfx942", "gfx1100"}
    assert {kind for kind, one in TYPICAL.items() if not one.has_bfloat16} == {(7, 5)}
    assert not Card().has_bfloat16


def test_stages_are_as_many_as_there_is_memory_for() -> None:
    hopper, ampere = TYPICAL[9, 0], TYPICAL[8, 6]
    # Multiplied out of shared memory each stage has its blocks there; out of registers one is already on its way.
    assert hopper.buffers(64, 4) == 4
    assert hopper.buffers(16, 4) == ampere.buffers(64, 4) == 3
    assert ampere.fit_stages(128, 32 * KIB, 4) == 4
    assert ampere.fit_stages(128, 32 * KIB, 5) == 4
    assert TYPICAL["gfx942"].fit_stages(128, 32 * KIB, 4) == 3
    assert ampere.fit_stages(128, 100 * KIB, 4) == 1


def test_a_known_card_is_what_is_compiled_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its clocks say, or its plans would not be those that were compiled."""
    clocks = {"memory_clock_rate": 3_201_000, "memory_bus_width": 6144}
    device = pretend(monkeypatch, name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, **clocks)
    assert card(device) == CARDS["NVIDIA H200"]
    assert card(device).target == ("cuda", 90, 32)
    assert [CARDS[name].target for name in ("AMD Instinct MI300X", "AMD Radeon RX 7900 XTX")] == [
        ("hip", "gfx942", 64),
        ("hip", "gfx1100", 32),
    ]


def test_tensors_without_memory_stand_for_a_card_while_they_are_recorded() -> None:
    nowhere, h200 = torch.device("meta"), CARDS["NVIDIA H200"]
    assert (card(nowhere), is_recorded()) == (Card(), False)
    with recorded(h200):
        assert (card(nowhere), card(nowhere).capability, is_recorded()) == (h200, (9, 0), True)
    assert (card(nowhere), is_recorded()) == (Card(), False)
