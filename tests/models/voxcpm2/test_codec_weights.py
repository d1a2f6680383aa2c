"""audiovae.pth: what it holds that other codecs' files do not, its twin, and its released sizes."""

import math

import pytest
import torch
from safetensors.torch import save_file
from tiny_fish import sound
from tiny_vox import TINY_CODEC, codec_tensors, write_codec
from tiny_vox_lm import CONFIG, CPU, make_codec

from sonoro.core.errors import CheckpointError, TensorMismatch
from sonoro.models.voxcpm2 import codec_weights
from sonoro.models.voxcpm2.codec import CodecConfig
from sonoro.nn.configs import build
from sonoro.nn.weights import count_parts

EDGES = "decoder.sr_bin_boundaries"


def tensors(seed=0):
    return {name: torch.from_numpy(tensor) for name, tensor in codec_tensors(seed).items()}


def load(file):
    codec_weights.FILE.check(file, CONFIG)
    return codec_weights.FILE.load(file, CONFIG, device=CPU, dtype=torch.float32)


def test_released_names_and_shapes_are_known():
    released = codec_weights.FILE.stored_shapes(CodecConfig())
    # The published counts are of 312 tensors, as those hold the three edges too.
    assert len(released) == 311
    assert count_parts(released, codec_weights.PARTS) == {
        "codec decoder": 45_778_885 - 3,
        "codec encoder": 48_435_072,
    }
    norms = sum(math.prod(shape) for name, shape in released.items() if name.endswith("weight_g"))
    spread = 64 * 2048 * 3 + 2 * 64
    folded = 94_213_954 - norms - spread
    assert codec_weights.FILE.weight_bytes(CodecConfig(), torch.float32) == 4 * (folded + 64)
    assert codec_weights.FILE.weight_bytes(CodecConfig(), torch.float16) < 4 * folded - 2 * 45_700_000


def test_the_spread_of_what_is_encoded_may_be_there_and_must_fit(tmp_path):
    stored, file = tensors(), tmp_path / codec_weights.CODEC_FILE
    torch.save({name: tensor for name, tensor in stored.items() if "fc_logvar" not in name}, file)
    assert torch.equal(load(file).decoder.weight, make_codec(dtype=torch.float32).decoder.weight)
    torch.save(stored | {"encoder.fc_logvar.bias": torch.ones(3)}, file)
    with pytest.raises(TensorMismatch, match=r"fc_logvar.bias' has shape \[3\], expected \[8\]"):
        load(file)


@pytest.mark.parametrize("edges", [None, torch.tensor([20000, 30000, 44100], dtype=torch.int32), torch.ones(1)])
def test_other_edges_than_those_of_the_configuration_are_refused(tmp_path, edges):
    stored, file = tensors(), tmp_path / codec_weights.CODEC_FILE
    del stored[EDGES]
    torch.save(stored if edges is None else stored | {EDGES: edges}, file)
    for use in (
        codec_weights.FILE.check,
        lambda *given: codec_weights.FILE.load(*given, device=CPU, dtype=torch.float32),
    ):
        with pytest.raises(TensorMismatch, match=rf"{EDGES}' is \[.*but sr_bin_boundaries .*\[20000, 30000, 40000\]"):
            use(file, CONFIG)


def test_safetensors_of_the_same_name_come_first(tmp_path):
    file, expected = tmp_path / codec_weights.CODEC_FILE, make_codec(dtype=torch.float32).decoder.weight
    write_codec(file, seed=1)
    assert not torch.equal(load(file).decoder.weight, expected)
    save_file(tensors(), tmp_path / "audiovae.safetensors")
    assert torch.equal(load(file).decoder.weight, expected)
    file.unlink()
    assert torch.equal(load(file).decoder.weight, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sr_bin_boundaries": None}, "sr_bin_boundaries"),
        ({"decoder_rates": [5, 0]}, "decoder_rates is 0"),
        ({"patch_size": "4"}, "patch_size"),
    ],
)
def test_other_configurations_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        build(CodecConfig, TINY_CODEC | changes, "config.json")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # A unit that mixes channels, noise between them, a condition that is added, and one that is transformed.
        ("decoder.model.2.block.2.block.1.weight_v", (16, 16, 7)),
        ("decoder.model.2.block.2.linear.weight_v", (16, 16, 1)),
        ("decoder.sr_cond_model.2.cond_embed.weight", (4, 32)),
        ("decoder.sr_cond_model.2.out_layer.0.alpha", (1, 32, 1)),
    ],
)
def test_other_kinds_of_the_official_class_are_refused(tmp_path, name, shape):
    file = tmp_path / codec_weights.CODEC_FILE
    extra = {name: torch.ones(shape)}
    if name.endswith("linear.weight_v"):
        extra["decoder.model.2.block.2.linear.weight_g"] = torch.ones(16, 1, 1)
    torch.save(tensors() | extra, file)
    with pytest.raises(TensorMismatch, match=name.removesuffix("_v")):
        load(file)


def test_random_weights_make_patches_that_vary():
    codec = codec_weights.FILE.init_dummy(CONFIG, 0, device=CPU, dtype=torch.float32)
    patches = codec.encode(torch.from_numpy(sound(64 * 40)).float())
    assert patches.shape == (64, 4, 8)
    assert 0.1 < patches.std() < 3
