"""Streaming by slot, of every codec whose decoder is made of causal layers."""

import copy
import dataclasses
import functools

import pytest
import tiny_dual_ar
import tiny_talker
import tiny_vox_lm
import torch
from families import FAMILIES, draw, scale_beyond, scaled, settled
from tiny_talker import CHUNKS, FRAMES, close, stream
from without_gpu import device_only

from sonoro.core.errors import ConfigError
from sonoro.models import registry
from sonoro.models.base import Voice
from sonoro.models.shared.codec_choice import HALF_LIMIT, snr_db
from sonoro.nn import vocoder_fused
from sonoro.nn.window import WindowLayer
from sonoro.ops.residual_unit import TILES

MAKERS = {"qwen3_tts": tiny_talker.make_codec, "fish_s2": tiny_dual_ar.make_codec, "voxcpm2": tiny_vox_lm.make_codec}
TILED = {
    "qwen3_tts": dataclasses.replace(
        tiny_talker.SMALL,
        decoder_config=dataclasses.replace(
            tiny_talker.SMALL_DECODER,
            latent_dim=32,
            codebook_dim=32,
            decoder_dim=128,
            hidden_size=64,
            intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=20,
        ),
    ),
    "fish_s2": tiny_dual_ar.TILED,
    "voxcpm2": tiny_vox_lm.TILED,
}
"""Small sizes that the kernels take."""
HALVES = (torch.float16, torch.bfloat16)
LEAST_DB = {
    ("qwen3_tts", False): dict(zip(HALVES, (38, 20), strict=True)),
    ("qwen3_tts", True): dict(zip(HALVES, (46, 28), strict=True)),
    ("fish_s2", False): dict(zip(HALVES, (43, 25), strict=True)),
    ("fish_s2", True): dict(zip(HALVES, (45, 27), strict=True)),
    ("voxcpm2", False): dict(zip(HALVES, (58, 41), strict=True)),
    ("voxcpm2", True): dict(zip(HALVES, (57, 40), strict=True)),
}
"""By family and whether it is `TILED`: how far below the sound, in float32, half precision may leave its noise.

One to two dB less than the modules in half precision gave at least, of six draws on a CPU; the fused operations round
less often and gave 1 to 3 dB more than those. What is off by 1% of the sound is 40 dB below it.
"""


@pytest.fixture(scope="module", params=MAKERS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def make(name):
    return MAKERS[name]


@pytest.fixture(scope="module")
def codec(make):
    return make()


@pytest.mark.parametrize("chunks", CHUNKS)
def test_any_split_into_chunks_gives_the_whole(codec, chunks):
    frames = draw(codec, 3)
    history, slots = codec.allocate(5), torch.tensor([4, 0, 2])
    whole = codec.decode(frames)
    assert whole.shape == (3, FRAMES * codec.hop)
    assert 0.05 < whole.abs().max() < 1
    close(stream(codec, frames, slots, history, chunks), whole)
    # The rows hold a past now; a reset must leave nothing of it.
    codec.reset(history, slots)
    close(stream(codec, frames, slots, history, chunks), whole)


def test_slots_interleaved_and_shuffled(codec):
    frames = draw(codec, 4)
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
        padded = torch.cat([chunk, draw(codec, 2, columns, seed=turn)])
        audio = codec.decode(padded, torch.tensor([*(streams[m] for m in members), 4, 4]), history)
        for row, member in enumerate(members):
            heard[member].append(audio[row])
            progress[member] += columns
    assert min(progress.values()) > FRAMES // 2
    for member, parts in heard.items():
        close(torch.cat(parts), whole[member, : progress[member] * codec.hop])


@pytest.mark.parametrize("reference_frames", [1, 4, 60])
def test_priming_is_decoding_the_reference_unheard(codec, reference_frames):
    reference, frames = draw(codec, 1, reference_frames, seed=5), draw(codec, 2)
    assert codec.decoder.reach_frames < 60
    whole = codec.decode(torch.cat([torch.cat([reference] * 2), frames], dim=1))
    history, slots = codec.allocate(3), torch.tensor([2, 1])
    codec.decode(draw(codec, 2, seed=9), slots, history)
    codec.reset(history, slots)
    codec.prime(history, slots, Voice(data=None, reference_frames=reference[0]))
    saved = history.save(slots[1:])
    expected = whole[:, reference_frames * codec.hop :]
    close(stream(codec, frames, slots, history, [1, 6, 12]), expected)
    slot = torch.tensor([0])
    history.load(slot, saved)
    close(stream(codec, frames[1:], slot, history, [7, 12]), expected[1:])


def test_a_voice_is_primed_once(codec):
    voice = Voice(data=None, reference_frames=draw(codec, 1, 9, seed=5)[0])
    history, first, second = codec.allocate(3), torch.tensor([2]), torch.tensor([0, 1])
    codec.prime(history, first, voice)
    # What the voice kept is what counts from now on, not its frames; a later call starts from it, in any history.
    voice = dataclasses.replace(voice, reference_frames=draw(codec, 1, 9, seed=6)[0])
    codec.decode(draw(codec, 1, 4), first, history)
    other, frames = codec.allocate(2), draw(codec, 2)
    codec.prime(other, second, voice)
    whole = codec.decode(torch.cat([torch.cat([draw(codec, 1, 9, seed=5)] * 2), frames], dim=1))
    close(stream(codec, frames, second, other, [7, 12]), whole[:, 9 * codec.hop :])


def test_the_reach_covers_all_that_rendering_keeps(codec):
    """What is kept after the last frames alone is what is kept after all of them; after half as many it is not."""
    with torch.no_grad():
        hidden = codec.decoder.contextualize(
            codec.decoder.latents(draw(codec, 1, 40)), codec.allocate(1).at(torch.tensor([0]))
        )

    @torch.no_grad()
    def kept(frames):
        history = codec.allocate(1)
        codec.decoder.render(hidden[:, -frames:], history.at(torch.tensor([0])))
        return torch.cat([rows[0].flatten() for rows in history.columns.values()])

    reach = codec.decoder.reach_frames
    assert reach < 40
    # Other lengths round otherwise: 5e-12 where each product is up to 8 steps of float64 off.
    close(kept(reach), kept(40), 5e-11)
    assert (kept(reach // 2) - kept(40)).abs().max() > 1e-6


def test_a_long_stream_keeps_its_positions(codec):
    """Far beyond the window, one frame a call, against the whole decode."""
    frames = draw(codec, 1, 150)
    history = codec.allocate(1)
    close(stream(codec, frames, torch.tensor([0]), history, [1] * 150), codec.decode(frames))
    assert history.seen.tolist() == [150, 0]


def test_float32_streams_within_rounding(make):
    codec = make(dtype=torch.float32, snake_std=0.1)
    frames = draw(codec, 2)
    whole = codec.decode(frames)
    assert whole.dtype == torch.float32
    history = codec.allocate(2)
    # 1e-4: float32 rounding through some thirty layers at activations of released size.
    close(stream(codec, frames, torch.tensor([1, 0]), history, [1, 2, 3, 5, 8]), whole, 1e-4)


def test_bfloat16_gives_float32_samples(name, make):
    codec = make(dtype=torch.bfloat16, snake_std=0.1)
    frames = draw(codec, 1, 4)
    history = codec.allocate(1)
    assert {columns.dtype for columns in history.columns.values()} == {torch.bfloat16}
    audio = codec.decode(frames, torch.tensor([0]), history)
    assert audio.dtype == torch.float32
    expected = make(dtype=torch.float32, snake_std=0.1).decode(frames)
    assert snr_db(audio, expected) >= LEAST_DB[name, False][torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 9])
def test_a_decode_has_fixed_shapes_and_asks_nothing_of_the_device(make, dtype, columns):
    codec = make(dtype=dtype).to("meta")
    history = codec.allocate(3)
    frames, slots = draw(codec, 2, columns).to("meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    with device_only():
        codec.reset(history, slots)
        assert codec.decode(frames, slots, history).shape == (2, columns * codec.hop)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("is_one_launch", [False, True])
def test_fused_operations_decode_as_the_modules(make, codec, chunks, is_one_launch, monkeypatch):
    """Whether a residual unit is one launch, as in large batches, or two."""
    monkeypatch.setattr(vocoder_fused, "unit_tile", lambda *_: TILES[96] if is_one_launch else None)
    fused = make()
    fused.fused = fused.fuse(fused.decoder, torch.float64)
    frames, slots = draw(codec, 3), torch.tensor([4, 0, 2])
    whole = codec.decode(frames)
    close(fused.decode(frames), whole)
    history, expected = codec.allocate(5), codec.allocate(5)
    codec.decode(draw(codec, 3, 7, seed=4), slots, history)
    codec.reset(history, slots)
    close(stream(fused, frames, slots, history, chunks), whole)
    # The same rows are left, so that either can go on where the other stopped.
    stream(codec, frames, slots, expected, chunks)
    assert torch.equal(history.seen[slots], expected.seen[slots])
    for key, columns in history.columns.items():
        close(columns[slots], expected.columns[key][slots])


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_fused_rounding_is_finer_than_that_of_the_modules(name, make, dtype, is_tiled):
    given = {"snake_std": 0.1} | ({"config": TILED[name]} if is_tiled else {})
    codec, wide = make(dtype=dtype, **given), make(dtype=torch.float32, **given)
    frames = draw(codec, 2)
    expected, least_db = wide.decode(frames), LEAST_DB[name, is_tiled][dtype]
    modules_db = snr_db(codec.decode(frames), expected)
    codec.fused = codec.fuse(codec.decoder, dtype)
    # The modules round after every operation, the fused ones once a layer.
    assert snr_db(codec.decode(frames), expected) > modules_db >= least_db


def test_a_fused_decode_has_fixed_shapes_and_asks_nothing_of_the_device(make):
    codec = make(dtype=torch.float16).to("meta")
    codec.fused, history = codec.fuse(codec.decoder, torch.float16), codec.allocate(3)
    frames, slots = draw(codec, 2, 3).to("meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    with device_only():
        assert codec.decode(frames, slots, history).shape == (2, 3 * codec.hop)


@pytest.mark.parametrize("family", ["qwen3_tts", "fish_s2"])
def test_a_fused_decoder_keeps_its_transformer_once(family):
    """And is what it was, though it moves once more; what tells checkpoints apart finds shapes and first rows."""

    def heads(decoder):
        tensors = decoder.state_dict().items()
        return {
            name: (tensor.shape, tensor[0].tolist())
            for name, tensor in tensors
            if ".layers." in name and name.endswith("_proj.weight")
        }

    codec = MAKERS[family](TILED[family], torch.float32, 0.1)
    frames, expected = draw(codec, 2), heads(copy.deepcopy(codec.decoder).half())
    names = [*codec.decoder.state_dict()]
    settled(codec, "float16")
    assert [*codec.decoder.state_dict()] == names
    assert heads(codec.decoder) == expected
    layers = [part for part in codec.decoder.modules() if isinstance(part, WindowLayer)]
    matrices = [weight for layer in layers for weight in layer.parameters() if weight.ndim == 2]
    held = sum(weight.untyped_storage().nbytes() for weight in matrices)
    folded = sum(matrix.nbytes for layer in layers for matrix in layer.folded)
    assert folded == sum(weight.nbytes for weight in matrices)
    assert held < folded / 10
    assert {matrix.data_ptr() for layer in codec.fused.layers for matrix in (layer.qkv, layer.gate_up)} <= {
        matrix.data_ptr() for layer in layers for matrix in layer.folded
    }
    heard = codec.decode(frames)
    codec.move(torch.device("cpu"))
    assert torch.equal(codec.decode(frames), heard)


@pytest.mark.parametrize(("wanted", "least_db"), [("float16", 40), ("bfloat16", 20), ("auto", torch.inf)])
def test_what_serves_was_compared_with_float32(make, wanted, least_db, caplog):
    """On a CPU by the references of the fused operations, where auto is the modules themselves."""
    wide, codec = (make(dtype=torch.float32, snake_std=0.1) for _ in range(2))
    frames, slots = draw(codec, 2), torch.tensor([2, 0])
    choice = settled(codec, wanted)
    assert choice.dtype == codec.decoder.weight.dtype == getattr(torch, {"auto": "float32"}.get(wanted, wanted))
    assert not caplog.records
    history = codec.allocate(3)
    assert {columns.dtype for columns in history.columns.values()} == {choice.dtype}
    expected = wide.decode(frames)
    assert snr_db(codec.decode(frames), expected) >= least_db
    assert snr_db(stream(codec, frames, slots, history, CHUNKS[5]), expected) >= min(least_db, 100)
    if wanted != "auto":
        assert choice.tried_db >= least_db
        assert choice.peaks[0].value == max(peak.value for peak in choice.peaks)
        assert f"codec in {wanted} ({wanted}): asked for; peak" in str(choice)


BEYOND = {
    **{name: functools.partial(make, TILED[name], torch.float32, 0.1) for name, make in MAKERS.items()},
    **{f"tiny {name}": lambda tiny=tiny: tiny.load().model.codec for name, tiny in FAMILIES.items()},
    "builtin": lambda: copy.deepcopy(builtin_codec()),
}


@functools.cache
def builtin_codec():
    return registry.load(device="cpu").model.codec


@pytest.fixture(scope="module", params=BEYOND)
def beyond(request):
    """What makes a codec whose last stream is beyond float16 here and there; frames, and their audio in float32."""
    make, plain = BEYOND[request.param], BEYOND[request.param]()
    by, frames = scale_beyond(plain), draw(plain, 2)
    wide = scaled(plain, by)
    expected = wide.decode(frames)
    assert expected.abs().max() > 0.01
    # What this is about: the modules in float16 overflow, and fused operations saturate.
    assert not wide.to(torch.float16).decode(frames).isfinite().all()
    return lambda: scaled(make(), by), frames, expected


@pytest.mark.parametrize("wanted", ["auto", "float16", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_stream_beyond_float16_is_heard_as_in_float32(beyond, wanted, device):
    """Whatever was asked for: no sample that is not finite, and unless bfloat16 was asked for, 40 dB."""
    make, frames, expected = beyond
    codec, frames = make(), frames.to(device)
    choice = settled(codec, wanted, device)
    assert choice.dtype != torch.float16
    if choice.tried == "float16":
        assert choice.tried_db < 40
    streamed = stream(codec, frames, torch.tensor([2, 0], device=device), codec.allocate(3), [1, 4, 14])
    for audio in (codec.decode(frames), streamed):
        assert audio.isfinite().all()
        assert snr_db(audio.cpu(), expected) >= (20 if wanted == "bfloat16" else 40)


def test_auto_takes_float16_with_a_margin_alone(make, monkeypatch):
    """The rule, as on a GPU: float16, bfloat16 where it is true enough, else float32; and why."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    plain = make(dtype=torch.float32, snake_std=0.1)
    choice = settled(plain, "auto")
    assert (choice.dtype, choice.tried) == (torch.float16, "float16")
    assert "float16 holds" in choice.reason
    room = HALF_LIMIT / choice.peaks[0].value
    near = scaled(make(dtype=torch.float32, snake_std=0.1), room)
    choice = settled(near, "auto")
    assert choice.peaks[0].value * 4 > HALF_LIMIT
    assert choice.tried == "bfloat16"
    assert choice.dtype == (torch.bfloat16 if choice.tried_db >= 40 else torch.float32)
    beside = make(dtype=torch.float32, snake_std=0.1)
    beside.model_dtype = torch.float32
    assert beside.settle("auto", 3, [1]).dtype == torch.float32


def test_a_settled_codec_stays_so(make):
    codec = make(dtype=torch.float32, snake_std=0.1)
    settled(codec, "float32")
    first = settled(codec, "float16")
    assert settled(codec, "float16") is first
    with pytest.raises(ConfigError, match="codec_dtype: 'bfloat16' is not allowed; the codec is in float16: load"):
        settled(codec, "bfloat16")


def breaking(codec, render):
    """`codec`, whose fused decoder renders by `render`, which is given its own."""
    fuse = codec.fuse

    def broken(decoder, dtype):
        fused = fuse(decoder, dtype)
        own = fused.render
        fused.render = lambda x, past: render(own, x, past)
        return fused

    codec.fuse = broken
    return codec


@pytest.mark.parametrize(
    "render",
    [lambda own, x, past: own(x.flip(-1), past), lambda own, x, past: 1.02 * own(x, past)],
    ids=["plainly", "by 2%"],
)
def test_a_fused_decoder_that_is_wrong_is_found_and_not_used(make, caplog, render):
    codec = breaking(make(dtype=torch.float32, snake_std=0.1), render)
    choice = settled(codec, "float16")
    assert codec.fused is None
    assert codec.decoder.weight.dtype == choice.dtype == torch.float32
    assert choice.tried_db < 40
    assert "event=codec_dtype" in caplog.text
    assert "less than 40 dB" in caplog.text


def test_a_fused_decoder_that_fails_is_not_used(make, caplog):
    def fail(own, x, past):
        raise RuntimeError("no such kernel")

    codec = breaking(make(dtype=torch.float32, snake_std=0.1), fail)
    assert settled(codec, "float16").dtype == torch.float32
    assert codec.fused is None
    assert "failed: RuntimeError('no such kernel')" in caplog.text


def test_one_sample_that_is_not_finite_is_enough(make):
    def spoil(own, x, past):
        audio = own(x, past)
        audio[0, 0] = torch.nan
        return audio

    codec = breaking(make(dtype=torch.float32, snake_std=0.1), spoil)
    assert settled(codec, "float16").dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("wanted", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16), ("auto", torch.float16)]
)
def test_a_gpu_streams_fused(name, make, wanted, dtype):
    codec = make(TILED[name], torch.float32, 0.1)
    frames, rows = draw(codec, 2), draw(codec, 5).cuda()
    expected = codec.decode(frames)
    settled(codec, wanted, "cuda")
    assert codec.fused is not None
    frames, slots = frames.cuda(), torch.tensor([2, 0], device="cuda")
    whole = codec.decode(frames)
    assert snr_db(whole.cpu(), expected) >= LEAST_DB[name, True][dtype]
    for chunks in CHUNKS:
        history = codec.allocate(3)
        streamed = stream(codec, frames, slots, history, chunks)
        # A product of other rows may be summed in another order; 40 dB is what a listener must be given.
        assert snr_db(streamed, whole) >= 40
    assert snr_db(codec.decode(rows)[3:4], codec.decode(rows[3:4])) >= 40


@pytest.mark.gpu
@pytest.mark.parametrize("is_tiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_captured_decode_is_the_eager_one(name, make, dtype, is_tiled):
    codec = make(TILED[name], torch.float32, 0.1) if is_tiled else make(dtype=torch.float32, snake_std=0.1)
    settled(codec, str(dtype).removeprefix("torch."), "cuda")
    assert (codec.fused is None) == (dtype == torch.float32)
    history, slots = codec.allocate(3), torch.tensor([2, 0], device="cuda")
    frames = draw(codec, 2).cuda()
    expected = stream(codec, frames, slots, history, [1] * FRAMES)
    chunk, graph = frames[:, :1].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        audio = codec.decode(chunk, slots, history)
    for _ in range(3):
        codec.reset(history, slots)
        heard = []
        for frame in frames.split(1, dim=1):
            chunk.copy_(frame)
            graph.replay()
            heard.append(audio.clone())
        # The same kernels in the same order: no rounding differs, from one run to the next either.
        assert torch.equal(torch.cat(heard, dim=1), expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_priming_does_not_wait_for_a_gpu(name, make):
    codec = make(TILED[name], torch.float32, 0.1)
    settled(codec, "float16", "cuda")
    history, slots = codec.allocate(2), torch.tensor([1], device="cuda")
    first, second = (Voice(data=None, reference_frames=draw(codec, 1, 9, seed=seed)[0].cpu()) for seed in (5, 6))
    codec.prime(history, slots, first)
    try:
        torch.cuda.set_sync_debug_mode("error")
        codec.prime(history, slots, second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
