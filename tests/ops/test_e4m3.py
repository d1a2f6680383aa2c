"""Products of rows and weights that are both in E4M3: the kernels against their references, and these against rows and
weights that are not rounded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interpreter import in_the_interpreter
from sonoro.models import registry
from sonoro.nn.linear import NormedRows
from sonoro.ops.device import CARDS, recorded
from sonoro.ops.dispatch import Operation, _difference
from sonoro.ops.e4m3 import (
    e4m3_linear,
    e4m3_linear_add_norm,
    e4m3_linear_add_norm_kernel,
    e4m3_linear_add_norm_reference,
    e4m3_linear_kernel,
    e4m3_linear_reference,
    quantize_rows,
    quantize_rows_kernel,
    quantize_rows_reference,
    takes_e4m3,
)
from sonoro.ops.eight_bits import dequantized, quantize
from sonoro.ops.plans import TilePlan
from sonoro.runtime.variants import Variant, card_named, recording

EPS = 1e-6
PLANS = [
    TilePlan(16, 16, 32, 1, 1, 2, 1, True),
    TilePlan(32, 32, 32, 1, 2, 2, 2, False),
    TilePlan(16, 32, 64, 1, 1, 2, 1, False, is_swapped=True),
    TilePlan(32, 16, 32, 1, 4, 2, 1, False, is_swapped=True),
]
Made = Callable[..., Tensor]


def normal(batch: int, device: str = "cpu") -> Made:
    generator = torch.Generator(device).manual_seed(batch)
    return lambda *shape: torch.randn(shape, device=device, generator=generator)


def operands(make: Made, batch: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows of very different sizes and a weight, each with its scale."""
    outputs, inputs = shape
    rows = make(batch, inputs) * torch.logspace(-2, 1, batch, device=make(1).device)[:, None]
    return *quantize_rows_reference(rows.to(dtype)), *quantize(make(outputs, inputs) / inputs**0.5, "fp8")


def assert_near(found: Tensor, expected: Tensor, limit: float) -> None:
    """Row by row, as the largest would hide the others."""
    apart = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert float(apart.max()) < limit, apart


def check_rounded(found: list[Tensor], expected: list[Tensor]) -> None:
    """Scales equal, and numbers the same or neighbours, as what is to be rounded may differ by a rounding."""
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0)
    values = found[0].float()
    # Triton's interpreter rounds 127.9 to 64: it does not carry from the mantissa to the exponent.
    values = torch.where(2 * values == expected[0].float(), 2 * values, values)
    assert _difference(values.to(torch.float8_e4m3fn), expected[0]) == 0


def check_rows() -> None:
    """Rows are rounded as weights are, wherever they lie; zeros too."""
    for width in (64, 100):
        make = normal(width)
        x, gain = make(5, 2 * width)[:, :width], 1 + 0.2 * make(width)
        x[2] = 0
        for norm in ((), (gain, EPS)):
            found, expected = quantize_rows_kernel(x, *norm), quantize_rows_reference(x, *norm)
            check_rounded([*found], [*expected])


@in_the_interpreter
def test_interpreted() -> None:
    check_rows()
    for batch, (outputs, inputs) in ((3, (64, 128)), (17, (128, 256))):
        make = normal(batch)
        residual, gain = make(batch, outputs), 1 + 0.2 * make(outputs)
        given = operands(make, batch, (outputs, inputs), torch.float32)
        for plan in PLANS:
            for rest in (None, residual):
                product = e4m3_linear_kernel(*given, torch.float32, rest, plan=plan)
                # Sums in another order.
                assert_near(product, e4m3_linear_reference(*given, torch.float32, rest), 4e-6)
            if plan.split_k == 1:
                gated = e4m3_linear_kernel(*given, torch.float32, is_gated=True, plan=plan)
                assert_near(gated, e4m3_linear_reference(*given, torch.float32, is_gated=True), 4e-6)
            total, *found = e4m3_linear_add_norm_kernel(*given, residual, gain, EPS, plan)
            expected, *normed = e4m3_linear_add_norm_reference(*given, residual, gain, EPS)
            assert_near(total, expected, 4e-6)
            check_rounded(found, normed)


def test_what_rows_stand_for_is_near_them() -> None:
    """Within half a step of each power of two, as of weights."""
    x = normal(0)(6, 512)
    values, scale = quantize_rows_reference(x)
    error = (dequantized(values, scale, torch.float32) - x).abs()
    assert bool((error <= (x.abs() / 16).maximum(scale[:, None] * 2**-10) * 1.001).all())
    # Of a sum of many products: a sixteenth, spread evenly in each power of two, is 2.6% of each factor.
    weight = normal(1)(64, 512) / 512**0.5
    product = e4m3_linear_reference(values, scale, *quantize(weight, "fp8"), torch.float32)
    noise = (product - x @ weight.T).norm() / (x @ weight.T).norm()
    assert 0.03 < float(noise) < 0.045


def test_neighbours_of_e4m3_do_not_differ() -> None:
    found, expected = (torch.tensor(numbers).to(torch.float8_e4m3fn) for numbers in ([448.0, 1, 0], [416.0, 1.125, 0]))
    assert _difference(found, expected) == 0
    assert _difference(found, (-expected.float()).to(torch.float8_e4m3fn)) > 1
    assert _difference(found, (expected.float() * 0.8).to(torch.float8_e4m3fn)) > 0.1


def test_on_a_cpu_the_references_serve() -> None:
    x, gain = normal(0)(3, 64), normal(1)(64)
    assert all(map(torch.equal, quantize_rows(x, gain, EPS), quantize_rows_reference(x, gain, EPS)))


def test_rows_in_float32_keep_their_digits() -> None:
    with recorded(CARDS["NVIDIA H200"]):
        weight = torch.empty((2048, 6144), dtype=torch.float8_e4m3fn, device="meta")
        for dtype, is_rounded in ((torch.bfloat16, True), (torch.float32, False)):
            assert takes_e4m3(torch.empty((64, 6144), dtype=dtype, device="meta"), weight) == is_rounded


@pytest.mark.parametrize("operation", [quantize_rows, e4m3_linear, e4m3_linear_add_norm], ids=lambda one: one.name)
def test_rows_stay_in_16_bits_once_a_kernel_is_disabled(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = (torch.empty(of, device="meta") for of in ((64, 6144), (2048, 6144)))
    given = rows.bfloat16(), weight.to(torch.float8_e4m3fn)
    with recorded(CARDS["NVIDIA H200"]):
        assert takes_e4m3(*given)
        monkeypatch.setattr(operation, "is_broken", True)
        assert not takes_e4m3(*given)


def test_the_kernel_is_offered_what_it_can_do() -> None:
    with recorded(CARDS["NVIDIA H200"]):
        values, weight = (torch.empty(of, dtype=torch.float8_e4m3fn, device="meta") for of in ((4, 96), (64, 96)))
        given = (values, torch.empty(4, device="meta"), weight, torch.empty(64, device="meta"), torch.bfloat16)
        for residual, is_supported in ((torch.empty(4, 64), True), (torch.empty(64, 4).T, False)):
            assert e4m3_linear.is_supported(*given, residual) == is_supported
        assert not e4m3_linear.is_supported(values, given[1], weight[:40], *given[3:])


def test_short_prompts_round_rows_by_kernels_that_a_start_has_checked() -> None:
    """Of few slots, no batch is so large that it rounds its rows; prompts are."""
    on, checked, served = card_named("NVIDIA H200"), list[Variant](), list[Variant]()
    with recording(on, checked.append), torch.inference_mode():
        how = {"dtype": "bfloat16", "load_format": "dummy", "quantization": "fp8"}
        stack = registry.load("qwen3-tts-1.7b-customvoice", device=torch.device("meta"), **how).model.backbone
        layer = stack.layers[0]
        layer.check_kernels(1)
    with recording(on, served.append), torch.inference_mode():
        for rows in (32, 64):
            x = torch.empty(rows, stack.config.width, dtype=torch.bfloat16, device="meta")
            heads = torch.empty(rows, layer.self_attn.o_proj.in_features, dtype=torch.bfloat16, device="meta")
            layer.project(NormedRows(x))
            layer.complete(x, heads, layer.input_layernorm)
    rounding = {variant for variant in served if "e4m3" in variant.kernel}
    assert {variant.kernel.rpartition(":")[2] for variant in rounding} == {"_quantize_kernel", "_e4m3_tile_kernel"}
    assert rounding <= {*checked}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 6144), (2560, 9728), (12288, 2048), (192, 96)], ids=str)
def test_the_kernels_equal_the_references_on_a_gpu(shape: tuple[int, int]) -> None:
    """The tensor cores sum E4M3 in fewer bits than float32: a part in a thousand of these sums, below the roundings of
    bfloat16; and what is rounded to E4M3 after may be a neighbour of what the reference makes of the same sums."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products of E4M3 want compute capability 8.9")
    with torch.inference_mode():
        for batch in (1, 5, 17, 33, 64, 100):
            make = normal(batch, "cuda")
            given = operands(make, batch, shape, torch.bfloat16)
            residual, gain = make(batch, shape[0]).bfloat16(), (1 + 0.2 * make(shape[0])).bfloat16()
            for rest, is_gated in ((None, False), (residual, False), (None, True)):
                more = (torch.bfloat16, rest, is_gated)
                assert_near(e4m3_linear_kernel(*given, *more), e4m3_linear_reference(*given, *more), 2**-6)
            found, expected = (
                product(*given, residual, gain, EPS)
                for product in (e4m3_linear_add_norm_kernel, e4m3_linear_add_norm_reference)
            )
            assert_near(found[0], expected[0], 2**-6)
            # Of the kernel's own sums: where the largest of a row is another by a rounding of bfloat16, so is the row's
            # scale, and its numbers are rounded elsewhere. The norm's roundings may differ, by two of bfloat16.
            values, scale = quantize_rows_reference(found[0], gain, EPS)
            assert _difference(found[1], values) == 0
            torch.testing.assert_close(found[2], scale, rtol=2**-7, atol=0)
