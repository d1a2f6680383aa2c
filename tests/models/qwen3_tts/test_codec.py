import dataclasses
import math

import pytest
import torch
from parity import audio_of
from tiny_checkpoint import write_checkpoint
from tiny_talker import FRAMES, RELEASED, RELEASED_ENCODER, SMALL, close, draw, fill, make_codec, stream

from sonoro.core.errors import CheckpointError
from sonoro.models.qwen3_tts import weights
from sonoro.models.qwen3_tts.codec import CodecDecoder, Qwen3Codec
from sonoro.models.qwen3_tts.config import read_configs
from sonoro.models.qwen3_tts.encoder import CodecEncoder
from sonoro.nn.weights import stored_shapes


@pytest.fixture(scope="module")
def codec():
    return make_codec()


def test_derived_tables_change_nothing():
    codec = fill(Qwen3Codec(SMALL)).double()
    frames = draw(2, 5)
    before = codec.decode(frames)
    codec.finalize()
    close(codec.decode(frames), before, 1e-11)
    assert not any("folded" in name or "exp_alpha" in name for name in codec.state_dict())


def test_gradients_reach_every_weight_that_training_moves():
    codec = make_codec()
    decoder = codec.decoder
    latents = torch.randn(2, 8, 6, dtype=torch.float64).requires_grad_()
    audio = decoder(latents)
    assert audio.shape == (2, 6 * codec.hop)
    audio.square().sum().backward()
    assert latents.grad.abs().sum() > 0
    trained = {n: p for n, p in decoder.named_parameters() if p.requires_grad and not n.startswith("quantizer.")}
    still = [name for name, parameter in trained.items() if parameter.grad is None or not parameter.grad.any()]
    assert not still
    decoder.zero_grad()
    decoder.latents(draw(1, 3)).square().sum().backward()
    assert decoder.quantizer.rvq_rest.output_proj.weight.grad.any()


def test_latents_are_the_frames_half_of_decoding(codec):
    frames = draw(2)
    with torch.no_grad():
        latents = codec.decoder.latents(frames)
        assert latents.shape == (2, 8, FRAMES)
        close(codec.decoder(latents), codec.decode(frames), 1e-12)
        folded = codec.decoder.quantizer.folded
    expected = sum(folded[book][frames[..., book]] for book in range(4))
    close(latents.mT, expected, 1e-12)


def test_real_sizes_have_the_official_parameter_counts():
    with torch.device("meta"):
        decoder, encoder = CodecDecoder(RELEASED.decoder_config), CodecEncoder(RELEASED_ENCODER, 16)

    def count(module):
        return sum(math.prod(shape) for shape in stored_shapes(module).values())

    # Left out of our modules, being read by nothing: the two input projections of the decoder's quantizer ...
    assert count(decoder) + 2 * 256 * 512 == 114_323_137
    assert decoder.hop == 1920
    # ... and of the encoder's the output projections, levels 16 to 31, and a flag `initialized` of each level.
    assert count(encoder) + 2 * 512 * 256 + 16 * (2048 * 256 + 2048) + 32 == 56_234_304
    assert encoder.hop == 1920


def test_history_of_a_released_stream_takes_what_it_must():
    with torch.device("meta"):
        decoder = CodecDecoder(RELEASED.decoder_config)
    elements = sum(length * width for length, width in decoder.layout.values())
    # Convolutions, one input row per transposed convolution, and 71 keys and values in 8 layers.
    assert elements == 132_352 + 2_880 + 1_163_264


def test_a_configuration_that_contradicts_itself_is_refused():
    with pytest.raises(CheckpointError, match="decode_upsample_rate is 1920, but the product of its rates is 12"):
        Qwen3Codec(dataclasses.replace(SMALL, decode_upsample_rate=1920))
    encoder = dataclasses.replace(RELEASED_ENCODER, upsampling_ratios=(2, 3), num_filters=4, hidden_size=32)
    with pytest.raises(CheckpointError, match="encode_downsample_rate is 1920, but the encoder's stride is 12"):
        Qwen3Codec(dataclasses.replace(SMALL, encoder_config=encoder))


def test_without_an_encoder_encoding_is_refused(codec):
    with pytest.raises(CheckpointError, match="no encoder_config"):
        codec.encode(torch.zeros(100))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny checkpoint's codec by (variant, spread of the snake parameters), in float32."""

    def load(variant, snake_std):
        folder = tmp_path_factory.mktemp("checkpoint")
        write_checkpoint(folder, variant=variant, snake_std=snake_std)
        configs = read_configs(folder)
        return weights.FILES.load(folder, configs, device=torch.device("cpu"), dtype=torch.float32).codec

    return load


def test_float64_decodes_as_the_official_decoder(tiny, reference):
    case = reference("codec")["float64"]
    codec = tiny(case.facts["variant"], case.facts["snake_std"]).double()
    codec.finalize()
    frames = torch.tensor(case.tensors["codes"])[None]
    expected = torch.tensor(case.tensors["waveform_wide"])
    assert expected.abs().max() > 0.1
    close(codec.decode(frames)[0], expected)
    history = codec.allocate(2)
    for chunks in ([1] * 27, [2] * 13 + [1], [3] * 9, [5] * 5 + [2], [8, 8, 8, 3], [1, 9, 2, 15]):
        slots = torch.tensor([1])
        codec.reset(history, slots)
        close(stream(codec, frames, slots, history, chunks)[0], expected)


@pytest.mark.parametrize("name", ["float32", "pair_long", "pair_short"])
def test_float32_decodes_as_the_official_decoder(tiny, reference, name):
    case = reference("codec")[name]
    codec = tiny(case.facts["variant"], case.facts["snake_std"])
    frames, expected = torch.tensor(case.tensors["codes"])[None], torch.tensor(case.tensors["waveform"])
    # 1e-4: float32 rounding of both sides.
    close(codec.decode(frames)[0], expected, 1e-4)
    history = codec.allocate(1)
    chunks = [1, 2, 3, 1] if frames.shape[1] == 7 else [1, 2, 3, 5, 7]
    close(stream(codec, frames, torch.tensor([0]), history, chunks)[0], expected, 1e-4)


@pytest.mark.parametrize("samples", [24000, 1921, 10000, 5759])
def test_codes_are_those_of_the_official_encoder(tiny, reference, samples):
    case = reference("encoder")[f"samples_{samples}"]
    codec = tiny(case.facts["variant"], case.facts["snake_std"])
    frames = codec.encode(torch.tensor(audio_of(case)))
    assert frames.dtype == torch.int64
    assert frames.shape == (math.ceil(samples / codec.hop), 4)
    assert torch.equal(frames, torch.tensor(case.tensors["codes"]))


def test_encoder_latents_are_differentiable_and_cover_the_audio():
    config = dataclasses.replace(
        RELEASED_ENCODER, hidden_size=16, num_filters=4, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    config = dataclasses.replace(config, num_key_value_heads=2, intermediate_size=24, codebook_size=16, codebook_dim=8)
    encoder = fill(CodecEncoder(config, 4)).double()
    for samples in (1, 1920, 1921):
        audio = torch.randn(2, samples, dtype=torch.float64).requires_grad_()
        latents = encoder.latents(audio)
        assert latents.shape == (2, 16, math.ceil(samples / 1920))
        latents.square().sum().backward()
        assert audio.grad.any()
    codes = encoder.quantize(latents)
    assert codes.shape == (2, 2, 4)
    assert torch.equal(codes[1], encoder.encode(audio[1].detach()))


@pytest.mark.parametrize(("ratios", "layers", "kernel"), [((2, 3), 1, 7), ((3, 2), 2, 3), ((4,), 3, 1)])
def test_the_encoder_convolves_a_long_recording_in_pieces(ratios, layers, kernel):
    """As exactly as at once, also where the reach is longer than a piece and where it is not whole columns."""
    config = dataclasses.replace(
        RELEASED_ENCODER, upsampling_ratios=ratios, num_filters=4, hidden_size=32, num_residual_layers=layers
    )
    config = dataclasses.replace(config, kernel_size=kernel, intermediate_size=64, num_hidden_layers=2)
    config = dataclasses.replace(config, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    encoder = fill(CodecEncoder(dataclasses.replace(config, codebook_size=32, codebook_dim=8), 4)).double()
    audio = torch.randn(1, 331, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        whole = encoder.latents(audio)
        for columns in (1, 2, 5, 20, 1000):
            close(encoder.latents(audio, columns), whole)
