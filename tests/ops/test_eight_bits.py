"""Products with weights in 8 bits: the kernels against their references, and these against weights that are rounded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from without_gpu import in_the_interpreter

from sonoro.ops.eight_bits import dequantized, quantize
from sonoro.ops.linear import (
    linear,
    linear_add,
    linear_add_kernel,
    linear_add_reference,
    linear_kernel,
    linear_reference,
    norm_gate_up,
    norm_gate_up_kernel,
    norm_gate_up_reference,
    norm_linear,
    norm_linear_kernel,
    norm_linear_reference,
)
from sonoro.ops.plans import LIMITS, CublasPlan, GemvPlan, Plan, TilePlan

EPS = 1e-6
FORMATS = ("int8", "fp8")
PLANS: list[Plan] = [
    GemvPlan(4, 32, 1),
    TilePlan(16, 16, 16, 1, 1, 2, 1, True),
    TilePlan(16, 16, 16, 2, 1, 2, 2, False),
    TilePlan(32, 16, 16, 1, 2, 2, 1, False),
    TilePlan(16, 16, 16, 1, 1, 2, 1, True, is_swapped=True),
    TilePlan(32, 16, 16, 2, 1, 2, 2, False, is_swapped=True),
    CublasPlan(),
]
Case = tuple[Callable[..., Tensor], Callable[..., Tensor], tuple]


def cases(
    batch: int, shape: tuple[int, int], quantization: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Case]:
    """(kernel, reference, arguments) of the four."""
    (outputs, inputs), _ = shape, torch.manual_seed(batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    x, residual, gain = normal(batch, inputs).to(dtype), normal(batch, outputs).to(dtype), 1 + 0.2 * normal(inputs)
    # Rows of very different sizes: one scale for all would lose the small ones.
    rows = torch.logspace(-2, 1, 2 * outputs, device=device)[:, None] / inputs**0.5
    both, both_scale = quantize(rows * normal(2 * outputs, inputs), quantization)
    one, scale = both[::2].contiguous(), both_scale[::2].contiguous()
    return [
        (linear_kernel, linear_reference, (x, one, scale)),
        (norm_linear_kernel, norm_linear_reference, (x, gain.to(dtype), EPS, one, scale)),
        (norm_gate_up_kernel, norm_gate_up_reference, (x, gain.to(dtype), EPS, both, both_scale)),
        (linear_add_kernel, linear_add_reference, (x, one, residual, scale)),
    ]


def widened(arguments: tuple) -> tuple:
    """`arguments` in float64, but for weights in 8 bits."""
    return tuple(
        value.double() if isinstance(value, Tensor) and value.dtype.itemsize > 1 else value for value in arguments
    )


def check(kernel: Callable[..., Tensor], reference: Callable[..., Tensor], arguments: tuple, plan: Plan | None) -> None:
    found, expected = kernel(*arguments, plan=plan), reference(*widened(arguments))
    assert found.dtype == arguments[0].dtype
    # Sums of some products in another order; in 16 bits some roundings of a step each.
    limit = {torch.float32: 4e-6, torch.float16: 2**-8, torch.bfloat16: 2**-5}[found.dtype]
    assert float((found.double() - expected).norm() / expected.norm()) < limit, (kernel, plan)
    if found.dtype == torch.float32:
        # Row by row, as the largest would hide the others.
        apart = (found.double() - expected).norm(dim=0) / expected.norm(dim=0)
        assert float(apart.max()) < 4e-5


@in_the_interpreter
def test_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    check_parts_for_the_library(monkeypatch)
    monkeypatch.undo()
    for quantization in FORMATS:
        for outputs, inputs, batch in ((16, 64, 3), (19, 40, 17)):
            for case in cases(batch, (outputs, inputs), quantization):
                for plan in PLANS:
                    is_split = isinstance(plan, TilePlan) and plan.split_k > 1
                    if not (is_split and (inputs % 32 or case[0] is norm_gate_up_kernel)):
                        check(*case, plan)
        for dtype in (torch.bfloat16, torch.float16):
            for case in cases(3, (19, 40), quantization, dtype):
                for plan in PLANS[:3]:
                    check(*case, plan)


def check_parts_for_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonoro.ops.linear._WIDENED_AT_ONCE", 128 * 40)
    monkeypatch.setattr("sonoro.ops.linear._GATED_AT_ONCE", 8)
    for quantization in FORMATS:
        for case in cases(17, (300, 40), quantization):
            check(*case, CublasPlan())


@pytest.mark.parametrize("quantization", FORMATS)
def test_rows_are_stored_as_each_is_alone(quantization: str) -> None:
    """Of a weight that is too large to be widened at once."""
    weight = torch.randn(2100, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored, scale = quantize(weight, quantization)
    for row in (0, 2047, 2048, 2099):
        alone, own = quantize(weight[row : row + 1], quantization)
        assert torch.equal(stored[row : row + 1].float(), alone.float())
        assert torch.equal(scale[row : row + 1], own)


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_channel_is_rounded_to_the_nearest_of_its_own_steps(quantization: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 96) * torch.logspace(-4, 2, 64)[:, None]
    weight[3] = 0
    stored, scale = quantize(weight, quantization)
    assert stored.dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[quantization]
    found, largest = dequantized(stored, scale, torch.float32), weight.abs().amax(dim=1, keepdim=True)
    # Half a step of 127 in all, or of 8 in each power of two (and of 2^-9 below the least), and rounding.
    step = largest / 254 if quantization == "int8" else (weight.abs() / 16).maximum(largest / 448 * 2**-10)
    assert bool(((found - weight).abs() <= 1.0001 * step).all())
    torch.testing.assert_close(found.abs().amax(dim=1, keepdim=True), largest, rtol=1e-6, atol=0)
    # Symmetric: the other sign is stored with the other sign.
    assert torch.equal(quantize(-weight, quantization)[0].float(), -stored.float())


class Made(TorchDispatchMode):
    """Notes the bytes of each tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **kwargs or {})
        self.bytes += [made.nbytes] if isinstance(made, Tensor) else []
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_for_the_library_is_never_in_32_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for quantization in FORMATS:
        weight, scale = quantize(torch.randn(64, 96) * torch.logspace(-3, 1, 64)[:, None], quantization)
        with Made() as made:
            found = dequantized(weight, scale, dtype)
        assert torch.equal(found, (weight.float() * scale[:, None]).to(dtype)), "rounded once"
        assert max(made.bytes) <= 64 * 96 * 2


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_references_serve(quantization: str, dtype: torch.dtype) -> None:
    operations = (linear, norm_linear, norm_gate_up, linear_add)
    for operation, (_, reference, arguments) in zip(operations, cases(3, (24, 32), quantization, dtype), strict=True):
        assert torch.equal(operation(*arguments), reference(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("shape", [(4096, 2048), (6144, 2560), (2048, 1024)], ids=str)
def test_the_kernels_equal_the_references_on_a_gpu(quantization: str, shape: tuple[int, int]) -> None:
    if quantization == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products of E4M3 want compute capability 8.9")
    with torch.inference_mode():
        for batch in (*LIMITS, 3, 17, 65):
            for case in cases(batch, shape, quantization, torch.bfloat16, "cuda"):
                check(*case, None)
