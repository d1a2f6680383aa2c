"""Before and after a codec: PCM16 is as the host makes it, and each kernel equals its reference to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from without_gpu import device_only, in_the_interpreter

from sonoro.audio import pcm as host
from sonoro.ops.chunk import (
    advance_counts,
    advance_counts_kernel,
    advance_counts_reference,
    begin_chunk,
    begin_chunk_kernel,
    begin_chunk_reference,
    end_chunk,
    end_chunk_kernel,
    end_chunk_reference,
    to_pcm16,
)

SCRATCH, COLUMNS = 6, 40
DECODED = (0, 3, 38, 40, 39, 7, 5)
"""By slot: at the start, within, with fewer columns left than a chunk has, and with none."""


def every_step(dtype: torch.dtype) -> Tensor:
    """All of PCM16 and halves between, beyond full scale too, and noise."""
    steps = torch.arange(-70000, 70000, dtype=dtype) / 2 / 32768
    noise = torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=dtype) * 3 - 1.5
    return torch.cat([steps, noise, torch.tensor([-1.0, 1.0, -2.0, 2.0], dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pcm16_on_the_device_is_what_the_host_makes(dtype: torch.dtype) -> None:
    pcm = every_step(dtype)
    made = to_pcm16(pcm).numpy().astype("<i2").tobytes()
    assert made == host.to_pcm16(pcm.numpy())
    assert made == end_chunk(pcm[None], torch.zeros(1, dtype=torch.int64))[0].numpy().astype("<i2").tobytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_samples_that_are_not_finite_are_silenced_and_counted(dtype: torch.dtype) -> None:
    nan, inf = torch.nan, torch.inf
    pcm, broken = torch.tensor([[nan, 0.5, -inf, inf], [-0.5, 1.0, -1.0, 0.0]], dtype=dtype), torch.zeros(2).long()
    assert end_chunk(pcm, broken).tolist() == [[0, 16384, 0, 0], [-16384, 32767, -32768, 0]]
    assert broken.tolist() == [3, 0]


def a_state(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Frames of all slots, each element another number, and how many columns were decoded."""
    total = (SCRATCH + 1) * COLUMNS * torch.Size(shape).numel()
    frames = torch.arange(total).to(dtype).view(SCRATCH + 1, COLUMNS, *shape)
    return frames.to(device), torch.tensor(DECODED, device=device)


@pytest.mark.parametrize("shape", [(3,), (2, 5)])
def test_a_chunk_is_the_next_frames_of_each_slot(shape: tuple[int, ...]) -> None:
    frames, decoded = a_state(shape, torch.int64)
    chunk, broken = begin_chunk(frames, decoded, torch.tensor([5, 0, 2, 3]), 4)
    for row, columns in enumerate(([7, 8, 9, 10], [0, 1, 2, 3], [38, 39, 39, 39], [39, 39, 39, 39])):
        assert torch.equal(chunk[row], frames[(5, 0, 2, 3)[row], columns])
    assert decoded.tolist() == [4, 3, 42, 44, 39, 11, 5]
    assert broken.tolist() == [0, 0, 0, 0]


def test_they_may_be_captured() -> None:
    frames, decoded = (torch.empty_like(part, device="meta") for part in a_state((4,), torch.int64))
    slots = torch.zeros(3, dtype=torch.int64, device="meta")
    with device_only():
        chunk, broken = begin_chunk(frames, decoded, slots, 8)
        assert chunk.shape == (3, 8, 4)
        assert end_chunk(torch.empty(3, 80, device="meta"), broken).dtype == torch.int16
        advance_counts(decoded, slots, 8)


def check_begin(shape: tuple[int, ...], dtype: torch.dtype, count: int, slots: list[int], device: str) -> None:
    """Chunks of all slots but scratch, whose count stays."""
    batch = torch.tensor(slots, device=device)
    (frames, decoded), (_, expected) = (a_state(shape, dtype, device) for _ in range(2))
    chunk, broken = begin_chunk_kernel(frames, decoded, batch, count)
    theirs, _ = begin_chunk_reference(frames, expected, batch, count)
    assert chunk.shape == theirs.shape
    assert torch.equal(chunk[batch != SCRATCH], theirs[batch != SCRATCH])
    assert torch.equal(decoded[:SCRATCH], expected[:SCRATCH])
    assert decoded[SCRATCH] == DECODED[SCRATCH]
    assert not broken.any()


def check_end(pcm: Tensor) -> None:
    ours, theirs = torch.zeros(2, len(pcm), dtype=torch.int64, device=pcm.device)
    for number in range(2):
        assert torch.equal(end_chunk_kernel(pcm, ours), end_chunk_reference(pcm, theirs)), number
        assert torch.equal(ours, theirs)
    assert ours.any(), "a second call adds to what it finds"


def check_kernels(device: str) -> None:
    for slots in ([3], [1, 4, 2], [5, 0, SCRATCH, 2, SCRATCH, 3, SCRATCH]):
        for count in (1, 4, 20):
            check_begin((5,), torch.int64, count, slots, device)
            check_begin((4, 3), torch.float32, count, slots, device)
        batch = torch.tensor(slots, device=device)
        (_, counts), (_, expected) = (a_state((1,), torch.int64, device) for _ in range(2))
        advance_counts_kernel(counts, batch, 12)
        advance_counts_reference(expected, batch, 12)
        assert torch.equal(counts[:SCRATCH], expected[:SCRATCH])
        assert counts[SCRATCH] == DECODED[SCRATCH]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        pcm = every_step(torch.float32)[:-4].view(3, -1).clone()
        pcm[0, [0, 7, 2047, 2048, 40000, -1]] = torch.tensor([torch.nan, 3e38, torch.inf, -torch.inf, -3e38, torch.nan])
        pcm[2, 5::3] = -torch.nan
        check_end(pcm.to(device, dtype))
        check_end(pcm[:, :30].to(device, dtype).contiguous())


@in_the_interpreter
def test_interpreted() -> None:
    check_kernels("cpu")


@pytest.mark.gpu
@torch.inference_mode()
def test_the_kernels_equal_the_references_on_a_gpu() -> None:
    check_kernels("cuda")
    # More slots than a program of `advance_counts` has, and chunks as a large server decodes them.
    counts, expected = torch.zeros(2, 301, dtype=torch.int64, device="cuda")
    slots = torch.randperm(300, device="cuda")
    advance_counts_kernel(counts, slots, 3)
    advance_counts_reference(expected, slots, 3)
    assert torch.equal(counts, expected)
    pcm = torch.randn(32, 92160, device="cuda")
    pcm[::5, ::7] = torch.nan
    check_end(pcm)


def test_the_kernels_are_offered_what_they_can_do() -> None:
    frames, decoded = a_state((4,), torch.int64)
    slots = torch.tensor([0])
    assert begin_chunk.is_supported(frames, decoded, slots, 3)
    assert not begin_chunk.is_supported(frames[:, ::2], decoded, slots, 3)
    assert end_chunk.is_supported(torch.zeros(2, 9, dtype=torch.float16), slots)
    assert not end_chunk.is_supported(torch.zeros(2, 9, dtype=torch.float64), slots)
    assert not end_chunk.is_supported(torch.zeros(2, 9)[:, ::2], slots)
    assert not end_chunk.is_supported(torch.zeros(2, 0), slots)
