"""A small codec whose weights hide no term, and how it is streamed in tests."""

import dataclasses
import math

import torch

from sonoro.models.qwen3_tts.codec import Qwen3Codec
from sonoro.models.qwen3_tts.config import released_configs

FRAMES = 19
CHUNKS = [[1] * 19, [2] * 9 + [1], [3] * 6 + [1], [5, 5, 5, 4], [8, 8, 3], [1, 4, 2, 8, 1, 3], [19]]

RELEASED = released_configs("qwen3-tts-0.6b-base").codec
RELEASED_ENCODER = RELEASED.encoder_config
SMALL_DECODER = dataclasses.replace(
    RELEASED.decoder_config,
    latent_dim=12,
    codebook_dim=8,
    codebook_size=32,
    num_quantizers=4,
    decoder_dim=16,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=5,
    upsample_rates=(3, 2),
    upsampling_ratios=(2,),
)
SMALL = dataclasses.replace(
    RELEASED,
    encoder_valid_num_quantizers=4,
    decode_upsample_rate=12,
    decoder_config=SMALL_DECODER,
    encoder_config=None,
)


def fill(module, seed=0, snake_std=0.5):
    """Values that hide no term: nothing is left at 0 or 1, sums keep a size near 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        leaf = name.rsplit(".", 1)[-1]
        normal = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if leaf in ("alpha", "beta"):
            tensor.copy_(snake_std * normal)
        elif leaf in ("embedding_sum", "embed_sum"):
            tensor.copy_(normal)
        elif leaf in ("cluster_usage", "scale", "gamma") or "norm" in name:
            tensor.copy_(0.7 + 0.1 * normal.abs())
        elif leaf == "bias":
            tensor.copy_(0.1 * normal)
        else:
            tensor.copy_(normal / math.sqrt(math.prod(tensor.shape[1:])))
    return module


def make_codec(config=SMALL, dtype=torch.float64, snake_std=0.5):
    codec = fill(Qwen3Codec(config), snake_std=snake_std).to(dtype)
    with torch.no_grad():
        # Far from the clamp, which would hide differences.
        codec.decoder.decoder[-1].conv.weight.mul_(0.02)
    codec.finalize()
    return codec


def draw(rows, frames=FRAMES, seed=0):
    return torch.randint(0, 32, (rows, frames, 4), generator=torch.Generator().manual_seed(seed))


def stream(codec, frames, slots, history, chunks):
    return torch.cat([codec.decode(chunk, slots, history) for chunk in frames.split(chunks, dim=1)], dim=1)


def close(actual, expected, tolerance=1e-9):
    """1e-9: two float64 computations in another order, amplified by the periodic activations."""
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
