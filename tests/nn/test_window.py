"""Windowed layers: pairs parted, and the window as wide as it says."""

import torch

from sonoro.nn.history import WHOLE
from sonoro.nn.transformer import split_pairs
from sonoro.nn.window import WindowConfig, WindowLayers

CONFIG = WindowConfig(
    width=12,
    intermediate=16,
    layers=1,
    heads=4,
    kv_heads=2,
    head_width=6,
    window=5,
    norm_eps=1e-5,
    rope_theta=10000.0,
)


def test_a_column_sees_its_window_and_no_more():
    torch.manual_seed(0)
    layers = WindowLayers(CONFIG).double()
    x = torch.randn(1, 14, 12, dtype=torch.float64)
    with torch.no_grad():
        before = layers(x, WHOLE)
        x[0, 6] += 1.0
        changed = (layers(x, WHOLE) != before).any(-1)[0].nonzero().flatten()
    assert changed.tolist() == [6, 7, 8, 9, 10]


def test_parted_pairs_turn_as_neighbours_did():
    """Products of queries and keys turned in halves, after parting, are those turned by neighbours before."""
    generator = torch.Generator().manual_seed(0)
    heads, width = 3, 8
    weight = torch.randn((heads + 2) * width, 5, dtype=torch.float64, generator=generator)
    x, angle = torch.randn(5, dtype=torch.float64, generator=generator), torch.rand(width // 2, dtype=torch.float64)

    def neighbours(head):
        pairs = torch.view_as_complex(head.unflatten(0, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten()

    def halves(head):
        first, second = head.chunk(2)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])

    before = (weight @ x).unflatten(0, (-1, width))
    after = (split_pairs(weight, heads, width) @ x).unflatten(0, (-1, width))
    for one in range(heads):
        for two in range(heads):
            expected = neighbours(before[one]) @ before[two]
            torch.testing.assert_close(halves(after[one]) @ after[two], expected, atol=1e-12, rtol=0)
    assert torch.equal(before[heads:], after[heads:])
