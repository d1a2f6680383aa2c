"""Normal noise by address: what it is made of, its distribution, and that each number depends on its address alone."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from without_gpu import device_only, in_the_interpreter

from sonoro.ops.sample import normal_noise, normal_noise_kernel, normal_noise_reference, philox_words


def rows(*values: int) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(("seed", "segment", "frame"), [(0, 0, 0), (2**62 + 5, 3, 41), (7, 1, 4095)])
def test_noise_is_addressed_as_documented(seed: int, segment: int, frame: int) -> None:
    """The numbers of one row, pair by pair, in plain Python."""
    noise = normal_noise(rows(1, seed), rows(0, segment), rows(5, frame), 11)
    assert noise.shape == (2, 11)
    assert noise.dtype == torch.float32
    expected: list[float] = []
    for block in range(3):
        counter = [rows(number) for number in (block, 0, frame, segment)]
        words = [int(word) for word in philox_words(counter, (rows(seed), rows(seed >> 32)))]
        for first, second in (words[:2], words[2:]):
            u, v = (((word >> 9) + 0.5) / 2**23 for word in (first, second))
            distance = math.sqrt(-2 * math.log(u))
            expected += [distance * math.cos(2 * math.pi * v), distance * math.sin(2 * math.pi * v)]
    # Float32: angles of up to 6.3, rounded, times distances of up to 5.8.
    np.testing.assert_allclose(noise[1].numpy(), expected[:11], atol=5e-6)


def test_noise_of_an_address_does_not_depend_on_what_else_is_drawn() -> None:
    seed, segment, frame = torch.arange(6) * 7919, torch.arange(6) % 3, torch.arange(6) * 31
    whole = normal_noise(seed, segment, frame, 256)
    for row in range(6):
        one = slice(row, row + 1)
        assert torch.equal(normal_noise(seed[one], segment[one], frame[one], 31)[0], whole[row, :31])


def test_every_part_of_the_address_changes_the_noise() -> None:
    start = normal_noise(rows(5), rows(2), rows(7), 256)
    for seed, segment, frame in ((6, 2, 7), (5 + 2**40, 2, 7), (5, 3, 7), (5, 2, 8)):
        assert (normal_noise(rows(seed), rows(segment), rows(frame), 256) == start).float().mean() < 0.02


def test_noise_is_normal_and_neighbours_are_uncorrelated() -> None:
    """A million numbers: moments within five standard errors, and the tails of a normal distribution."""
    number = torch.arange(4096)
    noise = normal_noise(number % 64, torch.zeros_like(number), number // 64, 256).double()
    count = noise.numel()
    for power, expected, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((noise**power).mean()) - expected) < 5 * math.sqrt(spread / count), power
    for size in (1.0, 2.0, 3.0):
        share = math.erfc(size / math.sqrt(2))
        assert abs(float((noise.abs() > size).double().mean()) - share) < 5 * math.sqrt(share / count), size
    by_seed = noise.view(64, 64, 256)
    pairs = [(noise[:, :-1], noise[:, 1:]), (by_seed[:-1], by_seed[1:]), (by_seed[:, :-1], by_seed[:, 1:])]
    for left, right in pairs:
        assert abs(float((left * right).mean())) < 5 / math.sqrt(left.numel())


def test_drawing_may_be_captured() -> None:
    given = torch.empty(3, dtype=torch.int64, device="meta")
    with device_only():
        assert normal_noise(given, given, given, 256).shape == (3, 256)


def check_kernel(rows: int, count: int, device: str = "cpu") -> None:
    """Seeds and segments are columns of wider rows, as a step has them."""
    number = torch.arange(rows)
    columns = torch.stack((number * (2**61 + 12345), number % 3, number), dim=1).to(device)
    address = (columns[:, 0], columns[:, 1], torch.arange(rows, device=device) * 31)
    found = normal_noise_kernel(*address, count)
    # Float32: angles of up to 6.3, rounded, times distances of up to 5.8.
    torch.testing.assert_close(found, normal_noise_reference(*address, count), atol=5e-6, rtol=0)
    for row in range(0, rows, 5):
        one = [part[row : row + 1] for part in address]
        assert torch.equal(normal_noise_kernel(*one, 31)[0], found[row, :31])


@in_the_interpreter
def test_interpreted() -> None:
    for count in (32, 256, 301):
        check_kernel(7, count)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
@torch.inference_mode()
def test_the_kernel_equals_the_reference_on_a_gpu(rows: int) -> None:
    check_kernel(rows, 256, device="cuda")
