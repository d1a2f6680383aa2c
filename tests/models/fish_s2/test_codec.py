"""The codec against what the official classes computed on the same weights, and its released sizes."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_dual_ar import CONFIG, make_codec
from tiny_fish import HOP, codec_tensors, digest
from tiny_talker import close, stream

from sonoro.core.errors import CheckpointError
from sonoro.models.fish_s2 import codec_weights, encoder
from sonoro.models.fish_s2.codec import CodecConfig, FishCodec

STORED = Path(__file__).parents[2] / "assets" / "fish_s2" / "codec.safetensors"
DECODED = ("decode", "short", "past_the_end")
ENCODED = (1, HOP, 999, 5000)


ROUNDING = 5e-5
"""Of float32 on both sides: where each product is up to 8 steps off (`--rounding 8`), audio is by 1.3e-5."""


@pytest.fixture(scope="module")
def official():
    """What tools/reference/fish_s2_codec.py stored: audio [B, T * hop] of codes [B, T, K], codes [T, K] of int16."""
    with safe_open(STORED, framework="pt") as file:
        assert file.metadata()["weights"] == digest(codec_tensors()), "other weights are drawn here than were there"
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)


@pytest.fixture(scope="module")
def codec():
    return make_codec(dtype=torch.float32)


@pytest.mark.parametrize("name", DECODED)
def test_audio_is_that_of_the_official_decoder(codec, official, name):
    frames, expected = official[f"{name}/codes"], official[f"{name}/audio"]
    assert expected.abs().max() > 0.1
    close(codec.decode(frames), expected, ROUNDING)
    history, slots = codec.allocate(2), torch.tensor([1, 0])
    for chunks in ([1] * frames.shape[1], [frames.shape[1]]):
        codec.reset(history, slots)
        close(stream(codec, frames, slots, history, chunks), expected, ROUNDING)


def test_a_long_official_decode_is_streamed_in_mixed_chunks(codec, official):
    history, slots = codec.allocate(2), torch.tensor([0, 1])
    for chunks in ([3, 1, 7, 2, 9, 5, 13], [25, 15], [2] * 20):
        codec.reset(history, slots)
        audio = stream(codec, official["decode/codes"], slots, history, chunks)
        close(audio, official["decode/audio"], ROUNDING)


def test_fused_operations_give_the_official_audio(official):
    codec = make_codec(dtype=torch.float32)
    codec.fused = codec.fuse(codec.decoder, torch.float32)
    for name in DECODED:
        close(codec.decode(official[f"{name}/codes"]), official[f"{name}/audio"], ROUNDING)


@pytest.mark.parametrize("samples", ENCODED)
def test_codes_are_those_of_the_official_encoder(codec, official, samples):
    audio, expected = official[f"encode_{samples}/audio"], official[f"encode_{samples}/codes"]
    assert audio.shape == (samples,)
    frames = codec.encode(audio.float() / 32768)
    assert frames.dtype == torch.int64
    assert torch.equal(frames, expected)
    # Not a test of constants: every codebook speaks.
    assert samples < 999 or min(len(column.unique()) for column in frames.T) > 5


def test_recordings_are_encoded_in_pieces_as_they_are_at_once(monkeypatch):
    """In float64, where no code is near a tie: convolutions and the transformer behind them keep what they must."""
    codec = make_codec()
    audio = torch.randn(37 * HOP + 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = codec.encode(audio)
    assert len(whole) == 38
    for frames in (1, 7):
        monkeypatch.setattr(encoder, "_PIECE_FRAMES", frames)
        assert torch.equal(codec.encode(audio), whole)


def test_codes_past_a_codebook_are_its_last_and_stay_what_they_were(codec):
    frames = torch.full((1, 3, 10), 4095)
    given = frames.clone()
    last = torch.full((1, 3, 10), CONFIG.residual_codes - 1)
    last[..., 0] = CONFIG.semantic_codes - 1
    assert torch.equal(codec.decode(frames), codec.decode(last))
    assert torch.equal(frames, given)


def test_the_released_sizes_keep_what_they_must():
    with torch.device("meta"):
        codec = FishCodec(CodecConfig())
    assert (codec.sample_rate, codec.hop, codec.decoder.codes) == (44100, 2048, (10, 1024))
    # 9.146 frames by perturbation of the official classes.
    assert codec.decoder.reach_frames == 10
    elements = sum(length * width for length, width in codec.decoder.layout.values())
    # Convolutions and one input row per transposed convolution; 127 keys and values in 8 layers.
    assert elements == 134_208 + 2_080_768


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_rates": (2, 2, 4)}, "the encoder's hop is 64, but the decoder's is 32"),
        ({"encoder_dim": 16}, "the encoder's width is 128, but the decoder's is 64"),
        (
            {"encoder_transformer": dataclasses.replace(CONFIG.encoder_transformer, width=32)},
            "the encoder's transformer's width is 32, but the decoder's is 64",
        ),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        FishCodec(dataclasses.replace(CONFIG, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (8, 4)])
def test_the_released_size_streams_fused_on_a_gpu(rows, columns):
    codec = codec_weights.FILE.init_dummy(CodecConfig(), 0, device=torch.device("cuda"), dtype=torch.bfloat16)
    choice = codec.settle("auto", rows, [columns, columns])
    assert choice.dtype == codec.decoder.weight.dtype == torch.float16
    assert choice.tried_db >= 40
