"""The seam of weight products: fused forms against plain ones, and nothing beside it multiplies by a weight."""

import ast
from pathlib import Path

import pytest
import torch

from sonoro.nn.linear import Linear, NormedRows, RMSNorm, lay_out_by_input

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
        assert "sonoro.ops.linear" not in imported
        assert "F.linear" not in used or where in CONVOLUTIONS
