"""Guidance, and a solver's step: references against what is known of them, the kernel against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from without_gpu import INTERPRETED, device_only, in_the_interpreter

from sonoro.ops.flow import PatchProjections, SolverStep, advance, advance_kernel, advance_reference, guide

# Of the largest value: float32 sums in another order; some roundings in bfloat16, which the interpreter truncates where
# a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1 if INTERPRETED else 4e-2}
CLOCK = 2


def test_guidance_of_one_is_the_conditional_velocity() -> None:
    conditional, free = torch.randn(2, 4, 4, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(guide(conditional, free, torch.ones(4)), conditional)
    # The free one is scaled by its projection: a multiple of the other is the other.
    torch.testing.assert_close(guide(conditional, -3 * conditional, torch.full((4,), 5.0)), conditional)


def test_guidance_is_what_its_formula_says() -> None:
    """Row by row: the free velocity at its best scale, and as many times the way from it as asked for."""
    conditional, free = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cfg = torch.tensor([1.5, 2.0, 3.0])
    found = guide(conditional, free, cfg)
    for row in range(3):
        scale = (conditional[row] * free[row]).sum() / (free[row] ** 2).sum()
        expected = scale * free[row] + cfg[row] * (conditional[row] - scale * free[row])
        torch.testing.assert_close(found[row], expected)


def case(
    batch: int, dtype: torch.dtype, *, device: str = "cpu", shape: tuple[int, int] = (4, 8), width: int = 40
) -> tuple[Any, ...]:
    """Arguments of `advance`: sizes and times are columns of wider tables, as a solver has them."""
    patch, latents = shape
    make = torch.Generator().manual_seed(batch)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=make).to(device, dtype)

    projections = PatchProjections(random(width, latents), random(width), random(latents))
    return (
        random(batch, patch, latents),
        random(2 * batch * patch, latents),
        SolverStep(random(batch, 9)[:, 3], torch.linspace(1, 3, batch).to(device), random(batch, 9, width)[:, 4]),
        projections,
        random(2 * batch, 3 + 2 * patch, width),
        CLOCK,
    )


def test_a_step_goes_against_the_guided_velocity() -> None:
    """Float64, row by row; the tokens of both halves say where it ended and what time it is, and nothing else moves."""
    given = case(3, torch.float64)
    x, velocities, (size, cfg, time), projections, tokens, _ = given
    before = tokens.clone()
    found = advance(*given)
    guided, free = velocities.view(2, 3, 4, 8) + projections.out_bias
    for row in range(3):
        one = slice(row, row + 1)
        expected = x[row] - size[row] * guide(guided[one], free[one], cfg[one])[0]
        torch.testing.assert_close(found[row], expected, atol=1e-12, rtol=0)
        made = expected @ projections.weight.T + projections.bias
        for half in (row, 3 + row):
            torch.testing.assert_close(tokens[half, -4:], made, atol=1e-12, rtol=0)
            assert torch.equal(tokens[half, CLOCK], time[row])
    still = [0, 1, 3, 4, 5, 6]
    assert torch.equal(tokens[:, still], before[:, still])


def test_without_velocities_it_stays_where_it_is() -> None:
    x, _, *rest = case(2, torch.float32)
    found = advance(x, None, *rest)
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()
    _, projections, tokens, _ = rest
    torch.testing.assert_close(tokens[2:, -4:], x @ projections.weight.T + projections.bias)


def test_it_may_be_captured() -> None:
    given = case(2, torch.float32, device="meta")
    with device_only():
        assert advance(*given).shape == (2, 4, 8)


def check(given: tuple[Any, ...]) -> None:
    ours, theirs = (tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in given) for _ in "12")
    found = (advance_kernel(*ours), ours[4])
    for result, expected in zip(found, (advance_reference(*theirs), theirs[4]), strict=True):
        tolerance = TOLERANCE[result.dtype] * float(expected.abs().max())
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=0)


@in_the_interpreter
def test_interpreted() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(case(3, dtype))
        check(case(2, dtype, shape=(4, 64), width=96))
        check(case(1, dtype, shape=(3, 20), width=64))
        x, _, *rest = case(2, dtype)
        check((x, None, *rest))
        # Sizes of nothing: the patch stays, bit by bit.
        given = list(case(2, dtype))
        given[2] = given[2]._replace(size=torch.zeros_like(given[2].size))
        assert torch.equal(advance_kernel(*given), given[0])


@pytest.mark.parametrize(
    ("change", "is_supported"),
    [
        ({}, True),
        ({"dtype": torch.bfloat16}, True),
        ({"dtype": torch.float64}, False),
        ({"shape": (33, 8)}, False),
        ({"shape": (4, 129)}, False),
    ],
)
def test_the_kernel_is_offered_what_it_can_do(change: dict[str, Any], is_supported: bool) -> None:
    given = {"batch": 2, "dtype": torch.float32} | change
    x, _, *rest = case(**given)
    assert advance.is_supported(*case(**given)) == is_supported
    assert advance.is_supported(x, None, *rest) == is_supported


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3, 64])
@torch.inference_mode()
def test_it_equals_the_reference_on_a_gpu(batch: int, dtype: torch.dtype) -> None:
    given = case(batch, dtype, device="cuda", shape=(4, 64), width=1024)
    check(given)
    found = advance_kernel(*given)
    for _ in range(10):
        assert torch.equal(advance_kernel(*given), found)
