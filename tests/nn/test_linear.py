"""The seam of weight products: fused forms against plain ones, and nothing beside it multiplies by a weight."""

import ast
from pathlib import Path

import pytest
import torch

from sonoro.nn import linear as linear_module
from sonoro.nn.linear import E4M3Rows, Linear, NormedRows, RMSNorm, lay_out_by_input
from sonoro.ops.e4m3 import dequantized_rows, quantize_rows_reference
from sonoro.ops.eight_bits import dequantized

PACKAGE = Path(__file__).parents[2] / "src" / "sonoro"
CONVOLUTIONS = {"nn/causal.py", "nn/codebooks.py", "models/qwen3_tts/decoder.py"}
"""Where `F.linear` takes the weight of a convolution: over copied windows, or of kernel 1."""


def test_fused_products_are_the_plain_ones() -> None:
    torch.manual_seed(0)
    layer, norm = Linear(6, 8, bias=False).double(), RMSNorm(6, 1e-6).double()
    x, residual = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        plain = norm(x) @ layer.weight.T
        gate, up = plain.chunk(2, dim=-1)
        assert torch.allclose(norm.fused(x), norm(x))
        assert torch.allclose(layer.after_norm(x, norm), plain)
        assert torch.allclose(layer.gate_up_after_norm(NormedRows(x), norm), gate / (1 + (-gate).exp()) * up)
        assert torch.allclose(layer.add_to(residual, x).rows, residual + x @ layer.weight.T)


def made_layer(quantization: str) -> Linear:
    layer = Linear(32, 64, bias=False)
    layer.quantization = quantization
    layer.weight = torch.nn.Parameter(layer.stored(layer.weight.data), requires_grad=False)
    return layer


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
def test_a_wide_copy_is_multiplied_by_many_rows_alone_and_in_no_file(quantization: str) -> None:
    torch.manual_seed(0)
    layer, norm = made_layer(quantization), RMSNorm(32, 1e-6)
    names, rows = [*layer.state_dict()], torch.randn(17, 32)
    with torch.inference_mode():
        before = [layer.after_norm(some, norm) for some in (rows, rows[:16])]
        layer.widen(torch.float32)
        assert (layer.wide is None) == (quantization == "none")
        after = [layer.after_norm(some, norm) for some in (rows, rows[:16])]
        # The copy is what the 8 bits stand for.
        assert all(map(torch.equal, before, after))
        if layer.wide is not None:
            layer.wide.zero_()
            residual = torch.randn(17, 64)
            assert not layer.after_norm(rows, norm).any()
            assert not layer.gate_up_after_norm(NormedRows(rows), norm).any()
            assert torch.equal(layer.add_to(residual, rows).rows, residual)
            assert torch.equal(layer.after_norm(rows[:16], norm), before[1])
    assert [*layer.state_dict()] == names


@pytest.mark.parametrize("terms", [1, 2])
def test_rows_in_e4m3_go_from_product_to_product(terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By references, on a CPU: what each method quantises, and hands on."""
    monkeypatch.setattr(linear_module, "takes_e4m3", lambda x, weight, terms: True)
    torch.manual_seed(0)
    layer, norm, next_norm = made_layer("fp8"), RMSNorm(32, 1e-6), RMSNorm(64, 1e-6)
    assert not layer.takes_e4m3(torch.randn(5, 32))
    layer.row_terms = terms
    x, residual = torch.randn(5, 32), torch.randn(5, 64)
    weight = dequantized(layer.weight, layer.scale, torch.float32)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return dequantized_rows(*quantize_rows_reference(rows, terms=terms), torch.float32)

    with torch.inference_mode():
        product = rounded(norm(x)) @ weight.T
        gate, up = product.chunk(2, dim=-1)
        torch.testing.assert_close(layer.after_norm(x, norm), product)
        torch.testing.assert_close(layer.gate_up_after_norm(NormedRows(x), norm), gate / (1 + (-gate).exp()) * up)
        # The next norm is rounded for a product that takes it so; another gets none.
        assert layer.add_to(residual, x, next_norm, made_layer("none")).normed is None
        total, normed = layer.add_to(residual, x, next_norm, layer)
        torch.testing.assert_close(total, residual + rounded(x) @ weight.T)
        assert isinstance(normed, E4M3Rows)
        torch.testing.assert_close(dequantized_rows(*normed, torch.float32), rounded(next_norm(total)))
        torch.testing.assert_close(layer.add_to(residual, x).rows, total)
        torch.testing.assert_close(layer.after_norm(x, norm, x), rounded(x) @ weight.T)
        given = E4M3Rows(*quantize_rows_reference(x, terms=terms))
        torch.testing.assert_close(layer.after_norm(x, norm, given), rounded(x) @ weight.T)
    # Weights in other formats meet rows in 16 bits.
    plain = made_layer("none")
    plain.row_terms = terms
    torch.testing.assert_close(plain.after_norm(x, norm), norm(x) @ plain.weight.T)


def test_a_derived_weight_is_multiplied_and_laid_out_and_in_no_file() -> None:
    weight = torch.arange(12.0).view(3, 4)
    root = torch.nn.ModuleDict({"head": Linear.derived(weight)})
    assert not root.state_dict()
    assert not [*root.parameters()]
    lay_out_by_input(root)
    assert root["head"].weight.stride() == (1, 3)
    assert torch.equal(root["head"](torch.eye(4)).T, weight)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("nn/*.py")) + sorted(PACKAGE.glob("models/**/*.py")), ids=str)
def test_every_weight_product_goes_through_the_seam(path: Path) -> None:
    where = path.relative_to(PACKAGE).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    if where != "nn/linear.py":
        assert "nn.Linear" not in used
        assert not {"sonoro.ops.linear", "sonoro.ops.e4m3"} & imported
        assert "F.linear" not in used or where in CONVOLUTIONS
