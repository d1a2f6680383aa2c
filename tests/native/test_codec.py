"""The compiled codec decoder against the modules, which are its reference: same samples, same left context.

Both compute in float32, in other orders. At these random weights, whose activations are periodic, either is up to
1.3e-5 from the modules in float64, less than half a step of 16 bits.
"""

from collections.abc import Sequence

import pytest
import torch
from tiny_talker import CHUNKS, FRAMES, SMALL, draw, make_codec
from torch import Tensor

from sonoro.models import registry
from sonoro.models.qwen3_tts.codec import Qwen3Codec
from sonoro.models.qwen3_tts.compiled_codec import CompiledDecoder
from sonoro.models.shared.compiled_codec import PackedConvs
from sonoro.native import build
from sonoro.native.library import CompiledCode
from sonoro.nn.history import History

TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def codec() -> Qwen3Codec:
    return make_codec(SMALL, torch.float32)


def compiled(codec: Qwen3Codec, history: History, library: CompiledCode) -> CompiledDecoder:
    return CompiledDecoder(codec.decoder, history, PackedConvs(library), FRAMES)


def decoded(decode: CompiledDecoder, frames: Tensor, slots: Tensor, chunks: Sequence[int]) -> Tensor:
    return torch.cat([decode(chunk, slots) for chunk in frames.split([*chunks], dim=1)], dim=1)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_any_split_into_chunks_gives_the_samples_of_the_modules(
    codec: Qwen3Codec, library: CompiledCode, chunks: Sequence[int]
) -> None:
    frames, history = draw(1), codec.allocate(3)
    expected = codec.decode(frames)
    assert expected.std() > 0.01
    found = decoded(compiled(codec, history, library), frames, torch.tensor([2]), chunks)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_the_modules_go_on_where_the_compiled_code_stopped_and_back(codec: Qwen3Codec, library: CompiledCode) -> None:
    frames, history, slots = draw(1, seed=1), codec.allocate(2), torch.tensor([1])
    decode, parts = compiled(codec, history, library), []
    for number, chunk in enumerate(frames.split([1, 4, 2, 7, 5], dim=1)):
        parts.append(codec.decode(chunk, slots, history) if number % 2 else decode(chunk, slots))
    torch.testing.assert_close(torch.cat(parts, dim=1), codec.decode(frames), atol=TOLERANCE, rtol=0)


def test_slots_of_a_batch_do_not_touch_one_another(codec: Qwen3Codec, library: CompiledCode) -> None:
    frames, together, alone = draw(3, seed=2), codec.allocate(3), codec.allocate(3)
    decode, single = compiled(codec, together, library), compiled(codec, alone, library)
    for chunk in frames.split(5, dim=1):
        found = decode(chunk, torch.tensor([2, 0, 1]))
        for row, slot in enumerate((2, 0, 1)):
            assert torch.equal(found[row : row + 1], single(chunk[row : row + 1], torch.tensor([slot])))
    for key, columns in together.columns.items():
        assert torch.equal(columns, alone.columns[key]), key


def test_a_slot_that_was_reset_begins_anew(codec: Qwen3Codec, library: CompiledCode) -> None:
    frames, history, slots = draw(1, seed=3), codec.allocate(1), torch.tensor([0])
    decode = compiled(codec, history, library)
    first = decode(frames, slots)
    codec.reset(history, slots)
    assert torch.equal(decode(frames, slots), first)


def test_the_builtin_voice_sounds_the_same(library: CompiledCode) -> None:
    codec = registry.load(device="cpu").model.codec
    assert isinstance(codec, Qwen3Codec)
    frames = torch.randint(0, 512, (1, 5, 12), generator=torch.Generator().manual_seed(0))
    decode = CompiledDecoder(codec.decoder, codec.allocate(1), PackedConvs(library), 4)
    with torch.inference_mode():
        expected, found = codec.decode(frames), decoded(decode, frames, torch.tensor([0]), [1, 4])
    assert expected.std() > 0.001
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_weights_that_compiled_code_has_alone_come_back_as_they_were(library: CompiledCode) -> None:
    codec = registry.load(device="cpu").model.codec
    assert isinstance(codec, Qwen3Codec)
    before = {name: tensor.clone() for name, tensor in codec.decoder.state_dict().items()}
    packed = PackedConvs(library, frees=True)
    CompiledDecoder(codec.decoder, codec.allocate(1), packed, 1)
    held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in codec.decoder.state_dict().values())
    assert held_bytes < 0.2 * sum(tensor.nbytes for tensor in before.values())
    for _ in range(2):
        packed.restore()
        for name, tensor in codec.decoder.state_dict().items():
            assert torch.equal(tensor, before[name]), name


@pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
def test_a_codec_that_also_runs_in_torch_sounds_the_same() -> None:
    frames, codec = draw(1, seed=4), make_codec(SMALL, torch.float32)
    expected = codec.decode(frames)
    codec, slots = make_codec(SMALL, torch.float32), torch.tensor([0])
    decodes = [codec.compiled_decode(codec.allocate(1), FRAMES) for _ in range(2)]
    assert None not in decodes
    assert torch.equal(codec.decode(frames), expected)
    for decode in decodes:
        torch.testing.assert_close(decode(frames, slots), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
def test_other_dtypes_and_large_codecs_have_no_compiled_code(
    codec: Qwen3Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = make_codec()
    monkeypatch.setattr("sonoro.runtime.threads.SMALL_MODEL_PARAMETERS", 10)
    assert codec.compiled_decode(codec.allocate(1), 4) is None
    monkeypatch.undo()
    assert codec.compiled_decode(codec.allocate(1), 4) is not None
    assert wide.compiled_decode(wide.allocate(1), 4) is None
