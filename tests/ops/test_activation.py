import logging
import subprocess
import sys

import pytest
import torch

from interpreter import in_the_interpreter, interpret
from sonoro.ops import activation
from sonoro.ops.activation import SnakeBeta, snake_beta, snake_beta_kernel, snake_beta_rates, snake_beta_reference

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


def test_half_precision_is_computed_in_float32():
    x, rate, scale = make((2, 3, 50), 3, torch.bfloat16)
    assert torch.equal(snake_beta_reference(x, rate, scale), snake_beta_reference(x.float(), rate, scale).bfloat16())


def test_gradients_reach_the_input_and_both_parameters():
    x, alpha, beta = make((2, 3, 4), 3, torch.float64)
    leaves = [tensor.detach().log() if tensor.ndim == 1 else tensor for tensor in (x, alpha, beta)]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(lambda x, a, b: snake_beta(x, *snake_beta_rates(a, b)), leaves)


def test_the_kernel_equals_the_reference_in_the_interpreter():
    interpret(__file__)


@in_the_interpreter
def test_interpreted():
    check_kernel("cpu")


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_a_gpu():
    check_kernel("cuda")


class PretendedGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU, so that the choice of a path is tested without one."""

    is_cuda = True


@pytest.fixture(params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def arguments(request, monkeypatch):
    """What the dispatcher is given on a GPU; a pretended one has the reference in the place of the kernel."""
    pytest.importorskip("triton")
    if request.param == "cuda":
        return make((2, 3, 50), 3, device="cuda")
    monkeypatch.setattr(activation, "snake_beta_kernel", snake_beta_reference)
    x, *rates = make((2, 3, 50), 3)
    return x.as_subclass(PretendedGpu), *rates


def test_the_dispatcher_runs_the_kernel_on_a_gpu_unless_gradients_are_wanted(monkeypatch, arguments):
    calls = []
    kernel = activation.snake_beta_kernel
    monkeypatch.setattr(activation, "snake_beta_kernel", lambda *args: calls.append(1) or kernel(*args))
    x, rate, scale = arguments
    snake = SnakeBeta()
    snake(x, rate, scale)
    assert len(calls) == 1
    snake(x.requires_grad_(), rate, scale).sum().backward()
    assert len(calls) == 1
    assert x.grad is not None
    with torch.no_grad():
        snake(x, rate, scale)
    assert len(calls) == 2


def test_a_kernel_that_fails_warns_once_and_the_reference_serves(monkeypatch, caplog, arguments):
    calls = []

    def fail(*_):
        calls.append(1)
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(activation, "snake_beta_kernel", fail)
    snake = SnakeBeta()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(snake(*arguments), snake_beta_reference(*arguments))
    assert len(calls) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no such instruction" in caplog.text


def test_a_kernel_out_of_memory_is_not_a_broken_one(monkeypatch, arguments):
    def fail(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(activation, "snake_beta_kernel", fail)
    snake = SnakeBeta()
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        snake(*arguments)
    assert not snake.is_broken


def test_without_triton_the_module_works():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from sonoro.ops.activation import snake_beta, snake_beta_reference, SnakeBeta\n"
        "assert SnakeBeta().is_broken\n"
        "x, a = torch.randn(1, 2, 3), torch.ones(2)\n"
        "assert torch.equal(snake_beta(x, a, a), snake_beta_reference(x, a, a))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
