"""Products of rows and weights that are both in E4M3: the kernels against their references, and these against rows and
weights that are not rounded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from without_gpu import in_the_interpreter

from sonoro.compile.variants import Variant, card_named, recording
from sonoro.models import registry
from sonoro.nn.linear import NormedRows
from sonoro.ops.device import CARDS, recorded
from sonoro.ops.dispatch import Operation, _difference
from sonoro.ops.e4m3 import (
    dequantized_rows,
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
from sonoro.ops.eight_bits import quantize
from sonoro.ops.plans import TilePlan

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


def operands(make: Made, batch: int, shape: tuple[int, int], dtype: torch.dtype, terms: int) -> tuple[Tensor, ...]:
    """Rows of very different sizes and a weight, each with its scale."""
    outputs, inputs = shape
    rows = make(batch, inputs) * torch.logspace(-2, 1, batch, device=make(1).device)[:, None]
    weight = quantize(make(outputs, inputs) / inputs**0.5, "fp8")
    return *quantize_rows_reference(rows.to(dtype), terms=terms), *weight


def assert_near(found: Tensor, expected: Tensor, limit: float) -> None:
    """Row by row, as the largest would hide the others."""
    apart = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert float(apart.max()) < limit, apart


def check_quantized(found: list[Tensor], expected: list[Tensor]) -> None:
    """Scales equal, and one term the same or a neighbour, as what is to be rounded may differ by a rounding; of two the
    sums, as the second makes up for the first."""
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0)
    values, terms = found[0].float(), expected[0].float()
    # Triton's interpreter rounds 127.9 to 64: it does not carry from the mantissa to the exponent, in any term.
    is_carried = ((values != terms) & (2 * values == terms)).any(dim=1, keepdim=True)
    assert float(is_carried.float().mean()) < 0.1
    values = torch.where(is_carried, terms, values)
    assert _difference(values.to(torch.float8_e4m3fn), expected[0]) <= (0 if terms.shape[1] == 1 else 2**-9)


def check_rows(terms: int) -> None:
    """Rows are quantised wherever they lie; zeros too."""
    for width in (64, 100):
        make = normal(width)
        x, gain = make(5, 2 * width)[:, :width], 1 + 0.2 * make(width)
        x[2] = 0
        for given in ((x, None, 0.0, terms), (x, gain, EPS, terms)):
            found, expected = quantize_rows_kernel(*given), quantize_rows_reference(*given)
            check_quantized([*found], [*expected])


@in_the_interpreter
def test_interpreted() -> None:
    for terms in (1, 2):
        check_rows(terms)
        check_products(terms)


def check_products(terms: int) -> None:
    for batch, (outputs, inputs) in ((3, (64, 128)), (17, (128, 256))):
        make = normal(batch)
        residual, gain = make(batch, outputs), 1 + 0.2 * make(outputs)
        given = operands(make, batch, (outputs, inputs), torch.float32, terms)
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
            check_quantized(found, normed)


@pytest.mark.parametrize("terms", [1, 2])
def test_what_rows_stand_for_is_near_them(terms: int) -> None:
    """Each term halves the rest four times, down to half of the smallest number: two are as near as bfloat16."""
    x = normal(0)(6, 512)
    values, scale = quantize_rows_reference(x, terms=terms)
    error = (dequantized_rows(values, scale, torch.float32) - x).abs()
    assert bool((error <= (x.abs() / 16**terms).maximum(scale[:, None] * 2**-10) * 1.001).all())
    is_near = float(error.norm() / x.norm()) < float((x.bfloat16() - x).norm() / x.norm()) < 2**-9
    assert is_near == (terms == 2)
    # A sixteenth, spread evenly in each power of two, is 2.6%: of a product so is its weight, and a row of one term.
    weight = normal(1)(64, 512) / 512**0.5
    rounded, plain = (quantize(weight, "fp8"), (weight, torch.ones(64)))
    limits = {1: ((rounded, 0.03, 0.045), (plain, 0.02, 0.03)), 2: ((rounded, 0.02, 0.03), (plain, 0.0, 2**-9))}
    for quantized, least, most in limits[terms]:
        product = e4m3_linear_reference(values, scale, *quantized, torch.float32)
        noise = (product - x @ weight.T).norm() / (x @ weight.T).norm()
        assert least < float(noise) < most


def test_neighbours_of_one_term_do_not_differ() -> None:
    found, expected = (
        torch.tensor([[numbers]]).to(torch.float8_e4m3fn) for numbers in ([448.0, 1, 0], [416.0, 1.125, 0])
    )
    assert _difference(found, expected) == 0
    assert _difference(found, (-expected.float()).to(torch.float8_e4m3fn)) > 1
    assert _difference(found, (expected.float() * 0.8).to(torch.float8_e4m3fn)) > 0.1


def test_two_terms_are_compared_by_what_they_stand_for() -> None:
    """Where the first was rounded to a neighbour, the second makes up for it."""
    found, expected, first = (
        torch.tensor([terms]).to(torch.float8_e4m3fn)
        for terms in ([[448.0, 1], [-16, 0]], [[416.0, 1.125], [16, -0.125]], [[416.0, 1.125], [0, 0]])
    )
    assert _difference(found, expected) == 0
    assert _difference(found, first) > 2**-5


def test_on_a_cpu_the_references_serve() -> None:
    x, gain = normal(0)(3, 64), normal(1)(64)
    assert all(map(torch.equal, quantize_rows(x, gain, EPS), quantize_rows_reference(x, gain, EPS)))


def test_rows_in_float32_keep_their_digits() -> None:
    with recorded(CARDS["NVIDIA H200"]):
        weight = torch.empty((2048, 6144), dtype=torch.float8_e4m3fn, device="meta")
        for dtype, is_rounded in ((torch.bfloat16, True), (torch.float32, False)):
            assert takes_e4m3(torch.empty((64, 6144), dtype=dtype, device="meta"), weight, 1) == is_rounded


@pytest.mark.parametrize("operation", [quantize_rows, e4m3_linear, e4m3_linear_add_norm], ids=lambda one: one.name)
def test_rows_stay_in_16_bits_once_a_kernel_is_disabled(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = (torch.empty(of, device="meta") for of in ((64, 6144), (2048, 6144)))
    given = rows.bfloat16(), weight.to(torch.float8_e4m3fn)
    with recorded(CARDS["NVIDIA H200"]):
        assert takes_e4m3(*given, 1)
        monkeypatch.setattr(operation, "is_broken", True)
        assert not takes_e4m3(*given, 1)


def test_the_kernel_is_offered_what_it_can_do() -> None:
    with recorded(CARDS["NVIDIA H200"]):
        values, weight = (torch.empty(of, dtype=torch.float8_e4m3fn, device="meta") for of in ((4, 2, 96), (64, 96)))
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
@pytest.mark.parametrize("terms", [1, 2])
def test_the_kernels_equal_the_references_on_a_gpu(terms: int, shape: tuple[int, int]) -> None:
    """The tensor cores sum E4M3 in fewer bits than float32: a part in a thousand of these sums, below the roundings of
    bfloat16; and what is quantised after is, of the same sums, what the reference makes of them or a neighbour, and of
    two terms within a rounding of bfloat16."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products of E4M3 want compute capability 8.9")
    with torch.inference_mode():
        for batch in (1, 5, 17, 33, 64, 100):
            make = normal(batch, "cuda")
            given = operands(make, batch, shape, torch.bfloat16, terms)
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
            values, scale = quantize_rows_reference(found[0], gain, EPS, terms)
            torch.testing.assert_close(found[2], scale, rtol=2**-7, atol=0)
            if terms == 1:
                assert _difference(found[1], values) == 0
            else:
                normed = [dequantized_rows(*rows, torch.float32) for rows in (found[1:], (values, scale))]
                assert_near(*normed, 2**-8)
