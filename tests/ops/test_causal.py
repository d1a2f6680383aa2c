import pytest
import torch
import torch.nn.functional as F
from without_gpu import in_the_interpreter

from sonoro.ops import causal
from sonoro.ops.activation import snake_rates
from sonoro.ops.causal import depthwise, depthwise_norm, embed_sum, last_conv
from sonoro.ops.conv import LeftContext

# Sums in another order, and one rounding in the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CHANNELS = 24


def arguments(name, batch, columns, dtype, generator):
    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    if name == "embed_sum":
        # Some are beyond the tables.
        return torch.randint(0, 40, (batch, columns, 4), generator=generator), draw(4, 32, CHANNELS)
    dilation = 3 if name == "depthwise" and columns > 1 else 1
    x, weight = draw(batch, 6 * dilation + columns, CHANNELS), draw(7, CHANNELS)
    if name == "depthwise":
        return x, weight, draw(CHANNELS), dilation
    if name == "last_conv":
        return x, 0.1 * weight, draw(1)
    return x, weight, draw(CHANNELS), (draw(CHANNELS), draw(CHANNELS), 1e-6)


def move(value, device):
    if isinstance(value, tuple):
        return tuple(move(item, device) for item in value)
    return value.clone().to(device) if isinstance(value, torch.Tensor) else value


def check_kernels(device):
    generator = torch.Generator().manual_seed(0)
    rates = tuple(rate.to(device) for rate in snake_rates(1 + 0.3 * torch.rand(CHANNELS, generator=generator)))
    for name, options in (
        ("embed_sum", {}),
        ("depthwise", {}),
        ("depthwise", {"rates": rates}),
        ("depthwise_norm", {}),
        ("last_conv", {}),
        ("last_conv", {"bound": "tanh"}),
    ):
        for dtype, tolerance in TOLERANCE.items():
            for batch, columns, is_streamed in ((1, 1, True), (3, 5, True), (2, 40, False)):
                given = arguments(name, batch, columns, dtype, generator)
                length = given[0].shape[1] - columns or 6
                contexts = torch.randn(5, length, CHANNELS, generator=generator).to(dtype)
                results = []
                for function in (getattr(causal, f"{name}_kernel"), getattr(causal, f"{name}_reference")):
                    rows = contexts.clone().to(device) if is_streamed else None
                    slots = torch.tensor([3, 0, 2])[:batch].to(device)
                    context = LeftContext(slots, None, rows, 6) if name == "embed_sum" else LeftContext(slots, rows)
                    results.append((function(*move(given, device), context, **options), rows))
                (ours, our_rows), (theirs, their_rows) = results
                assert ours.dtype == theirs.dtype
                torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
                assert not is_streamed or torch.equal(our_rows, their_rows)


def check_with_context(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, CHANNELS, generator=generator).to(device)
    # The interpreter truncates where a GPU rounds to bfloat16.
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])):
        contexts = torch.randn(5, 6, CHANNELS, generator=generator).to(device, dtype)
        for context in (LeftContext(torch.tensor([3, 0, 3], device=device), None, contexts, 6), LeftContext(left=6)):
            ours = causal.with_context_kernel(x, dtype, context)
            theirs = causal.with_context_reference(x, dtype, context)
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def check_that_nothing_hides_what_is_no_number(device):
    """Of NaN and infinities, in the samples that depend on them alone: they must be seen where audio is sent."""
    x, weight, bias = (given.to(device) for given in (torch.zeros(1, 9, 16), torch.ones(7, 16), torch.zeros(1)))
    for bound in ("clamp", "tanh"):
        for value, seen in ((torch.nan, torch.nan), (torch.inf, 1.0), (-torch.inf, -1.0)):
            x[0, 0, 0] = value
            for function in (causal.last_conv_kernel, causal.last_conv_reference):
                out = function(x, weight, bias, bound=bound).cpu()
                torch.testing.assert_close(out, torch.tensor([[seen, 0.0, 0.0]]), equal_nan=True)


@in_the_interpreter
def test_interpreted():
    check_kernels("cpu")
    check_with_context("cpu")
    check_that_nothing_hides_what_is_no_number("cpu")


@pytest.mark.gpu
def test_the_kernels_equal_the_references_on_a_gpu():
    check_kernels("cuda")
    check_with_context("cuda")
    check_that_nothing_hides_what_is_no_number("cuda")


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_embedded_codes_are_summed_after_their_context():
    tables, frames = draw(3, 5, 4), torch.tensor([[[0, 4, 2], [1, 9, 1]]])
    contexts = draw(2, 6, 4)
    out = embed_sum(frames, tables, LeftContext(torch.tensor([1]), None, contexts, 6))
    assert torch.equal(out[:, :6], contexts[1:])
    expected = torch.stack(
        [sum(tables[k, min(code, 4)] for k, code in enumerate(frame)) for frame in frames[0].tolist()]
    )
    torch.testing.assert_close(out[0, 6:], expected, atol=1e-15, rtol=0)


def test_a_depthwise_convolution_is_normalised_by_column():
    x, weight, bias, norm_weight, norm_bias = draw(2, 9, 4), draw(3, 4), draw(4), draw(4), draw(4)
    contexts = draw(3, 2, 4)
    out = depthwise_norm(x, weight, bias, (norm_weight, norm_bias, 1e-6), LeftContext(torch.tensor([2, 0]), contexts))
    expected = F.conv1d(x.mT, weight.mT[:, None], bias, groups=4).mT
    expected = F.layer_norm(expected, (4,), norm_weight, norm_bias, 1e-6)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=0)
    assert torch.equal(contexts[[2, 0]], x[:, -2:])


@pytest.mark.parametrize("columns", [3, 50])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_depthwise_convolution_is_that_of_each_channel_then_snake(columns, dilation):
    x, weight, bias, rates = draw(2, 2 * dilation + columns, 4), draw(3, 4), draw(4), snake_rates(1 + draw(4).abs())
    contexts = draw(3, 2 * dilation, 4)
    context = LeftContext(torch.tensor([2, 0]), contexts)
    out = depthwise(x, weight, bias, dilation, context, rates=rates)
    expected = F.conv1d(x.mT, weight.mT[:, None], bias, dilation=dilation, groups=4).mT
    torch.testing.assert_close(depthwise(x, weight, bias, dilation), expected, atol=1e-13, rtol=0)
    expected = expected + (expected * rates[0]).sin().square() * rates[1]
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=0)
    assert torch.equal(contexts[[2, 0]], x[:, columns:])


@pytest.mark.parametrize("bound", ["clamp", "tanh"])
def test_the_last_convolution_is_bounded(bound):
    x, weight, bias = draw(2, 9, 4), draw(3, 4), draw(1)
    contexts = draw(3, 2, 4)
    out = last_conv(x, weight, bias, LeftContext(torch.tensor([2, 0]), contexts), bound=bound)
    expected = F.conv1d(x.mT, weight.mT[None], bias)[:, 0]
    assert (expected.abs() > 1).any()
    expected = expected.clamp(-1, 1) if bound == "clamp" else expected.tanh()
    torch.testing.assert_close(out, expected, atol=1e-14, rtol=0)
    assert torch.equal(contexts[[2, 0]], x[:, -2:])
