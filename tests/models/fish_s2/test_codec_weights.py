"""codec.pth: what it holds that other codecs' files do not, and its released sizes."""

import math

import pytest
import torch
from tiny_dual_ar import CONFIG, CPU, make_codec
from tiny_fish import codec_tensors, sound

from sonoro.models.fish_s2 import codec_weights
from sonoro.models.fish_s2.codec import CodecConfig
from sonoro.nn.weights import count_parts

STALE = {
    "quantizer.post_module.causal_mask": torch.ones(2, 2, dtype=torch.bool),
    "quantizer.post_module.freqs_cis": torch.ones(2, 2, 2, dtype=torch.bfloat16),
}


def test_released_names_and_shapes_are_known():
    released = codec_weights.FILE.stored_shapes(CodecConfig())
    assert len(released) == 535
    assert sum(map(math.prod, released.values())) == 391_430_530
    assert count_parts(released, codec_weights.PARTS) == {
        "codec decoder": 54_104_162 + 109_085_696 + 21_006_336,
        "codec codebooks": 51_216 + 239_760,
        "codec encoder": 76_851_328 + 109_085_696 + 21_006_336,
    }
    folded = 391_398_385
    assert codec_weights.FILE.weight_bytes(CodecConfig(), torch.float32) == 4 * folded
    assert codec_weights.FILE.weight_bytes(CodecConfig(), torch.float16) < 4 * folded - 2 * 184_000_000


@pytest.mark.parametrize(
    "wrap",
    [
        lambda stored: stored | STALE,
        lambda stored: {f"generator.{name}": tensor for name, tensor in stored.items()},
        lambda stored: {"state_dict": {f"generator.{name}": tensor for name, tensor in stored.items()}},
    ],
)
def test_derived_tensors_are_dropped_and_outer_names_stripped(tmp_path, wrap):
    file = tmp_path / codec_weights.CODEC_FILE
    torch.save(wrap({name: torch.from_numpy(tensor) for name, tensor in codec_tensors().items()}), file)
    codec_weights.FILE.check(file, CONFIG)
    loaded = codec_weights.FILE.load(file, CONFIG, device=CPU, dtype=torch.float32)
    assert torch.equal(loaded.decoder.weight, make_codec(dtype=torch.float32).decoder.weight)


def test_random_weights_make_codes_that_vary():
    codec = codec_weights.FILE.init_dummy(CONFIG, 0, device=CPU, dtype=torch.float32)
    codes = codec.encode(torch.from_numpy(sound(64 * codec.hop)).float())
    assert codes.shape == (64, 10)
    assert min(len(column.unique()) for column in codes.T) >= 5
