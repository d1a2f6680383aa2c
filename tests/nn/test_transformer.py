"""The decoder layer against a plain computation, head by head; norms and rotary tables against their definitions."""

from typing import TypeVar

import pytest
import torch
from torch import Tensor

from sonoro.nn.bidirectional import BidirectionalStack
from sonoro.nn.linear import Linear, RMSNorm, lay_out_by_input
from sonoro.nn.transformer import (
    Attention,
    DecoderConfig,
    DecoderStack,
    NormedAttention,
    causal_attention,
    rotary_tables,
    rotate,
)

S = TypeVar("S", bound=DecoderStack)

CONFIG = DecoderConfig(
    width=12, intermediate=20, layers=2, heads=6, kv_heads=2, head_width=4, norm_eps=1e-6, rope_theta=1e4
)


def random_stack(dtype: torch.dtype = torch.float64, attention: type[Attention] = NormedAttention) -> DecoderStack:
    return randomized(DecoderStack(CONFIG, attention).to(dtype))


def randomized(stack: S) -> S:
    torch.manual_seed(3)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.5)
    return stack


def plain_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * norm.weight


def plain_turn(x: Tensor, position: int) -> Tensor:
    """The rotation by complex multiplication, pair (i, i + D / 2), in float64."""
    half = x.shape[-1] // 2
    angle = position * CONFIG.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag))


def plain_stack(stack: DecoderStack, rows: Tensor) -> Tensor:
    """The whole stack on rows [T, width], one head and position at a time; bidirectional for a `BidirectionalStack`."""
    width = CONFIG.head_width
    for layer in stack.layers:
        attention, feed = layer.self_attn, layer.mlp

        def norm_head(x: Tensor, norm: str, attention: torch.nn.Module = attention) -> Tensor:
            return plain_norm(x, getattr(attention, norm)) if hasattr(attention, norm) else x

        projected = (plain_norm(rows, layer.input_layernorm) @ attention.qkv_proj.weight.T).unflatten(-1, (-1, width))
        outs = []
        for t in range(rows.shape[0]):
            heads = []
            for head in range(CONFIG.heads):
                shared = head // (CONFIG.heads // CONFIG.kv_heads)
                query = plain_turn(norm_head(projected[t, head], "q_norm"), t)
                seen = projected if isinstance(stack, BidirectionalStack) else projected[: t + 1]
                keys, values = seen[:, CONFIG.heads + shared], seen[:, CONFIG.heads + CONFIG.kv_heads + shared]
                turned = [plain_turn(norm_head(key, "k_norm"), at) for at, key in enumerate(keys)]
                scores = torch.stack([query @ key for key in turned]) * width**-0.5
                heads.append(scores.softmax(-1) @ values)
            outs.append(torch.cat(heads) @ attention.o_proj.weight.T)
        rows = rows + torch.stack(outs)
        gate, up = (plain_norm(rows, layer.post_attention_layernorm) @ feed.gate_up_proj.weight.T).chunk(2, -1)
        rows = rows + (gate / (1 + (-gate).exp()) * up) @ feed.down_proj.weight.T
    return plain_norm(rows, stack.norm)


@pytest.mark.parametrize("attention", [Attention, NormedAttention])
def test_stack_equals_a_plain_computation(attention: type[Attention]) -> None:
    stack = random_stack(attention=attention)
    rows = torch.randn(2, 7, CONFIG.width, dtype=torch.float64)
    found = stack(rows, stack.config.rotary(torch.arange(7), torch.float64), causal_attention)
    expected = torch.stack([plain_stack(stack, row) for row in rows])
    # Rotary tables are made in float32 whatever the dtype: their error at position 6 is some 1e-7.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("kept", [slice(5), slice(0, 1), slice(2, None)])
def test_a_bidirectional_stack_looks_ahead(kept: slice, joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "joins_norm", lambda *_: joins)
    stack = randomized(BidirectionalStack(CONFIG, 5, kept).double())
    stack.finalize()
    rows = torch.randn(3, 5, CONFIG.width, dtype=torch.float64)
    expected = torch.cat([plain_stack(stack, row)[kept] for row in rows])
    with torch.no_grad():
        found = stack.norm(stack.see(rows))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not any("cos" in name or "sin" in name for name in stack.state_dict())


def test_right_padding_changes_nothing_before_it() -> None:
    stack = random_stack()
    rows = torch.randn(1, 6, CONFIG.width, dtype=torch.float64)
    rotary = stack.config.rotary(torch.arange(6), torch.float64)
    whole = stack(rows, rotary, causal_attention)
    shorter = stack(rows[:, :4], (rotary[0][:4], rotary[1][:4]), causal_attention)
    torch.testing.assert_close(whole[:, :4], shorter, atol=1e-12, rtol=0)


def test_layout_by_input_changes_no_value() -> None:
    stack = random_stack()
    rows = torch.randn(1, 5, CONFIG.width, dtype=torch.float64)
    rotary = stack.config.rotary(torch.arange(5), torch.float64)
    stored, before = (
        {name: value.clone() for name, value in stack.state_dict().items()},
        stack(rows, rotary, causal_attention),
    )
    lay_out_by_input(stack)
    weight = stack.layers[0].self_attn.qkv_proj.weight
    assert weight.t().is_contiguous()
    for name, value in stack.state_dict().items():
        assert torch.equal(value, stored[name])
    torch.testing.assert_close(stack(rows, rotary, causal_attention), before, atol=1e-12, rtol=0)


def test_stack_has_gradients_of_all_its_weights() -> None:
    stack = random_stack()
    rows = torch.randn(2, 5, CONFIG.width, dtype=torch.float64, requires_grad=True)
    stack(rows, stack.config.rotary(torch.arange(5), torch.float64), causal_attention).square().sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert rows.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 48])
def test_norm_rounds_before_its_weight(dtype: torch.dtype, width: int) -> None:
    """48 has no exact root, so it shows a constant that was rounded to float32; small rows show the epsilon."""
    norm = RMSNorm(width, 1e-6)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    norm.to(dtype)
    x = (3 * torch.randn(5, 2, width, dtype=torch.float64)).to(dtype)
    x[0] = 0
    x[1] *= 2**-12
    wide = x if dtype == torch.float64 else x.float()
    expected = norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    # In bfloat16 the order of roundings is the promise: another order differs by up to one step in 256.
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0}[dtype]
    torch.testing.assert_close(norm(x), expected, atol=tolerance, rtol=tolerance)


def test_norm_is_differentiable() -> None:
    norm = RMSNorm(6, 1e-6).double()
    torch.nn.init.normal_(norm.weight, mean=1.0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, x)
    # Float32 on a CPU takes another path, whose gradients agree with the checked ones to rounding.
    gradients = []
    for dtype in (torch.float64, torch.float32):
        leaf = x.detach().to(dtype).requires_grad_()
        norm.to(dtype)(leaf).square().sum().backward()
        gradients.append((leaf.grad, norm.weight.grad))
        norm.zero_grad()
    for wide, narrow in zip(*gradients, strict=True):
        torch.testing.assert_close(narrow.double(), wide.double(), atol=1e-5, rtol=1e-5)


def test_rotary_tables_are_made_in_float32_and_rounded_once() -> None:
    positions = torch.tensor([0, 1, 500, 32000])
    cos, sin = rotary_tables(positions, 8, 1e6, torch.float32)
    assert cos.shape == sin.shape == (4, 1, 8)
    for half, table in zip(rotary_tables(positions, 8, 1e6, torch.bfloat16), (cos, sin), strict=True):
        assert torch.equal(half, table.to(torch.bfloat16))
    angle = positions[:, None].double() * 1e6 ** -(torch.arange(4, dtype=torch.float64) / 4)
    # An angle of 32000 has a float32 step of 0.002, which the reference has as well.
    torch.testing.assert_close(cos[:3, 0, :4].double(), angle[:3].cos(), atol=5e-5, rtol=0)
    torch.testing.assert_close(sin[:3, 0, 4:].double(), angle[:3].sin(), atol=5e-5, rtol=0)


def test_rotation_depends_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64)
    cos, sin = rotary_tables(torch.arange(40), 8, 100.0, torch.float64)

    def score(at_query: int, at_key: int) -> float:
        turned = rotate(query[None], (cos[at_query], sin[at_query])), rotate(key[None], (cos[at_key], sin[at_key]))
        return (turned[0] * turned[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(39, 34), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(4, 9), abs=1e-3)


@pytest.mark.parametrize("attention", [Attention, NormedAttention])
def test_weights_made_for_neighbouring_pairs_serve_once_parted(attention: type[Attention]) -> None:
    """Against the same stack with its rotation done on neighbours: (2i, 2i + 1) instead of (i, i + D / 2)."""
    stack, rows = random_stack(attention=attention), torch.randn(1, 5, CONFIG.width, dtype=torch.float64)
    halves = torch.arange(CONFIG.head_width).view(-1, 2).t().flatten()
    positions = stack.config.rotary(torch.arange(5), torch.float64)
    layers = [layer.self_attn for layer in stack.layers]
    # Heads in the order of neighbours: turned by halves they must first be put in the order of halves.
    expected = random_stack(attention=attention)
    for layer, plain in zip(layers, (layer.self_attn for layer in expected.layers), strict=True):
        heads = plain.qkv_proj.weight.unflatten(0, (-1, CONFIG.head_width))
        order = torch.argsort(halves)
        neighbours = torch.cat(
            (heads[: CONFIG.heads + CONFIG.kv_heads, order], heads[CONFIG.heads + CONFIG.kv_heads :])
        )
        with torch.no_grad():
            layer.qkv_proj.weight.copy_(neighbours.flatten(0, 1))
            for ours, theirs in zip(layer.head_norms[:2], plain.head_norms[:2], strict=True):
                if ours is not None and theirs is not None:
                    ours.copy_(theirs[order])
    apart = stack(rows, positions, causal_attention)
    stack.split_pairs()
    whole = expected(rows, positions, causal_attention)
    torch.testing.assert_close(stack(rows, positions, causal_attention), whole, atol=1e-12, rtol=0)
    assert not torch.allclose(apart, whole)


def test_a_position_takes_its_keys_and_values() -> None:
    # 2 layers, 2 shared heads of 4, keys and values.
    assert CONFIG.position_bytes(torch.bfloat16) == 2 * 2 * 2 * 4 * 2
