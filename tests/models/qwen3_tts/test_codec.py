import dataclasses
import math

import pytest
import torch

from capture import device_only
from reference_assets import audio_of
from sonoro.core.errors import CheckpointError
from sonoro.models.base import Voice
from sonoro.models.qwen3_tts import weights
from sonoro.models.qwen3_tts.codec import CodecDecoder, Qwen3Codec
from sonoro.models.qwen3_tts.config import read_configs
from sonoro.models.qwen3_tts.encoder import CodecEncoder
from sonoro.nn.weights import stored_shapes
from tiny_checkpoint import write_checkpoint
from tiny_codec import CHUNKS, FRAMES, RELEASED, RELEASED_ENCODER, SMALL, close, draw, fill, make_codec, stream


@pytest.fixture(scope="module")
def codec():
    return make_codec()


@pytest.mark.parametrize("chunks", CHUNKS)
def test_any_split_into_chunks_gives_the_whole(codec, chunks):
    frames = draw(3)
    history, slots = codec.allocate(5), torch.tensor([4, 0, 2])
    whole = codec.decode(frames)
    assert whole.shape == (3, FRAMES * codec.hop)
    assert 0.05 < whole.abs().max() < 1
    close(stream(codec, frames, slots, history, chunks), whole)
    # The rows hold a past now; a reset must leave nothing of it.
    codec.reset(history, slots)
    close(stream(codec, frames, slots, history, chunks), whole)


def test_slots_interleaved_and_shuffled(codec):
    frames = draw(4)
    history, whole = codec.allocate(4), codec.decode(frames)
    streams, heard = {0: 2, 1: 0, 2: 3, 3: 1}, {stream: [] for stream in range(4)}
    progress = dict.fromkeys(streams, 0)
    for turn in range(40):
        members = torch.randperm(4, generator=torch.Generator().manual_seed(turn))[: 1 + turn % 4].tolist()
        columns = (1, 2, 3)[turn % 3]
        members = [member for member in members if progress[member] + columns <= FRAMES]
        if not members:
            continue
        chunk = torch.stack([frames[m, progress[m] : progress[m] + columns] for m in members])
        # Padding rows run with the scratch row, more than once.
        padded = torch.cat([chunk, draw(2, columns, seed=turn)])
        audio = codec.decode(padded, torch.tensor([*(streams[m] for m in members), 4, 4]), history)
        for row, member in enumerate(members):
            heard[member].append(audio[row])
            progress[member] += columns
    assert min(progress.values()) > FRAMES // 2
    for member, parts in heard.items():
        close(torch.cat(parts), whole[member, : progress[member] * codec.hop])


@pytest.mark.parametrize("reference_frames", [1, 4, 60])
def test_priming_is_decoding_the_reference_unheard(codec, reference_frames):
    reference, frames = draw(1, reference_frames, seed=5), draw(2)
    assert codec.decoder.reach_frames < 60
    whole = codec.decode(torch.cat([reference.expand(2, -1, -1), frames], dim=1))
    history, slots = codec.allocate(3), torch.tensor([2, 1])
    codec.decode(draw(2, seed=9), slots, history)
    codec.reset(history, slots)
    codec.prime(history, slots, Voice(data=None, reference_frames=reference[0]))
    saved = history.save(slots[1:])
    expected = whole[:, reference_frames * codec.hop :]
    close(stream(codec, frames, slots, history, [1, 6, 12]), expected)
    slot = torch.tensor([0])
    history.load(slot, saved)
    close(stream(codec, frames[1:], slot, history, [7, 12]), expected[1:])


def test_a_voice_is_primed_once():
    codec = make_codec()
    voice = Voice(data=None, reference_frames=draw(1, 9, seed=5)[0])
    history, first, second = codec.allocate(3), torch.tensor([2]), torch.tensor([0, 1])
    codec.prime(history, first, voice)
    # What the voice kept is what counts from now on, not its frames; a later call starts from it, in any history.
    voice = dataclasses.replace(voice, reference_frames=draw(1, 9, seed=6)[0])
    codec.decode(draw(1, 4), first, history)
    other = codec.allocate(2)
    codec.prime(other, second, voice)
    whole = codec.decode(torch.cat([draw(1, 9, seed=5).expand(2, -1, -1), draw(2)], dim=1))
    close(stream(codec, draw(2), second, other, [7, 12]), whole[:, 9 * codec.hop :])


def test_the_reach_covers_all_that_rendering_keeps(codec):
    """What is kept after the last frames alone is what is kept after all of them; after half as many it is not."""
    hidden = torch.randn(1, 40, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys = [key for key in codec.decoder.layout if not key.startswith("pre_")]

    @torch.no_grad()
    def kept(frames):
        history = codec.allocate(1)
        codec.decoder.render(hidden[:, -frames:], history.at(torch.tensor([0])))
        return torch.cat([history.columns[key][0].flatten() for key in keys])

    reach = codec.decoder.reach_frames
    assert reach < 40
    close(kept(reach), kept(40), 1e-12)
    assert (kept(reach // 2) - kept(40)).abs().max() > 1e-6


def test_float32_streams_within_rounding():
    codec = make_codec(dtype=torch.float32, snake_std=0.1)
    frames = draw(2)
    whole = codec.decode(frames)
    assert whole.dtype == torch.float32
    history = codec.allocate(2)
    # 1e-4: float32 rounding through some thirty layers at SnakeBeta parameters of released size.
    close(stream(codec, frames, torch.tensor([1, 0]), history, [1, 2, 3, 5, 8]), whole, 1e-4)


def test_bfloat16_gives_float32_samples():
    codec = make_codec(dtype=torch.bfloat16, snake_std=0.1)
    frames = draw(1, 4)
    history = codec.allocate(1)
    assert history.columns["pre_conv"].dtype == torch.bfloat16
    audio = codec.decode(frames, torch.tensor([0]), history)
    assert audio.dtype == torch.float32
    expected = make_codec(dtype=torch.float32, snake_std=0.1).decode(frames)
    # 8 bits of mantissa through some thirty layers: noise 20 dB below the sound (26 dB seen), no less.
    assert (audio - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 9])
def test_a_decode_has_fixed_shapes_and_asks_nothing_of_the_device(dtype, columns):
    codec = make_codec(dtype=dtype).to("meta")
    history = codec.allocate(3)
    frames, slots = draw(2, columns).to("meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    with device_only():
        codec.reset(history, slots)
        assert codec.decode(frames, slots, history).shape == (2, columns * codec.hop)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.float32, torch.float32),
        ("cpu", torch.bfloat16, torch.float32),
        ("cuda", torch.float32, torch.float32),
        ("cuda", torch.bfloat16, torch.float16),
    ],
)
def test_half_precision_is_for_gpus_that_are_not_asked_for_more(device, dtype, expected):
    assert weights.codec_dtype_for(torch.device(device), dtype) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_decode_is_the_eager_one(dtype):
    codec = make_codec(dtype=dtype, snake_std=0.1).cuda()
    codec.finalize()
    history, slots, frames = codec.allocate(3), torch.tensor([2, 0], device="cuda"), draw(2).cuda()
    expected = stream(codec, frames, slots, history, [1] * FRAMES)
    chunk, graph = frames[:, :1].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        audio = codec.decode(chunk, slots, history)
    codec.reset(history, slots)
    heard = []
    for frame in frames.split(1, dim=1):
        chunk.copy_(frame)
        graph.replay()
        heard.append(audio.clone())
    # The same kernels in the same order: no rounding differs.
    assert torch.equal(torch.cat(heard, dim=1), expected)


def test_derived_tables_change_nothing():
    codec = fill(Qwen3Codec(SMALL)).double()
    frames = draw(2, 5)
    before = codec.decode(frames)
    codec.finalize()
    close(codec.decode(frames), before, 1e-12)
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


def test_a_long_stream_keeps_its_positions(codec):
    """Far beyond the window, one frame a call, against the whole decode."""
    frames = draw(1, 150)
    history = codec.allocate(1)
    close(stream(codec, frames, torch.tensor([0]), history, [1] * 150), codec.decode(frames))
    assert history.seen.tolist() == [150, 0]


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
        return weights.load(folder, configs, device=torch.device("cpu"), dtype=torch.float32).codec

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
        audio = torch.randn(2, 1, samples, dtype=torch.float64).requires_grad_()
        latents = encoder.latents(audio)
        assert latents.shape == (2, 16, math.ceil(samples / 1920))
        latents.square().sum().backward()
        assert audio.grad.any()
    codes = encoder.quantize(latents)
    assert codes.shape == (2, 2, 4)
    assert torch.equal(codes[1], encoder.encode(audio[1, 0].detach()))


@pytest.mark.parametrize(("ratios", "layers", "kernel"), [((2, 3), 1, 7), ((3, 2), 2, 3), ((4,), 3, 1)])
def test_the_encoder_convolves_a_long_recording_in_pieces(ratios, layers, kernel):
    """As exactly as at once, also where the reach is longer than a piece and where it is not whole columns."""
    config = dataclasses.replace(
        RELEASED_ENCODER, upsampling_ratios=ratios, num_filters=4, hidden_size=32, num_residual_layers=layers
    )
    config = dataclasses.replace(config, kernel_size=kernel, intermediate_size=64, num_hidden_layers=2)
    config = dataclasses.replace(config, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    encoder = fill(CodecEncoder(dataclasses.replace(config, codebook_size=32, codebook_dim=8), 4)).double()
    audio = torch.randn(1, 1, 331, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        whole = encoder.latents(audio)
        for columns in (1, 2, 5, 20, 1000):
            close(encoder.latents(audio, columns), whole)
