"""Fused products against their references: every way to run one, odd sizes, real sizes, graphs, early starts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from processes import run_without_triton
from torch import Tensor
from without_gpu import in_the_interpreter

from sonoro.compile.variants import Variant, card_named, recording
from sonoro.ops.device import TYPICAL
from sonoro.ops.linear import (
    gate_up_kernel,
    gate_up_reference,
    joins_norm,
    linear_add,
    linear_add_kernel,
    linear_add_norm_kernel,
    linear_add_norm_reference,
    linear_add_reference,
    linear_kernel,
    norm_gate_up,
    norm_gate_up_kernel,
    norm_gate_up_reference,
    norm_linear,
    norm_linear_kernel,
    norm_linear_reference,
)
from sonoro.ops.norm import rms_norm, rms_norm_kernel, rms_norm_reference
from sonoro.ops.plans import CublasPlan, GemvPlan, Plan, TilePlan, from_text, measured, plan_for, smaller

EPS = 1e-6
BFLOAT16_STEP = 2**-8

SMALL_PLANS = [
    GemvPlan(4, 32, 1),
    TilePlan(16, 16, 16, 1, 1, 2, 1, True),
    TilePlan(16, 16, 16, 2, 1, 2, 2, False),
    TilePlan(32, 16, 16, 2, 1, 2, 2, False),
    TilePlan(32, 16, 16, 1, 4, 2, 1, True),
    TilePlan(32, 32, 16, 1, 1, 2, 2, False),
    TilePlan(16, 16, 16, 1, 1, 2, 1, True, has_tma=True),
    TilePlan(32, 32, 16, 1, 4, 2, 2, False, has_tma=True),
    CublasPlan(),
]

TMA_PLANS = ["tile 128 128 64 1 1 4 8 tma", "tile 64 64 128 1 1 3 4 tma prefetch", "tile 64 64 64 1 2 3 4 tma"]


def can_serve(plan: Plan, kernel: object, inputs: int) -> bool:
    """Gated products are not split."""
    if not isinstance(plan, TilePlan):
        return True
    return not (plan.split_k > 1 and (inputs == 40 or kernel is norm_gate_up_kernel))


# Outputs, inputs: the layers of a backbone 2048 wide, of a depth model 1024 wide, and of both 2560 wide; their heads.
NORM_SHAPES = [(4096, 2048), (3072, 2048), (4096, 1024), (2048, 1024), (6144, 2560), (4096, 2560), (4097, 2560)]
NORM_SHAPES += [(2560, 2048), (2560, 1024)]
GATE_SHAPES = [(12288, 2048), (6144, 1024), (19456, 2560), (8192, 1024)]
ADD_SHAPES = [(2048, 2048), (2048, 6144), (1024, 2048), (1024, 3072), (2560, 4096), (2560, 9728), (1024, 4096)]


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def operations(
    batch: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[tuple]:
    """(kernel, reference, arguments) of the three, with `x` a part of longer rows."""
    torch.manual_seed(batch)
    x = normal(batch, inputs + 16, dtype=dtype, device=device)[:, :inputs]
    gain = (1 + 0.2 * normal(inputs, device=device)).to(dtype)
    weight, both = ((normal(rows, inputs, device=device) / inputs**0.5).to(dtype) for rows in (outputs, 2 * outputs))
    residual = normal(batch, outputs, dtype=dtype, device=device)
    return [
        (norm_linear_kernel, norm_linear_reference, (x, gain, EPS, weight)),
        (norm_gate_up_kernel, norm_gate_up_reference, (x, gain, EPS, both)),
        (linear_add_kernel, linear_add_reference, (x, weight, residual)),
    ]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def widened(arguments: tuple) -> tuple:
    return tuple(value.double() if isinstance(value, Tensor) else value for value in arguments)


def test_the_references_follow_the_formulas() -> None:
    torch.manual_seed(0)
    x, gain, weight, residual = (
        normal(3, 8).double(),
        normal(8).double(),
        normal(10, 8).double(),
        normal(3, 10).double(),
    )
    normed = x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt() * gain
    product = torch.einsum("bk,nk->bn", normed, weight)
    gate, up = product[:, :5], product[:, 5:]
    torch.testing.assert_close(rms_norm_reference(x, gain, 0.01), normed)
    torch.testing.assert_close(norm_linear_reference(x, gain, 0.01, weight), product)
    torch.testing.assert_close(norm_gate_up_reference(x, gain, 0.01, weight), gate / (1 + (-gate).exp()) * up)
    torch.testing.assert_close(
        linear_add_reference(x, weight, residual), residual + torch.einsum("bk,nk->bn", x, weight)
    )


def test_the_norm_of_float32_on_a_cpu_is_the_same_function() -> None:
    torch.manual_seed(0)
    for scale in (1e-20, 1e-3, 1.0, 1e15):
        x, gain = scale * normal(4, 48), normal(48)
        expected = F.rms_norm(x.double(), (48,), None, EPS) * gain.double()
        torch.testing.assert_close(rms_norm_reference(x, gain, EPS).double(), expected, rtol=5e-7, atol=1e-30)


def test_the_norm_can_be_trained_after_it_was_used_for_inference() -> None:
    x, gain = normal(2, 24, dtype=torch.float32).requires_grad_(), torch.ones(24)
    with torch.inference_mode():
        rms_norm(x, gain, 3e-5)
    rms_norm(x, gain, 3e-5).sum().backward()
    assert x.grad is not None


def test_on_a_cpu_the_references_run_whatever_the_layout_of_the_weight() -> None:
    torch.manual_seed(0)
    x, gain, weight, residual = normal(2, 12), normal(12), normal(6, 12), normal(2, 6)
    by_column = weight.t().contiguous().t()
    for stored in (weight, by_column):
        assert torch.equal(norm_linear(x, gain, EPS, stored), norm_linear_reference(x, gain, EPS, stored))
        assert torch.equal(norm_gate_up(x, gain, EPS, stored), norm_gate_up_reference(x, gain, EPS, stored))
        assert torch.equal(linear_add(x, stored, residual), linear_add_reference(x, stored, residual))


def check_joined(x: Tensor, weight: Tensor, residual: Tensor, gain: Tensor, plan: Plan | None) -> None:
    """A product, the sum with the residual and the norm of that are, to the bit, what they are apart."""
    total, normed = linear_add_norm_kernel(x, weight, residual, gain, EPS, plan=plan)
    assert torch.equal(total, linear_add_kernel(x, weight, residual, plan=plan))
    assert torch.equal(normed, rms_norm_kernel(total, gain, EPS))


def check_joined_small(device: str) -> None:
    sizes = ((1, 48, 64, torch.float32), (5, 33, 64, torch.bfloat16), (35, 48, 64, torch.float32))
    for batch, outputs, inputs, dtype in sizes:
        for plan in (plan for plan in SMALL_PLANS if can_serve(plan, linear_add_kernel, inputs)):
            _, (*_, (_, _, _, both)), (*_, given) = operations(batch, outputs, inputs, dtype, device)
            gain = (1 + 0.2 * normal(outputs, device=device)).to(dtype)
            # Triton's interpreter rounds to bfloat16 towards zero, where the library's sum does not.
            if dtype == torch.float32 or device != "cpu":
                check_joined(*given, gain, plan)
            found = linear_add_norm_kernel(*given, gain, EPS, plan=plan)
            for ours, expected in zip(found, linear_add_norm_reference(*widened((*given, gain)), EPS), strict=True):
                assert error(ours, expected) < 8 * BFLOAT16_STEP
            if can_serve(plan, norm_gate_up_kernel, inputs):
                x = given[0].contiguous()
                assert error(gate_up_kernel(x, both, plan=plan), gate_up_reference(*widened((x, both)))) < 0.03


def check_small(device: str) -> None:
    """Kernels against references: every kind, one and several blocks of rows, part blocks on every axis."""
    for outputs, inputs, batches in ((16, 64, (3,)), (19, 40, (1, 2, 4, 5, 17))):
        for batch in batches:
            for kernel, reference, arguments in operations(batch, outputs, inputs, device=device):
                expected = reference(*arguments)
                for plan in SMALL_PLANS:
                    if not can_serve(plan, kernel, inputs):
                        continue
                    found = kernel(*arguments, plan=plan)
                    # Sums of 64 products near 1, in another order.
                    torch.testing.assert_close(found, expected, atol=4e-6, rtol=4e-6)
    for kernel, reference, arguments in operations(3, 19, 40, torch.bfloat16, device):
        for plan in (plan for plan in SMALL_PLANS if can_serve(plan, kernel, 40)):
            found, expected = kernel(*arguments, plan=plan), reference(*widened(arguments))
            assert found.dtype == torch.bfloat16
            # Up to eight roundings of a step each: Triton's interpreter rounds to bfloat16 towards zero.
            assert error(found, expected) < 8 * BFLOAT16_STEP
    x, gain = normal(5, 72, device=device)[:, :40], normal(40, device=device)
    torch.testing.assert_close(rms_norm_kernel(x, gain, EPS), rms_norm_reference(x, gain, EPS), atol=2e-6, rtol=2e-6)
    check_joined_small(device)


@in_the_interpreter
def test_interpreted() -> None:
    check_small("cpu")


@pytest.mark.parametrize(
    ("card", "plan", "columns", "has_tma"),
    [
        ("NVIDIA H200", "tile 64 64 32 1 1 3 4 tma", (80, 0), True),
        ("NVIDIA H200", "tile 64 64 32 1 1 3 4 tma prefetch", (80, 8), True),
        ("NVIDIA B200", "tile 64 64 32 1 2 3 4 tma", (80, 0), True),
        ("NVIDIA H200", "tile 64 64 32 1 1 3 4", (80, 0), False),
        # A first row, or the next ones, that are not at 16 bytes.
        ("NVIDIA H200", "tile 64 64 32 1 1 3 4 tma", (80, 4), False),
        ("NVIDIA H200", "tile 64 64 32 1 1 3 4 tma", (76, 0), False),
        ("NVIDIA H200", "tile 64 64 32 2 1 3 4 tma", (80, 0), False),
        ("NVIDIA H200", "tile 64 64 32 1 1 3 4 tma swapped", (80, 0), False),
        ("NVIDIA L4", "tile 64 64 32 1 1 3 4 tma", (80, 0), False),
    ],
)
def test_where_tma_cannot_load_tiles_pointers_do(card: str, plan: str, columns: tuple[int, int], has_tma: bool) -> None:
    """`columns`: of the rows that `x` is a part of, and the first that it takes."""
    pytest.importorskip("triton")
    variants: list[Variant] = []
    width, first = columns
    with recording(card_named(card), variants.append), torch.inference_mode():
        x = torch.empty(100, width, dtype=torch.bfloat16, device="meta")[:, first : first + 64]
        weight = torch.empty(128, 64, dtype=torch.bfloat16, device="meta")
        linear_kernel(x, weight, plan=from_text(plan))
        if has_tma:
            linear_kernel(x, weight.to(torch.int8), torch.empty(128, device="meta"), plan=from_text(plan))
    kernels = [variant.kernel.rpartition(":")[2] for variant in variants if "reduce" not in variant.kernel]
    assert kernels == (["_tma_tile_kernel", "_tile_kernel"] if has_tma else ["_tile_kernel"])
    names = [name for name, _ in variants[0].signature]
    constants = {names[path[0]]: value for path, value in variants[0].constants}
    assert [constants[f"BLOCK_{axis}"] for axis in "MNK"] == [64, 64, 32]


def test_without_triton_the_references_serve() -> None:
    code = (
        "import torch; from sonoro.ops.linear import linear_add, norm_gate_up, norm_linear\n"
        "assert norm_linear.is_broken and norm_gate_up.is_broken and linear_add.is_broken\n"
        "x, w = torch.randn(1, 4), torch.ones(4)\n"
        "assert norm_linear(x, w, 1e-6, torch.ones(6, 4)).shape == (1, 6)"
    )
    run = run_without_triton(code)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("plan", SMALL_PLANS)
def test_where_a_plan_cannot_be_launched_there_is_a_smaller_one_down_to_the_library(plan: Plan) -> None:
    steps = 0
    while not isinstance(plan, CublasPlan):
        found = smaller(plan)
        assert found is not None
        plan, steps = found, steps + 1
    assert smaller(plan) is None
    assert steps < 10


def test_measured_plans_are_of_the_shapes_that_models_have() -> None:
    assert set(measured(TYPICAL[9, 0])) == {*NORM_SHAPES, *GATE_SHAPES, *ADD_SHAPES}
    for (rows, inputs), row in measured(TYPICAL[9, 0]).items():
        for plan in row:
            if isinstance(plan, TilePlan):
                assert plan.warps % plan.slice_k == 0
                assert inputs % (plan.split_k * plan.slice_k * plan.block_k) == 0
                assert plan.split_k == 1 or (rows, inputs) not in GATE_SHAPES


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [3, 16, 64, 128, 256, 1408])
def test_a_norm_after_a_sum_changes_no_bit(batch: int) -> None:
    joined = []
    for outputs, inputs in ADD_SHAPES:
        *_, (_, _, given) = operations(batch, outputs, inputs, torch.bfloat16, "cuda")
        gain = 1 + 0.2 * normal(outputs, dtype=torch.bfloat16, device="cuda")
        check_joined(*given, gain, None)
        joined.append(joins_norm(given[0], given[1]))
    assert any(joined)


def cases(batch: int) -> list[tuple]:
    found = []
    for shapes, index in ((NORM_SHAPES, 0), (GATE_SHAPES, 1), (ADD_SHAPES, 2)):
        for rows, inputs in shapes:
            outputs = rows // 2 if index == 1 else rows
            found.append(operations(batch, outputs, inputs, torch.bfloat16, "cuda")[index])
    return found


def tuned(arguments: tuple, kernel: object) -> Plan:
    """The plan the kernel chooses by itself."""
    weight = arguments[1] if kernel is linear_add_kernel else arguments[3]
    return plan_for(arguments[0].shape[0], weight, kernel is norm_gate_up_kernel)


@pytest.mark.gpu
def test_the_kernels_equal_the_references_on_a_gpu() -> None:
    check_small("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 16, 31, 64, 128, 200, 256])
def test_real_sizes_are_as_exact_as_the_references(batch: int) -> None:
    for kernel, reference, arguments in cases(batch):
        exact = reference(*widened(arguments))
        assert error(kernel(*arguments), exact) < 1.05 * error(reference(*arguments), exact) + 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 8, 32, 64, 128, 256])
def test_an_early_start_changes_no_bit(batch: int) -> None:
    for kernel, _, arguments in cases(batch):
        plan = tuned(arguments, kernel)
        late = kernel(*arguments, plan=replace(plan, enable_pdl=False))
        for _ in range(3):
            assert torch.equal(kernel(*arguments, plan=plan), late)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_batch() -> None:
    for batch, fewer in ((16, 5), (32, 20), (64, 40), (128, 70)):
        for kernel, _, arguments in cases(batch):
            if isinstance(plan := tuned(arguments, kernel), CublasPlan):
                continue
            short = tuple(
                value[:fewer] if isinstance(value, Tensor) and value.shape[0] == batch else value for value in arguments
            )
            assert torch.equal(kernel(*short, plan=plan), kernel(*arguments, plan=plan)[:fewer])


@pytest.mark.gpu
@pytest.mark.parametrize("text", TMA_PLANS)
@pytest.mark.parametrize("batch", [64, 200, 256])
def test_tiles_by_tma_are_as_exact_as_the_references(text: str, batch: int) -> None:
    """And change no bit with an early start, or with fewer rows beside: outputs and rows that end within a tile, `x` a
    part of longer rows."""
    plan = from_text(text)
    for index, outputs, inputs in ((0, 4097, 2560), (1, 3072, 1024), (2, 1024, 3072), (2, 1000, 2048)):
        kernel, reference, arguments = operations(batch, outputs, inputs, torch.bfloat16, "cuda")[index]
        if not can_serve(plan, kernel, inputs):
            continue
        exact, found = reference(*widened(arguments)), kernel(*arguments, plan=plan)
        assert error(found, exact) < 1.05 * error(reference(*arguments), exact) + 1e-4
        late = kernel(*arguments, plan=replace(plan, enable_pdl=False))
        for _ in range(3):
            assert torch.equal(kernel(*arguments, plan=plan), late)
        few = tuple(value[:37] if isinstance(value, Tensor) and len(value) == batch else value for value in arguments)
        assert torch.equal(kernel(*few, plan=plan), late[:37])


def chain(x: Tensor, layers: list[tuple], plan: Plan | None = None) -> Tensor:
    for gain, qkv, o, gate_up, down in layers:
        heads = norm_linear_kernel(x, gain, EPS, qkv, plan=plan)
        x = linear_add_kernel(heads[:, : o.shape[1]], o, x, plan=plan)
        x = linear_add_kernel(norm_gate_up_kernel(x, gain, EPS, gate_up, plan=plan), down, x, plan=plan)
    return x


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "text"), [*((batch, "") for batch in (1, 2, 8, 32, 64, 128)), (200, TMA_PLANS[0])])
def test_replays_of_a_captured_chain_equal_the_eager_chain(batch: int, text: str) -> None:
    """Copies of memory before, between and after, buffers used again, and inputs that change between replays."""
    torch.manual_seed(0)
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
    bfloat16 = {"dtype": torch.bfloat16, "device": "cuda"}
    layers = [
        (torch.ones(1024, **bfloat16), *(normal(*shape, **bfloat16) / shape[1] ** 0.5 for shape in shapes))
        for _ in range(6)
    ]
    given, x, out = (torch.zeros(batch, 1024, **bfloat16) for _ in range(3))
    plan = from_text(text) if text else None

    def frame() -> None:
        x.copy_(given)
        out.copy_(chain(x, layers[:3], plan))
        out.copy_(chain(out, layers[3:], plan))

    frame()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        frame()
    for _ in range(20):
        given.copy_(normal(batch, 1024, **bfloat16))
        expected = chain(given, layers, plan).clone()
        graph.replay()
        assert torch.equal(out, expected)
    assert error(out, chain(given, layers, CublasPlan(enable_pdl=False))) < 0.05
