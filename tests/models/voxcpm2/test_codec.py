"""The codec against what the official class computed on the same weights, and its released sizes."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_fish import digest, sound
from tiny_talker import close, stream
from tiny_vox import ENCODER_HOP, HOP, PATCH, codec_tensors
from tiny_vox_lm import CONFIG, make_codec
from without_gpu import device_only

from sonoro.core.errors import CheckpointError
from sonoro.models.base import Voice
from sonoro.models.voxcpm2 import codec_weights
from sonoro.models.voxcpm2.codec import CodecConfig, VoxCodec

STORED = Path(__file__).parents[2] / "assets" / "voxcpm2" / "vae.safetensors"
ENCODED = [(1, "right"), (40, "left"), (41, "left"), (41, "right"), (2999, "left"), (2999, "right")]
SILENCE = {"left": "before", "right": "after"}


@pytest.fixture(scope="module")
def official():
    """What tools/reference/voxcpm2_vae.py stored: audio [B, T * hop] of patches [B, T, P, D], patches of int16."""
    with safe_open(STORED, framework="pt") as file:
        assert file.metadata()["weights"] == digest(codec_tensors()), "other weights are drawn here than were there"
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)


@pytest.fixture(scope="module")
def codec():
    return make_codec(dtype=torch.float32)


@pytest.mark.parametrize("name", ["decode", "short"])
def test_audio_is_that_of_the_official_decoder(codec, official, name):
    patches, expected = official[f"{name}/patches"], official[f"{name}/audio"]
    assert expected.abs().max() > 0.1
    # 1e-5: float32 rounding of both sides.
    close(codec.decode(patches), expected, 1e-5)
    history, slots = codec.allocate(2), torch.tensor([1, 0])
    for chunks in ([1] * patches.shape[1], [patches.shape[1]]):
        codec.reset(history, slots)
        close(stream(codec, patches, slots, history, chunks), expected, 1e-5)


def test_a_long_official_decode_is_streamed_in_mixed_chunks(codec, official):
    history, slots = codec.allocate(2), torch.tensor([0, 1])
    for chunks in ([3, 1, 7, 2, 9, 5, 13], [25, 15], [2] * 20):
        codec.reset(history, slots)
        close(stream(codec, official["decode/patches"], slots, history, chunks), official["decode/audio"], 1e-5)


def test_fused_operations_give_the_official_audio(official):
    codec = make_codec(dtype=torch.float32)
    codec.fused = codec.fuse(codec.decoder, torch.float32)
    for name in ("decode", "short"):
        close(codec.decode(official[f"{name}/patches"]), official[f"{name}/audio"], 1e-5)


def test_a_clip_is_continued_as_the_official_pipeline_does(codec, official):
    """There the last three patches of the clip are decoded before those that are made."""
    history, slots = codec.allocate(1), torch.tensor([0])
    codec.prime(history, slots, Voice(None, official["continued/prompt"][-3:]))
    audio = stream(codec, official["continued/patches"], slots, history, [1, 2, 5])
    close(audio, official["continued/audio"], 1e-5)
    codec.reset(history, slots)
    fresh = codec.decode(official["continued/patches"][:, :1], slots, history)
    assert (fresh - official["continued/audio"][:, :HOP]).abs().max() > 1e-2


@pytest.mark.parametrize(("samples", "side"), ENCODED)
def test_patches_are_those_of_the_official_encoder(codec, official, samples, side):
    audio, expected = official[f"encode_{samples}_{side}/audio"], official[f"encode_{samples}_{side}/patches"]
    assert audio.shape == (samples,)
    patches = codec.encode(audio.float() / 32768, SILENCE[side])
    assert patches.dtype == torch.float32
    # 1e-5: float32 rounding of both sides.
    close(patches, expected, 1e-5)


@pytest.mark.parametrize("samples", [1, ENCODER_HOP, 9 * ENCODER_HOP - 7])
def test_silence_fills_the_side_that_was_asked_for(codec, samples):
    audio = torch.from_numpy(sound(samples)).float()
    silence = torch.zeros(-samples % ENCODER_HOP)
    assert torch.equal(codec.encode(audio), codec.encode(torch.cat([audio, silence])))
    before = codec.encode(audio, "before")
    assert torch.equal(before, codec.encode(torch.cat([silence, audio])))
    assert samples % ENCODER_HOP == 0 or not torch.equal(before, codec.encode(audio))


def test_recordings_are_encoded_in_pieces_as_they_are_at_once():
    codec = make_codec()
    # Pieces are of 100 latents, so these are two and a bit.
    audio = torch.from_numpy(sound(6 * 25 * ENCODER_HOP // 3 + 3 * ENCODER_HOP))
    with torch.no_grad():
        whole = codec.encoder(audio[None])[0]
    assert len(whole) == 4 * (50 + 3)
    close(codec.encode(audio).flatten(0, 1), whole)


def test_the_released_sizes_keep_what_they_must():
    with torch.device("meta"):
        codec = VoxCodec(CodecConfig())
    assert (codec.sample_rate, codec.hop, codec.encoder.hop) == (48000, 7680, 640)
    # An impulse reaches 20 latents of the official class.
    assert codec.decoder.reach_frames == 5
    elements = sum(length * width for length, width in codec.decoder.layout.values())
    # Of the streaming state of the official class.
    assert elements == 161_856


def test_encoding_asks_nothing_of_the_device():
    codec = make_codec(dtype=torch.float32).to("meta")
    audio = torch.zeros(1000, device="meta")
    with device_only():
        assert codec.encode(audio, "before").shape == (25, PATCH, CONFIG.latent_dim)


@pytest.mark.parametrize(
    ("rate", "used"), [(16000, 0), (20000, 0), (20001, 1), (30000, 1), (40000, 2), (40001, 3), (48000, 3)]
)
def test_the_output_rate_picks_its_condition(rate, used):
    config = dataclasses.replace(CONFIG, out_sample_rate=rate, sample_rate=rate // 3)
    if rate % 3:
        config = dataclasses.replace(config, sample_rate=rate, encoder_rates=(5, 3, 2))
    codec = VoxCodec(config)
    block = codec.decoder.model[2]
    assert torch.equal(block.affine[0], block.scale_embed.weight[used])
    assert torch.equal(block.affine[1], block.bias_embed.weight[used])


def test_a_configuration_that_contradicts_itself_is_refused():
    with pytest.raises(CheckpointError, match="500 patches a second are encoded, but 400 decoded"):
        VoxCodec(dataclasses.replace(CONFIG, encoder_rates=(2, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (8, 4)])
def test_the_released_size_streams_fused_on_a_gpu(rows, columns):
    codec = codec_weights.FILE.init_dummy(CodecConfig(), 0, device=torch.device("cuda"), dtype=torch.bfloat16)
    choice = codec.settle("auto", rows, [columns, columns])
    assert choice.dtype == codec.decoder.weight.dtype == torch.float16
    assert choice.tried_db >= 40


@pytest.mark.gpu
def test_a_gpu_encodes_what_a_cpu_does(official):
    codec = make_codec(dtype=torch.float32).cuda()
    codec.finalize()
    audio, expected = official["encode_2999_left/audio"], official["encode_2999_left/patches"]
    # The library's strided convolutions round to TensorFloat32.
    close(codec.encode((audio.float() / 32768).cuda(), "before").cpu(), expected, 5e-3)
