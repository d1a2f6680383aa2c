import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalStridedConv1d, lay_out, name_layers
from sonoro.nn.history import WHOLE, History

CHUNKS = [[1] * 90, [2] * 45, [7] * 12 + [6], [70, 20], [90]]
CONVS = [
    {"kernel": 7},
    {"kernel": 7, "dilation": 3},
    {"kernel": 7, "dilation": 9},
    {"kernel": 1},
    {"kernel": 3, "groups": 2},
    {"kernel": 7, "groups": 6},
    {"kernel": 7, "dilation": 2, "groups": 6},
]


class Stack(nn.Module):
    """Two layers, so that keys must differ."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.layout = name_layers(self)

    def forward(self, x, history=WHOLE):
        for layer in self.layers:
            x = layer(x, history)
        return x


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def stream(model, x, chunks):
    history = History(model.layout, 3, device="cpu", dtype=x.dtype)
    slots = torch.tensor([2, 0])
    return torch.cat([model(chunk, history.at(slots)) for chunk in x.split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize("options", CONVS)
@pytest.mark.parametrize("columns", [5, 90])
def test_convolution_is_the_padded_one(options, columns):
    layer = CausalConv1d(6, 12 if options.get("groups") == 2 else 6, **options).double()
    x = draw(2, columns, 6)
    padding = (options["kernel"] - 1) * options.get("dilation", 1)
    conv = layer.conv
    expected = F.conv1d(
        F.pad(x.mT, (padding, 0)), conv.weight, conv.bias, dilation=conv.dilation, groups=conv.groups
    ).mT
    # 1e-13: one float64 sum in another order.
    torch.testing.assert_close(layer(x, WHOLE), expected, atol=1e-13, rtol=0)
    lay_out(layer)
    torch.testing.assert_close(layer(x, WHOLE), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (4, 2), (16, 8), (3, 3), (6, 3)])
def test_transposed_convolution_is_the_one_cut_on_the_right(kernel, stride):
    layer = CausalConvTranspose1d(6, 4, kernel, stride).double()
    x = draw(2, 9, 6)
    expected = F.conv_transpose1d(x.mT, layer.conv.weight, layer.conv.bias, stride=stride)[..., : 9 * stride].mT
    torch.testing.assert_close(layer(x, WHOLE), expected, atol=1e-13, rtol=0)
    lay_out(layer)
    torch.testing.assert_close(layer(x, WHOLE), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("options", CONVS)
def test_convolutions_stream_exactly(options, chunks):
    layers = [CausalConv1d(6, 6, **options), CausalConv1d(6, 6, **options)]
    model = Stack(*layers).double()
    x = draw(2, 90, 6)
    torch.testing.assert_close(stream(model, x, chunks), model(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (4, 2), (5, 5), (10, 5)])
def test_transposed_convolutions_stream_exactly(kernel, stride, chunks):
    layers = [CausalConvTranspose1d(6, 6, kernel, stride), CausalConvTranspose1d(6, 4, 6, 3)]
    model = Stack(*layers).double()
    x = draw(2, 90, 6)
    torch.testing.assert_close(stream(model, x, chunks), model(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("columns", [3, 90])
def test_gradients_reach_input_and_weights(columns):
    model = Stack(CausalConv1d(2, 2, 3, 2), CausalConvTranspose1d(2, 1, 4, 2)).double()
    x = draw(1, columns, 2).requires_grad_()
    leaves = (x, *model.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: model(x), leaves, fast_mode=True)


def test_names_are_keys_and_layers_without_a_past_keep_nothing():
    model = Stack(CausalConv1d(2, 3, 1), CausalConv1d(3, 4, 7, 9), CausalConvTranspose1d(4, 2, 6, 3))
    assert model.layout == {"layers.1": (54, 3), "layers.2": (1, 4)}
    assert list(model.layers[1].state_dict()) == ["conv.weight", "conv.bias"]
    assert model.layers[1].conv.weight.shape == (4, 3, 7)
    assert model.layers[2].conv.weight.shape == (4, 2, 6)


def test_laying_out_changes_memory_alone():
    model = Stack(CausalConv1d(4, 3, 7), CausalConvTranspose1d(3, 2, 6, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        lay_out(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.layers[0].conv.weight.stride() == (28, 1, 4)
    assert model.layers[1].conv.weight.stride() == (1, 3, 6)


@pytest.mark.parametrize("kernel", [3, 6])
def test_strided_convolution_is_the_padded_one_and_streams(kernel):
    layer, x = CausalStridedConv1d(4, 5, kernel, 3).double(), draw(2, 90, 4)
    conv = layer.conv
    whole = layer(x, WHOLE)
    expected = F.conv1d(F.pad(x.mT, (kernel - 3, 0)), conv.weight, conv.bias, stride=3).mT
    torch.testing.assert_close(whole, expected, atol=1e-13, rtol=0)
    model = Stack(layer)
    for chunks in ([3] * 30, [9, 12, 3, 66], [90]):
        torch.testing.assert_close(stream(model, x, chunks), whole, atol=1e-13, rtol=0)
