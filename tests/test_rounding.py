"""That products round by their shape, for a test that asks for it: rows beside others, and the same rows alone."""

import pytest
import torch
from rounding import rounding_by_shape

__all__ = ["rounding_by_shape"]

ROWS, WEIGHT = (
    torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (0, 1)
)


@pytest.mark.usefixtures("rounding_by_shape")
def test_a_row_beside_others_is_not_what_it_is_alone() -> None:
    beside, alone = ROWS @ WEIGHT, ROWS[:1] @ WEIGHT
    assert not torch.equal(beside[:1], alone)
    torch.testing.assert_close(beside[:1], alone, rtol=1e-14, atol=0)
    assert torch.equal(ROWS @ WEIGHT, beside)
