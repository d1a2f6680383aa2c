"""The watch for what cannot be captured sees the ways in which a value leaves the host, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from capture import device_only
from torch import Tensor

ROWS = torch.zeros(4, 3, device="meta")
INDEX = torch.zeros(2, dtype=torch.int64, device="meta")


def assign(rows: Tensor, index: Tensor) -> None:
    rows[index, index] = 1.0


@pytest.mark.parametrize(
    "step",
    [
        assign,
        lambda rows, index: rows + torch.tensor([1.0, 2.0, 3.0], device="meta"),
        lambda rows, index: rows.index_select(0, torch.zeros(2, dtype=torch.int64)),
        lambda rows, index: rows.copy_(torch.zeros(4, 3)),
    ],
)
def test_what_copies_from_the_host_is_refused(step: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="copies from the host"), device_only():
        step(ROWS.clone(), INDEX)


def test_numbers_that_are_arguments_of_a_kernel_are_allowed() -> None:
    with device_only():
        rows = (2.0 ** (ROWS + 1.0)).masked_fill(ROWS > 0, 0.0).clamp(0, 1)
        rows.index_fill_(0, INDEX, 1.0)
        rows[INDEX, INDEX] = rows[INDEX, 0]
        rows[:, -1].fill_(False)
