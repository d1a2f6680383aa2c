"""Capabilities of a device, from which kernels' block sizes are chosen; and seeded random generators.

Operations on tensors of torch's "meta" device record which kernels are launched, for a GPU that need not be present
(`sonoro.compile.variants`)."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Card:
    """The properties of a GPU by which block sizes are chosen.
    `capability`: NVIDIA's compute capability, else (0, 0). `gfx`: AMD's name of the architecture. `shared_bytes`:
    shared memory per program. `bandwidth`: of the memory, in bytes a second."""

    name: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 1
    shared_bytes: int = 1 << 30
    bandwidth: float = 5e10
    gfx: str = ""

    limit: ClassVar[int] = _NO_LIMIT
    """Limit of shared memory per program on any card, in bytes: see `shared_limit`."""

    @property
    def target(self) -> tuple[str, int | str, int]:
        """Triton's compilation target: backend, architecture, and warp size."""
        if self.gfx:
            return "hip", self.gfx, 64 if self.gfx.startswith("gfx9") else 32
        return "cuda", 10 * self.capability[0] + self.capability[1], 32

    @property
    def is_gpu(self) -> bool:
        return self.capability > (0, 0) or bool(self.gfx)

    @property
    def has_bfloat16(self) -> bool:
        """Whether it has units for bfloat16."""
        return self.capability >= (8, 0) or bool(self.gfx)

    @property
    def has_e4m3(self) -> bool:
        """Whether it has units for E4M3; AMD's are for another format."""
        return self.capability >= (8, 9)

    @property
    def has_tma(self) -> bool:
        """Whether it has units that copy tiles of a matrix to shared memory (the tensor memory accelerator)."""
        return self.capability >= (9, 0)

    @property
    def has_few_registers(self) -> bool:
        """Whether large tiles spill registers: AMD cards with waves of 32."""
        return self.gfx.startswith("gfx1")

    def buffers(self, block_m: int, stages: int) -> int:
        """Blocks of each operand that a pipelined product of `block_m` rows keeps in shared memory."""
        # Hopper and data-centre Blackwell multiply from shared memory, others from registers.
        is_shared = (9, 0) <= self.capability < (12, 0) and block_m >= 64
        return stages if is_shared else max(1, stages - 1)

    def fit_stages(self, block_m: int, stage_bytes: int, stages: int, fixed_bytes: int = 0) -> int:
        """The most of `stages` that fit the shared memory; below 2 the blocks are too large."""
        while stages > 1 and fixed_bytes + stage_bytes * self.buffers(block_m, stages) > self.shared_bytes:
            stages -= 1
        return stages


_KIB = 1024
_SHARED = {(8, 0): 163 * _KIB, (8, 7): 163 * _KIB, (9, 0): 227 * _KIB, (10, 0): 227 * _KIB, (10, 3): 227 * _KIB}
"""Shared memory per block, from CUDA's "Compute Capabilities"; otherwise 99 KiB from Ampere on, 64 before and on
AMD."""

TYPICAL = {
    card.capability if card.capability > (0, 0) else card.gfx: card
    for card in (
        Card("Tesla T4", (7, 5), 40, 64 * _KIB, 3.2e11),
        Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * _KIB, 2.0e12),
        Card("NVIDIA A10", (8, 6), 72, 99 * _KIB, 6.0e11),
        Card("NVIDIA L4", (8, 9), 58, 99 * _KIB, 3.0e11),
        Card("NVIDIA H200", (9, 0), 132, 227 * _KIB, 4.8e12),
        Card("NVIDIA B200", (10, 0), 148, 227 * _KIB, 8.0e12),
        Card("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 * _KIB, 1.79e12),
        Card("AMD Instinct MI300X", (0, 0), 304, 64 * _KIB, 5.3e12, "gfx942"),
        Card("AMD Radeon RX 7900 XTX", (0, 0), 96, 64 * _KIB, 9.6e11, "gfx1100"),
    )
}
"""A typical card by capability or AMD architecture, used for unknown cards and without a card."""


CARDS = {
    card.name: card
    for card in (
        *TYPICAL.values(),
        Card("NVIDIA GeForce RTX 3060", (8, 6), 28, 99 * _KIB, 3.6e11),
        Card("NVIDIA GeForce RTX 3090", (8, 6), 82, 99 * _KIB, 9.36e11),
        Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * _KIB, 1.01e12),
        Card("NVIDIA L40S", (8, 9), 142, 99 * _KIB, 8.64e11),
        Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * _KIB, 3.35e12),
    )
}
"""Cards by name. These values are used even if the card reports others, so that kernels compiled elsewhere fit."""

_recorded: ContextVar[Card | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded(card: Card) -> Iterator[None]:
    """A context in which meta tensors stand for those on `card`, and launches are recorded instead of run."""
    token = _recorded.set(card)
    try:
        yield
    finally:
        _recorded.reset(token)


def card(device: torch.device) -> Card:
    """The card of `device`; for "meta" the one given to `recorded`; a default `Card` for a CPU."""
    found = (_recorded.get() or Card()) if device.type == "meta" else _device_card(device)
    return found if found.shared_bytes <= Card.limit else replace(found, shared_bytes=Card.limit)


def shared_limit(limit_bytes: int) -> None:
    """Limit the shared memory of programs on any card to `limit_bytes`; 0 removes the limit. Plans are chosen
    accordingly."""
    Card.limit = limit_bytes or _NO_LIMIT


@functools.cache
def _device_card(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card()
    found = torch.cuda.get_device_properties(device)
    if found.name in CARDS:
        return CARDS[found.name]
    kind = found.gcnArchName.partition(":")[0] if torch.version.hip else (found.major, found.minor)
    base = TYPICAL.get(kind) or _unknown(kind)
    # Clock in kHz, width in bits, double data rate.
    bandwidth = 2e3 * getattr(found, "memory_clock_rate", 0) * getattr(found, "memory_bus_width", 0) / 8
    return replace(
        base, name=found.name, multiprocessors=found.multi_processor_count, bandwidth=bandwidth or base.bandwidth
    )


def _unknown(kind: tuple[int, ...] | str) -> Card:
    """A conservative `Card` for an unknown kind."""
    if isinstance(kind, str):
        return Card(kind, (0, 0), 64, 64 * _KIB, 5e11, kind)
    major, minor = kind
    shared = _SHARED.get((major, minor), 99 * _KIB if major >= 8 else 48 * _KIB)
    return Card(f"compute capability {major}.{minor}", (major, minor), 32, shared, 3e11)


def is_recorded() -> bool:
    """Whether launches on meta tensors are recorded (see `recorded`)."""
    return _recorded.get() is not None


def seeded(device: torch.device, seed: int = 0) -> torch.Generator | None:
    """A generator on `device` seeded with `seed`; None on the meta device."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
