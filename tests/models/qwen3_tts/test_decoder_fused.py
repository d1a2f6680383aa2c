import dataclasses

import pytest
import torch

from capture import device_only
from sonoro.models.qwen3_tts.decoder_fused import FusedDecoder
from tiny_codec import CHUNKS, FRAMES, SMALL, SMALL_DECODER, close, draw, make_codec, stream


@pytest.fixture(scope="module")
def codec():
    return make_codec()


@pytest.mark.parametrize("chunks", CHUNKS)
def test_fused_operations_decode_as_the_modules(codec, chunks):
    fused = FusedDecoder(codec.decoder, torch.float64)
    frames, slots = draw(3), torch.tensor([4, 0, 2])
    whole = codec.decode(frames)
    close(fused.decode(frames, None, None), whole)
    history, expected = codec.allocate(5), codec.allocate(5)
    codec.decode(draw(3, 7, seed=4), slots, history)
    codec.reset(history, slots)
    parts = [fused.decode(chunk, slots, history) for chunk in frames.split(chunks, dim=1)]
    close(torch.cat(parts, dim=1), whole)
    # The same rows are left, so that either can go on where the other stopped.
    stream(codec, frames, slots, expected, chunks)
    assert torch.equal(history.seen[slots], expected.seen[slots])
    for key, columns in history.columns.items():
        close(columns[slots], expected.columns[key][slots])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_rounding_is_finer_than_that_of_the_modules(dtype):
    expected = make_codec(dtype=torch.float32, snake_std=0.1).decode(draw(2))
    codec = make_codec(dtype=dtype, snake_std=0.1)
    error = (FusedDecoder(codec.decoder, dtype).decode(draw(2), None, None) - expected).norm()
    # The modules round after every operation, the fused ones once a layer.
    assert error < (codec.decode(draw(2)) - expected).norm()
    assert error < (0.01 if dtype == torch.float16 else 0.08) * expected.norm()


def test_a_fused_decode_has_fixed_shapes_and_asks_nothing_of_the_device():
    codec = make_codec(dtype=torch.float16).to("meta")
    fused, history = FusedDecoder(codec.decoder, torch.float16), codec.allocate(3)
    frames, slots = draw(2, 3).to("meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    with device_only():
        assert fused.decode(frames, slots, history).shape == (2, 3 * codec.hop)


def test_a_fused_decoder_that_is_wrong_is_found_and_not_used(caplog):
    codec = make_codec()
    codec.fused = FusedDecoder(codec.decoder, torch.float64)
    codec.check_kernels(3, 2)
    assert codec.fused is not None
    assert not caplog.records
    codec.fused.layers[0].attention = codec.fused.layers[1].attention
    codec.fused.output_weight = codec.fused.output_weight.flip(1)
    with caplog.at_level("WARNING"):
        codec.check_kernels(3, 2)
    assert codec.fused is None
    assert "kernel=codec fallback=modules" in caplog.text
    codec.check_kernels(3, 2)


TILED = dataclasses.replace(
    SMALL,
    decoder_config=dataclasses.replace(
        SMALL_DECODER,
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
)
"""Small sizes that the kernels take."""


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.01), (torch.bfloat16, 0.08)])
def test_a_gpu_streams_fused(dtype, tolerance):
    expected = make_codec(TILED, torch.float32, 0.1).decode(draw(2))
    codec = make_codec(TILED, dtype, 0.1).cuda()
    codec.finalize()
    codec.check_kernels(2, 3)
    assert codec.fused is not None
    frames, slots = draw(2).cuda(), torch.tensor([2, 0], device="cuda")
    whole = codec.decode(frames)
    assert (whole.cpu() - expected).norm() < tolerance * expected.norm()
    for chunks in CHUNKS:
        history = codec.allocate(3)
        streamed = stream(codec, frames, slots, history, chunks)
        # A product of other rows may be summed in another order; 40 dB is what a listener must be given.
        assert (streamed - whole).norm() < 0.01 * whole.norm()
    rows = draw(5).cuda()
    alone = codec.decode(rows[3:4])
    assert (codec.decode(rows)[3:4] - alone).norm() < 0.01 * alone.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_captured_fused_decode_is_the_eager_one(dtype):
    codec = make_codec(TILED, dtype, 0.1).cuda()
    codec.finalize()
    history, slots, frames = codec.allocate(3), torch.tensor([2, 0], device="cuda"), draw(2).cuda()
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
