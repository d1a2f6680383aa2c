import itertools

import pytest
import torch
from without_gpu import in_the_interpreter

from sonoro.ops.activation import snake_beta_rates
from sonoro.ops.conv import Epilogue, LeftContext
from sonoro.ops.conv_tiles import ConvTile
from sonoro.ops.device import TYPICAL
from sonoro.ops.residual_unit import (
    MIN_ROWS,
    UnitWeights,
    residual_unit_kernel,
    residual_unit_reference,
    smaller_unit,
    unit_tile,
)

# One rounding of the inner and one of the outer result in each dtype, as in test_conv.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2}


def arguments(channels, dtype, device, *, is_streamed=True, has_plain=True, has_affine=False):
    """A unit of dilation 3 over two rows of 21 columns, before a layer of 5 columns of left context."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def rates():
        return snake_beta_rates(0.5 * draw(channels), 0.5 * draw(channels))

    weight = (draw(channels, 7, channels) / (7 * channels) ** 0.5).to(dtype).permute(1, 0, 2)
    pointwise = (draw(channels, channels) / channels**0.5).to(dtype)
    weights = UnitWeights(weight, draw(channels, dtype=dtype), rates(), pointwise, draw(channels, dtype=dtype))
    context = LeftContext(left=5)
    if is_streamed:
        slots = torch.tensor([3, 1], device=device)
        history, after = draw(6, 18, channels, dtype=dtype), draw(6, 5, channels, dtype=dtype)
        context = LeftContext(slots, history, after, 5)
    epilogue = Epilogue(
        residual=draw(2, 21, channels, dtype=dtype),
        plain=dtype if has_plain else None,
        affine=(1 + 0.3 * draw(channels), draw(channels)) if has_affine else None,
        rates=rates(),
    )
    return draw(2, 18 + 21, channels, dtype=dtype), weights, 3, context, epilogue


def check_kernel(device, dtypes, tiles):
    for (channels, tile), dtype, is_streamed in itertools.product(tiles.items(), dtypes, [True, False]):
        for has_plain in (True, False):
            how = {"is_streamed": is_streamed, "has_plain": has_plain, "has_affine": not has_plain}
            ours, theirs = (arguments(channels, dtype, device, **how) for _ in range(2))
            results = (*residual_unit_kernel(*ours, tile=tile), ours[3].history)
            expected = (*residual_unit_reference(*theirs), theirs[3].history)
            for result, value in zip(results, expected, strict=True):
                assert (result is None) == (value is None)
                if value is not None:
                    torch.testing.assert_close(result, value, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@in_the_interpreter
def test_interpreted():
    check_kernel("cpu", [torch.float16], {48: ConvTile(32, 32, 16, 16, 4, 2)})


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_a_gpu():
    check_kernel("cuda", [torch.float16, torch.bfloat16], {96: None, 192: None})


def test_one_launch_is_chosen_where_it_is_faster():
    """For few channels and many columns, on a card that holds the tile."""
    hopper, turing = TYPICAL[9, 0], TYPICAL[7, 5]
    assert unit_tile(MIN_ROWS, 96, hopper)
    assert unit_tile(MIN_ROWS, 192, hopper)
    assert unit_tile(MIN_ROWS - 1, 96, hopper) is None
    assert unit_tile(MIN_ROWS, 384, hopper) is None
    assert unit_tile(MIN_ROWS, 192, turing) is None


def test_tiles_become_smaller_to_the_end():
    tile, sizes = unit_tile(MIN_ROWS, 192, TYPICAL[9, 0]), []
    while tile is not None:
        sizes.append((tile.stages, tile.m))
        tile = smaller_unit(tile)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == (2, 16)
