"""Codecs in half precision: settled as an engine does, and with weights that float16 cannot hold the sound of."""

import torch
from tiny_codec import FRAMES

from sonoro.models.shared.codec_choice import HALF_LIMIT
from sonoro.nn.causal import CausalConv1d
from sonoro.nn.vocoder import ResidualUnit


def draw(codec, rows, frames=FRAMES, seed=0):
    generator, example = torch.Generator().manual_seed(seed), codec.decoder.example(1, 1)
    if example.is_floating_point():
        return torch.randn(rows, frames, *example.shape[2:], generator=generator, dtype=torch.float64)
    books, size = codec.decoder.codes
    return torch.randint(0, size, (rows, frames, books), generator=generator)


def settled(codec, wanted, device="cpu"):
    """`codec` moved, and settled at sizes that streaming tests use."""
    codec.move(torch.device(device))
    codec.model_dtype = torch.bfloat16
    return codec.settle(wanted, 3, [1, 2, 5])


def scaled(codec, by):
    """`codec` with the weights of its last residual unit scaled `by` so much, and its last convolution scaled back: its
    audio stays the same."""
    unit, last = _last_layers(codec)
    with torch.no_grad():
        unit.conv2.conv.weight *= by
        unit.conv2.conv.bias *= by
        last.weight /= by
    codec.finalize()
    return codec


def scale_beyond(codec, passing=0.0067):
    """By how much to have `codec` scaled so that `passing` of its stream is beyond float16."""
    seen = []
    watch = _last_layers(codec)[0].conv2.register_forward_hook(lambda *of: seen.append(of[2].detach().abs().flatten()))
    codec.decode(draw(codec, 4))
    watch.remove()
    sizes = seen[0].sort().values
    return float(HALF_LIMIT / sizes[int(len(sizes) * (1 - passing))])


def _last_layers(codec):
    """The last residual unit, and the last convolution."""
    units = [module for module in codec.decoder.modules() if isinstance(module, ResidualUnit)]
    return units[-1], [module for module in codec.decoder.modules() if isinstance(module, CausalConv1d)][-1].conv
