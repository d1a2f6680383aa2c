import pytest
import torch
from processes import run_without_triton
from without_gpu import in_the_interpreter

from sonoro.ops.activation import snake_beta, snake_beta_kernel, snake_beta_rates, snake_beta_reference, snake_rates

# Rounding of the result in the dtype of x; the float32 interior adds little, sin of arguments near 10 about 1e-6.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def make(shape, channels, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    alpha, beta = (0.5 * torch.randn(channels, generator=generator, dtype=torch.float64) for _ in range(2))
    rates = snake_beta_rates(alpha, beta)
    if dtype != torch.float64:
        rates = tuple(rate.float() for rate in rates)
    return x.to(dtype).to(device), *(rate.to(device) for rate in rates)


def check_kernel(device):
    """The kernel against the reference: layouts, dtypes, a last block in part, one column, one channel."""
    cases = [((2, 3, 700), 1), ((2, 700, 3), -1), ((1, 96, 50), 1), ((3, 17, 1), 1), ((2, 1, 9), 1), ((1, 4500, 2), -1)]
    for shape, channel_dim in cases:
        for dtype, tolerance in TOLERANCE.items():
            arguments = (*make(shape, shape[channel_dim], dtype, device), channel_dim)
            out, expected = snake_beta_kernel(*arguments), snake_beta_reference(*arguments)
            assert out.dtype == dtype
            torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    x, rate, scale = make((2, 700, 3), 3, device=device)
    transposed = snake_beta_kernel(x.mT, rate, scale)
    assert transposed.stride() == x.mT.stride()
    torch.testing.assert_close(transposed, snake_beta_reference(x.mT, rate, scale), atol=2e-6, rtol=2e-6)


def test_the_reference_follows_the_formula_on_either_side():
    x, _, _ = make((2, 3, 5), 3, torch.float64)
    alpha, beta = torch.tensor([0.3, -0.2, 0.0]).double(), torch.tensor([-0.1, 0.4, 0.2]).double()
    expected = torch.stack(
        [x[:, c] + (x[:, c] * alpha[c].exp()).sin() ** 2 / (beta[c].exp() + 1e-9) for c in range(3)], dim=1
    )
    rates = snake_beta_rates(alpha, beta)
    torch.testing.assert_close(snake_beta_reference(x, *rates), expected, atol=1e-14, rtol=0)
    torch.testing.assert_close(snake_beta_reference(x.mT, *rates, channel_dim=-1), expected.mT, atol=1e-14, rtol=0)


def test_snake_is_the_same_function_of_its_own_rates():
    x, alpha = make((2, 3, 5), 3, torch.float64)[0], torch.tensor([0.3, -1.2, 40.0]).double()
    expected = torch.stack([x[:, c] + (x[:, c] * alpha[c]).sin() ** 2 / (alpha[c] + 1e-9) for c in range(3)], dim=1)
    torch.testing.assert_close(snake_beta(x, *snake_rates(alpha)), expected, atol=1e-14, rtol=0)
    assert [rate.dtype for rate in snake_rates(alpha.bfloat16())] == [torch.float32, torch.float32]


def test_half_precision_is_computed_in_float32():
    x, rate, scale = make((2, 3, 50), 3, torch.bfloat16)
    assert torch.equal(snake_beta_reference(x, rate, scale), snake_beta_reference(x.float(), rate, scale).bfloat16())


def test_gradients_reach_the_input_and_both_parameters():
    x, alpha, beta = make((2, 3, 4), 3, torch.float64)
    leaves = [tensor.detach().log() if tensor.ndim == 1 else tensor for tensor in (x, alpha, beta)]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(lambda x, a, b: snake_beta(x, *snake_beta_rates(a, b)), leaves)


@in_the_interpreter
def test_interpreted():
    check_kernel("cpu")


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_a_gpu():
    check_kernel("cuda")


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors that say they are on a GPU, and how often a stand-in for the kernel has been called there."""

    class Elsewhere(torch.Tensor):
        is_cuda = True

    calls = []
    monkeypatch.setattr(snake_beta, "is_broken", False)
    monkeypatch.setattr(snake_beta, "kernel", lambda *args: calls.append(1) or snake_beta_reference(*args))
    x, *rates = make((2, 3, 50), 3)
    return (x.as_subclass(Elsewhere), *rates), calls


def test_the_kernel_serves_a_gpu_unless_gradients_are_wanted(on_gpu):
    (x, *rates), calls = on_gpu
    with torch.no_grad():
        snake_beta(x, *rates)
    assert len(calls) == 1
    snake_beta(x.requires_grad_(), *rates).sum().backward()
    assert len(calls) == 1
    assert x.grad is not None


def test_the_reference_serves_what_the_kernel_cannot_index(on_gpu):
    (x, *rates), calls = on_gpu
    with torch.no_grad():
        snake_beta(x[:, :, ::2], *rates)
        snake_beta(x[:, :, :0], *rates)
    assert not calls


@pytest.mark.gpu
def test_the_kernel_serves_a_real_gpu():
    arguments = make((2, 3, 50), 3, device="cuda")
    with torch.no_grad():
        snake_beta.check(lambda: arguments, TOLERANCE[torch.float32])
        torch.testing.assert_close(snake_beta(*arguments), snake_beta_reference(*arguments), atol=2e-6, rtol=2e-6)
    assert not snake_beta.is_broken


def test_without_triton_the_module_works():
    code = (
        "import torch; from sonoro.ops.activation import snake_beta, snake_beta_reference\n"
        "assert snake_beta.is_broken\n"
        "x, a = torch.randn(1, 2, 3), torch.ones(2)\n"
        "assert torch.equal(snake_beta(x, a, a), snake_beta_reference(x, a, a))"
    )
    run = run_without_triton(code)
    assert run.returncode == 0, run.stderr
