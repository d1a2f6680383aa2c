from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from without_gpu import in_the_interpreter

from sonoro.ops.clear import clear_rows, clear_rows_kernel, clear_rows_reference

CASES: list[tuple[int, list[tuple[tuple[int, ...], torch.dtype]]]] = [
    # Rows of one word and of part of a block, of many blocks and of exactly one; of 32, 16 and 8 bits.
    (
        5,
        [
            ((), torch.int64),
            ((3, 7), torch.float16),
            ((71, 300), torch.bfloat16),
            ((4096,), torch.float32),
            ((2151,), torch.bool),
            ((1,), torch.bool),
            ((2, 1), torch.float16),
            ((5000,), torch.int8),
            ((3,), torch.float64),
        ],
    ),
    (1, [((2, 3), torch.float32)]),
]


def given(device: str, slots: int, sizes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Tensors of `slots` rows without a zero."""
    return [torch.ones((slots, *shape), device=device).to(dtype) for shape, dtype in sizes]


def check_kernel(device: str) -> None:
    for slots, sizes in CASES:
        for cleared in ([slots - 1], [0, slots - 1, slots - 1, slots // 2]):
            index = torch.tensor(cleared, device=device)
            ours, theirs = given(device, slots, sizes), given(device, slots, sizes)
            assert clear_rows.is_supported(index, ours)
            clear_rows_kernel(index, ours)
            clear_rows_reference(index, theirs)
            for tensor, expected in zip(ours, theirs, strict=True):
                assert torch.equal(tensor, expected), (tensor.dtype, tensor.shape, cleared)


@in_the_interpreter
def test_interpreted() -> None:
    check_kernel("cpu")


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_a_gpu() -> None:
    check_kernel("cuda")


def test_the_rows_of_the_slots_alone_are_zeroed() -> None:
    slots, sizes = CASES[0]
    tensors = given("cpu", slots, sizes)
    clear_rows(torch.tensor([4, 1, 4]), tensors)
    for tensor in tensors:
        is_zero = (tensor.flatten(1) == 0) if tensor.ndim > 1 else (tensor == 0)[:, None]
        assert is_zero.all(1).tolist() == is_zero.any(1).tolist() == [False, True, False, False, True]


def test_rows_that_are_not_dense_are_left_to_the_reference() -> None:
    wide, index = torch.ones(3, 8), torch.tensor([1])
    assert not clear_rows.is_supported(index, [torch.ones(3, 4), wide[:, :4]])
    assert not clear_rows.is_supported(index, [torch.ones(3, 0)])
    clear_rows(index, [wide[:, :4], torch.ones(3, 0)])
    assert wide.sum(1).tolist() == [8, 4, 8]
