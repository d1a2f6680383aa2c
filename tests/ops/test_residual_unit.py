import functools
import itertools

import pytest
import torch
from without_gpu import in_the_interpreter

from sonoro.ops.activation import snake_beta_rates
from sonoro.ops.causal import depthwise_kernel
from sonoro.ops.conv import Epilogue, LeftContext, conv_kernel
from sonoro.ops.conv_tiles import ConvTile
from sonoro.ops.device import TYPICAL
from sonoro.ops.residual_unit import (
    DEPTHWISE_TILES,
    MIN_ELEMENTS,
    MIN_ROWS,
    UnitWeights,
    residual_unit_in_two,
    residual_unit_kernel,
    residual_unit_reference,
    smaller_unit,
    unit_tile,
)

# One rounding of the inner and one of the outer result in each dtype, as in test_conv.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2}
DEPTHWISE = {32: ConvTile(16, 32, 0, 16, 4, 4), 64: DEPTHWISE_TILES[64], 128: ConvTile(32, 128, 0, 32, 8, 7)}
"""One and several programs and chunks of channels."""


def arguments(
    channels, dtype, device, *, dilation=3, is_depthwise=False, is_streamed=True, has_plain=True, has_affine=False
):
    """A unit over two rows of 21 columns, before a layer of 5 columns of left context."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def rates():
        return snake_beta_rates(0.5 * draw(channels), 0.5 * draw(channels))

    if is_depthwise:
        weight = (draw(7, channels) / 7**0.5).to(dtype)
    else:
        weight = (draw(channels, 7, channels) / (7 * channels) ** 0.5).to(dtype).permute(1, 0, 2)
    pointwise = (draw(channels, channels) / channels**0.5).to(dtype)
    weights = UnitWeights(weight, draw(channels, dtype=dtype), rates(), pointwise, draw(channels, dtype=dtype))
    context, length = LeftContext(left=5), 6 * dilation
    if is_streamed:
        slots = torch.tensor([3, 1], device=device)
        history, after = draw(6, length, channels, dtype=dtype), draw(6, 5, channels, dtype=dtype)
        context = LeftContext(slots, history, after, 5)
    epilogue = Epilogue(
        residual=draw(2, 21, channels, dtype=dtype),
        plain=dtype if has_plain else None,
        affine=(1 + 0.3 * draw(channels), draw(channels)) if has_affine else None,
        rates=rates(),
    )
    return draw(2, length + 21, channels, dtype=dtype), weights, dilation, context, epilogue


def check_kernel(device, dtypes, tiles, **kind):
    for (channels, tile), dtype, is_streamed in itertools.product(tiles.items(), dtypes, [True, False]):
        for has_plain in (True, False):
            how = kind | {"is_streamed": is_streamed, "has_plain": has_plain, "has_affine": not has_plain}
            ours, theirs = (arguments(channels, dtype, device, **how) for _ in range(2))
            results = (*residual_unit_kernel(*ours, tile=tile), ours[3].history)
            expected = (*residual_unit_reference(*theirs), theirs[3].history)
            for result, value in zip(results, expected, strict=True):
                assert (result is None) == (value is None)
                if value is not None:
                    torch.testing.assert_close(result, value, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def check_depthwise_kernel(device, dtypes, tiles):
    for dilation in (1, 3, 9):
        check_kernel(device, dtypes, tiles, is_depthwise=True, dilation=dilation)


def check_rounding(tiles):
    """To the bit that of two launches whose product takes the same chunks of channels."""
    for channels, tile in tiles.items():
        given = arguments(channels, torch.float16, "cpu", is_depthwise=True)
        conv = functools.partial(conv_kernel, tile=tile)
        expected = residual_unit_in_two(*given, conv, depthwise_kernel)
        assert all(map(torch.equal, residual_unit_kernel(*given, tile=tile), expected))


def check_what_is_beyond_float16(device):
    """It saturates between the convolutions too, and what is no number stays so."""
    x, weights, _, context, epilogue = arguments(64, torch.float16, device, is_depthwise=True)
    nothing, half = torch.zeros(64, device=device), torch.eye(64, device=device).half() / 2
    weights = weights._replace(
        dilated=8 * weights.dilated.abs() + 8, dilated_bias=nothing.half() + 65504, rates=(weights.rates[0], nothing),
        pointwise=half, pointwise_bias=nothing.half(),
    )  # fmt: skip
    given = x.abs() + 1, weights, 3, context, epilogue._replace(residual=torch.zeros_like(epilogue.residual))
    plain, _ = residual_unit_kernel(*given)
    assert plain.eq(65504 / 2).all()
    given[0][0, 0, 0] = torch.nan
    plain, _ = residual_unit_kernel(*given)
    assert plain[0, 0].isnan().all()
    assert plain[0, 1:].eq(65504 / 2).all()


def check_offsets_of_64_bits(device):
    """Those of large results; to the bit as with 32."""
    results = []
    for most in (2**31 - 1, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sonoro.ops.conv.MOST_INT32", most)
            results.append(residual_unit_kernel(*arguments(64, torch.float16, device, is_depthwise=True)))
    assert all(map(torch.equal, *results))


@in_the_interpreter
def test_interpreted():
    check_kernel("cpu", [torch.float16], {48: ConvTile(32, 32, 16, 16, 4, 2)})
    check_depthwise_kernel("cpu", [torch.float16], DEPTHWISE)
    check_rounding(DEPTHWISE)
    check_what_is_beyond_float16("cpu")
    check_offsets_of_64_bits("cpu")


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_a_gpu():
    check_kernel("cuda", [torch.float16, torch.bfloat16], {96: None, 192: None})
    check_depthwise_kernel("cuda", [torch.float16, torch.bfloat16], dict.fromkeys(DEPTHWISE_TILES))
    check_what_is_beyond_float16("cuda")
    check_offsets_of_64_bits("cuda")


def weights_of(channels, *, is_depthwise=False, dtype=torch.float16):
    """Those that a tile is chosen by."""
    shape = (7, channels) if is_depthwise else (7, channels, channels)
    row, square = torch.empty(channels), torch.empty(channels, channels)
    return UnitWeights(torch.empty(shape, dtype=dtype), row, (row, row), square, row)


def test_one_launch_is_chosen_where_it_is_faster():
    """For few channels and many columns, on a card that holds the tile."""
    hopper, turing = TYPICAL[9, 0], TYPICAL[7, 5]
    for channels, rows in MIN_ROWS.items():
        assert unit_tile(rows, weights_of(channels), hopper)
        assert unit_tile(rows - 1, weights_of(channels), hopper) is None
    assert unit_tile(MIN_ROWS[192], weights_of(384), hopper) is None
    assert unit_tile(MIN_ROWS[192], weights_of(192), turing) is None


def test_one_launch_with_a_depthwise_convolution_is_chosen_where_it_is_faster():
    """For few channels and many elements in half precision, on a card whose registers hold the tile."""
    hopper, turing = TYPICAL[9, 0], TYPICAL[7, 5]
    for channels in (32, 64, 128):
        weights, rows = weights_of(channels, is_depthwise=True), MIN_ELEMENTS // channels
        assert unit_tile(rows, weights, hopper)
        assert unit_tile(rows - 1, weights, hopper) is None
        assert unit_tile(rows, weights_of(channels), hopper) is None
        assert unit_tile(rows, weights_of(channels, is_depthwise=True, dtype=torch.float32), hopper) is None
        assert unit_tile(rows, weights, turing) is None
    assert unit_tile(MIN_ROWS[192], weights_of(128, is_depthwise=True), TYPICAL["gfx1100"]) is None
    assert unit_tile(MIN_ROWS[192], weights_of(256, is_depthwise=True), hopper) is None


@pytest.mark.parametrize("channels", DEPTHWISE_TILES)
def test_a_depthwise_tile_has_all_channels_in_chunks(channels):
    tile = DEPTHWISE_TILES[channels]
    assert (tile.n, tile.extra) == (channels, 0)
    assert channels % tile.k == 0


def test_tiles_become_smaller_to_the_end():
    tile, sizes = unit_tile(MIN_ROWS[192], weights_of(192), TYPICAL[9, 0]), []
    while tile is not None:
        sizes.append((tile.stages, tile.m))
        tile = smaller_unit(tile)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == (2, 16)
