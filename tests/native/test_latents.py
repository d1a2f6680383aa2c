"""The compiled decoder of latents against the modules, which are its reference: same samples, same left context. Both
compute in float32, in other orders: within 1e-5 of the peak."""

from collections.abc import Iterator, Sequence

import pytest
import tiny_pocket
import torch
from tiny_pocket_lm import model_of
from torch import Tensor

from sonoro.models.pocket_tts.codec import PocketCodec
from sonoro.models.pocket_tts.compiled_codec import CompiledDecoder
from sonoro.models.shared.compiled_codec import PackedConvs
from sonoro.native import build
from sonoro.native.library import CompiledCode

FRAMES = 9


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def latents(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, FRAMES, 1, 8, generator=torch.Generator().manual_seed(seed))


def decoded(decode: object, frames: Tensor, slots: Tensor, chunks: Sequence[int]) -> Tensor:
    return torch.cat([decode(chunk, slots) for chunk in frames.split([*chunks], dim=1)], dim=1)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.02
    torch.testing.assert_close(found, expected, atol=float(1e-5 * expected.abs().max()), rtol=0)


@pytest.mark.parametrize("variant", tiny_pocket.VARIANTS)
@pytest.mark.parametrize("chunks", [[9], [1] * 9, [3, 1, 5]], ids=str)
def test_any_split_into_chunks_gives_the_samples_of_the_modules(
    library: CompiledCode, variant: str, chunks: Sequence[int]
) -> None:
    """Beyond the window of the transformer."""
    codec, frames = model_of(variant).codec, latents(1)
    history = codec.allocate(3)
    found = decoded(
        CompiledDecoder(codec.decoder, history, PackedConvs(library), FRAMES), frames, torch.tensor([2]), chunks
    )
    assert_close(found, codec.decode(frames))
    # The first samples rise from nothing.
    assert not found[0, 0]


def test_the_modules_go_on_where_the_compiled_code_stopped_and_back(library: CompiledCode) -> None:
    codec, frames, slots, parts = model_of("drifting").codec, latents(1, seed=1), torch.tensor([1]), []
    history = codec.allocate(2)
    decode = CompiledDecoder(codec.decoder, history, PackedConvs(library), FRAMES)
    for number, chunk in enumerate(frames.split([1, 3, 2, 3], dim=1)):
        parts.append(codec.decode(chunk, slots, history) if number % 2 else decode(chunk, slots))
    assert_close(torch.cat(parts, dim=1), codec.decode(frames))


def test_slots_of_a_batch_do_not_touch_one_another(library: CompiledCode) -> None:
    codec, frames = model_of().codec, latents(3, seed=2)
    together, alone = codec.allocate(3), codec.allocate(3)
    decode, single = (CompiledDecoder(codec.decoder, own, PackedConvs(library), FRAMES) for own in (together, alone))
    for chunk in frames.split(4, dim=1):
        found = decode(chunk, torch.tensor([2, 0, 1]))
        for row, slot in enumerate((2, 0, 1)):
            assert torch.equal(found[row : row + 1], single(chunk[row : row + 1], torch.tensor([slot])))
    for key, columns in together.columns.items():
        assert torch.equal(columns, alone.columns[key]), key
    assert torch.equal(together.seen, alone.seen)


def test_a_slot_that_was_reset_begins_anew(library: CompiledCode) -> None:
    codec, frames, slots = model_of().codec, latents(1, seed=3), torch.tensor([0])
    history = codec.allocate(1)
    decode = CompiledDecoder(codec.decoder, history, PackedConvs(library), FRAMES)
    first = decode(frames, slots)
    codec.reset(history, slots)
    assert torch.equal(decode(frames, slots), first)


@pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
def test_other_dtypes_have_no_compiled_code() -> None:
    codec = model_of().codec
    assert isinstance(codec, PocketCodec)
    assert codec.compiled_decode(codec.allocate(1), 4) is not None
    wide = codec.to(torch.float64)
    assert wide.compiled_decode(wide.allocate(1), 4) is None
