import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from without_gpu import in_the_interpreter

from sonoro.ops.activation import snake_beta_rates
from sonoro.ops.conv import (
    Epilogue,
    LeftContext,
    conv,
    conv_kernel,
    conv_reference,
)
from sonoro.ops.conv_tiles import ConvTile, choose_tile, smaller_tile
from sonoro.ops.device import TYPICAL

# One rounding of the result in each dtype; float16 and bfloat16 inputs are the same for both sides.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CASES = {
    "dilated": {"shape": (2, 5, 32, 48), "taps": 7, "dilation": 3, "left": 4, "residual": True, "snake": True},
    "affine": {"shape": (2, 5, 32, 16), "left": 4, "residual": True, "affine": True, "snake": True},
    "no context after": {"shape": (3, 9, 32, 16), "taps": 7, "snake": True},
    "transposed": {"shape": (2, 3, 32, 64), "taps": 2, "dilation": -1, "period": 16, "left": 6, "snake": True},
    "whole": {"shape": (2, 3, 32, 64), "taps": 2, "dilation": -1, "period": 16, "left": 6, "is_streamed": False},
    "norm and gate": {"shape": (1, 1, 64, 96), "norm_eps": 1e-5, "function": "gate", "period": None},
    "gelu": {"shape": (2, 40, 32, 32), "function": "gelu", "residual": True},
    "96 outputs": {
        "shape": (1, 70, 32, 96),
        "taps": 3,
        "dilation": 9,
        "left": 2,
        "tile": ConvTile(32, 64, 32, 32, 4, 2),
    },
}


def make(case, dtype, device):
    """The arguments of a case, twice the same, with columns history that must be overwritten or read."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    batch, columns, channels, outputs = case["shape"]
    taps, dilation, left = case.get("taps", 1), case.get("dilation", 1), case.get("left", 0)
    length = (taps - 1) * abs(dilation)
    is_gate = case.get("function") == "gate"
    period = case.get("period", outputs)
    x = draw(batch, length + columns, channels).to(dtype)
    weight = (draw(taps, outputs, channels) / (taps * channels) ** 0.5).to(dtype)
    bias = None if period is None else draw(period).to(dtype)
    width = period or outputs // (2 if is_gate else 1)
    options = {
        "norm_eps": case.get("norm_eps"),
        "function": case.get("function", "none"),
        "residual": draw(batch, columns, outputs) if case.get("residual") else None,
        "plain": torch.float32,
        "affine": (1 + 0.3 * draw(width), draw(width)) if case.get("affine") else None,
        "rates": snake_beta_rates(0.5 * draw(width), 0.5 * draw(width)) if case.get("snake") else None,
    }
    context = None
    if case.get("is_streamed", True):
        history, next_history = draw(6, length, channels).to(dtype), draw(6, left, width).to(dtype)
        slots = torch.tensor([3, 1, 4])[:batch]
        context = LeftContext(slots, history if length else None, next_history if left else None, left)
    context = context or LeftContext(left=left)
    return _to(device, (x, weight, bias, dilation, context, Epilogue(**options)))


def _to(device, arguments):
    def move(value):
        if isinstance(value, torch.Tensor):
            return value.clone().to(device)
        if isinstance(value, tuple):
            return type(value)(*map(move, value)) if isinstance(value, Epilogue) else tuple(map(move, value))
        if isinstance(value, LeftContext):
            return LeftContext(*(move(item) for item in (value.slots, value.history, value.next_history)), value.left)
        return value

    return move(arguments)


def check_kernel(device, dtypes):
    for name, case in CASES.items():
        for dtype in dtypes:
            results = []
            for function, tile in ((conv_kernel, {"tile": case.get("tile")}), (conv_reference, {})):
                arguments = make(case, dtype, device)
                plain, active = function(*arguments, **tile)
                results.append((plain, active, arguments[4].history))
            for ours, theirs in zip(*results, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    assert ours.dtype == theirs.dtype
                    tolerance = TOLERANCE[dtype]
                    torch.testing.assert_close(
                        ours, theirs, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m
                    )


def check_what_is_beyond_float16(device):
    """It saturates, and what is no number stays so."""
    x, weight = torch.zeros(1, 3, 16, dtype=torch.float16), torch.eye(16, dtype=torch.float16)[None]
    residual = torch.zeros(1, 3, 16)
    residual[0, 0, :3] = torch.tensor([1e6, -1e6, torch.nan])
    for function in (conv_kernel, conv_reference):
        epilogue = Epilogue(residual=residual.to(device), plain=torch.float16)
        for made in function(x.to(device), weight.to(device), epilogue=epilogue):
            assert str(made[0, 0, :4].tolist()) == "[65504.0, -65504.0, nan, 0.0]"


def check_offsets_of_64_bits(device):
    """Those of large results; to the bit as with 32."""
    results = []
    for most in (2**31 - 1, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sonoro.ops.conv.MOST_INT32", most)
            results.append(conv_kernel(*make(CASES["dilated"], torch.float16, device)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True) if ours is not None)


@in_the_interpreter
def test_interpreted():
    # The interpreter multiplies no bfloat16.
    check_kernel("cpu", [torch.float32, torch.float16])
    check_what_is_beyond_float16("cpu")
    check_offsets_of_64_bits("cpu")


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_a_gpu():
    check_kernel("cuda", [torch.float32, torch.float16, torch.bfloat16])
    check_what_is_beyond_float16("cuda")
    check_offsets_of_64_bits("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "channels", "outputs", "taps"), [(3, 1024, 1536, 7), (640, 384, 384, 7), (8192, 96, 96, 7)]
)
def test_the_chosen_tiles_compute_the_reference(rows, channels, outputs, taps):
    case = {"shape": (1, rows, channels, outputs), "taps": taps, "snake": True}
    arguments = make(case, torch.bfloat16, "cuda")
    for ours, theirs in zip(conv_kernel(*arguments), conv_reference(*arguments), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dilation", [1, 3])
def test_the_reference_is_a_dilated_convolution(dilation):
    x, weight, bias = draw(2, 20, 6), draw(4, 6, 7), draw(4)
    length = 6 * dilation
    joined = F.pad(x, (0, 0, length, 0))
    plain, active = conv_reference(
        joined, weight.permute(2, 0, 1), bias, dilation, epilogue=Epilogue(plain=torch.float64)
    )
    expected = F.conv1d(joined.mT, weight, bias, dilation=dilation).mT
    torch.testing.assert_close(plain, expected, atol=1e-13, rtol=0)
    assert torch.equal(active, plain)


def test_two_taps_backwards_are_a_transposed_convolution():
    x, weight, bias = draw(2, 9, 6), draw(6, 4, 10), draw(4)
    taps = weight.permute(2, 1, 0).unflatten(0, (2, 5)).flatten(1, 2)
    _, active = conv_reference(F.pad(x, (0, 0, 1, 0)), taps, bias, -1)
    expected = F.conv_transpose1d(x.mT, weight, bias, stride=5)[..., :45].mT
    torch.testing.assert_close(active, expected, atol=1e-13, rtol=0)


def test_norm_gate_residual_and_snake_come_in_their_order():
    x, weight, residual = draw(1, 3, 8), draw(1, 12, 8), draw(1, 3, 6)
    rates = snake_beta_rates(draw(6), 0.1 * draw(6))
    epilogue = Epilogue(1e-3, "gate", residual, torch.float64, rates=rates)
    plain, active = conv_reference(x, weight, epilogue=epilogue)
    gate, up = (F.rms_norm(x, (8,), eps=1e-3) @ weight[0].mT).unflatten(-1, (6, 2)).unbind(-1)
    expected = F.silu(gate) * up + residual
    torch.testing.assert_close(plain, expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(active, expected + (expected * rates[0]).sin() ** 2 * rates[1], atol=1e-13, rtol=0)
    plain, active = conv_reference(x, weight, epilogue=epilogue._replace(affine=rates[::-1]))
    torch.testing.assert_close(plain, expected, atol=1e-13, rtol=0)
    expected = expected * rates[1] + rates[0]
    torch.testing.assert_close(active, expected + (expected * rates[0]).sin() ** 2 * rates[1], atol=1e-13, rtol=0)


def test_contexts_are_read_and_kept_by_slot():
    x, weight = draw(2, 7, 4), draw(3, 2, 4)
    history, next_history = draw(4, 2, 4), draw(4, 3, 2)
    before, slots = history.clone(), torch.tensor([2, 0])
    _, active = conv_reference(x, weight, None, 1, LeftContext(slots, history, next_history, 3))
    assert active.shape == (2, 3 + 5, 2)
    assert torch.equal(active[:, :3], next_history[slots])
    assert torch.equal(history[slots], x[:, -2:])
    assert torch.equal(history[[1, 3]], before[[1, 3]])
    _, alone = conv_reference(x, weight, None, 1, LeftContext(left=3))
    assert not alone[:, :3].any()
    assert torch.equal(alone[:, 3:], active[:, 3:])


def test_float16_saturates():
    x, weight = torch.full((1, 1, 16), 6e4, dtype=torch.float16), torch.eye(16, dtype=torch.float16)[None] * 2
    plain, active = conv(x, weight, epilogue=Epilogue(plain=torch.float16))
    assert plain.eq(65504).all()
    assert active.eq(65504).all()


def test_a_tile_divides_its_channels_and_wastes_few_rows():
    shapes = [(16, 7), (96, 7), (192, 2), (512, 1), (1024, 7), (4096, 1)]
    for rows, outputs, (channels, taps) in itertools.product(
        [1, 4, 32, 160, 640, 2048, 40960, 491520], [16, 96, 192, 288, 512, 768, 4096, 6144], shapes
    ):
        tile = choose_tile(rows, outputs, channels, taps)
        assert channels % tile.k == 0
        assert tile.k >= 16
        assert tile.m <= max(16, rows)


@pytest.mark.parametrize("card", [*TYPICAL.values(), replace(TYPICAL[9, 0], shared_bytes=65536)], ids=str)
def test_a_tile_fits_its_card(card):
    """Inputs in float32 take twice the room."""
    for rows, outputs, (channels, taps), input_bytes in itertools.product(
        [1, 32, 640, 40960], [16, 96, 192, 512, 6144], [(16, 7), (96, 7), (512, 1), (1024, 7)], [2, 4]
    ):
        tile = choose_tile(rows, outputs, channels, taps, card, input_bytes)
        assert tile.stages == tile.stages_on(card, input_bytes) > 1
        stage_bytes = tile.k * (input_bytes * tile.m + 2 * (tile.n + tile.extra))
        shared = stage_bytes * card.buffers(tile.m, tile.stages)
        assert shared <= card.shared_bytes
        assert channels % tile.k == 0
    # Where there is room, what was measured.
    if card is TYPICAL[9, 0]:
        assert choose_tile(40960, 384, 384, 7, card, 2) == choose_tile(40960, 384, 384, 7)
        for input_bytes in (2, 4):
            assert choose_tile(1536, 3072, 512, 1, card, input_bytes) == choose_tile(1536, 3072, 512, 1)


def test_tiles_become_smaller_to_the_end():
    tile, steps = ConvTile(128, 64, 32, 64, 4, 4), 0
    while (found := smaller_tile(tile)) is not None:
        assert found.m * found.k * found.stages + (found.n + found.extra) * found.k * found.stages < (
            tile.m * tile.k * tile.stages + (tile.n + tile.extra) * tile.k * tile.stages
        )
        tile, steps = found, steps + 1
    assert (tile.m, tile.n, tile.k) == (16, 16, 16)
    assert steps < 12
