"""The two ends of a frame: kernels against references. What the references promise is tested with the frame."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from interpreter import in_the_interpreter
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.rows import (
    StepRows,
    begin,
    begin_kernel,
    begin_reference,
    check_kernels,
    finish,
    finish_kernel,
    finish_reference,
)
from sonoro.models.qwen3_tts.state import allocate
from speaking import capacity
from tiny_talker import tiny_config, tiny_talker

CAPACITY = capacity(slots=6, positions=32, frames=9, text=5)
SLOTS = (4, 0, 3, 1, 2)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def begun_rows(talker: Talker) -> StepRows:
    """Rows in the midst of speaking: the first frame, past the text, one before the limit; slots 3 and 5 are done."""
    make = torch.Generator().manual_seed(0)
    state = allocate(talker, CAPACITY, tiny_config().tts_pad_token_id).step_rows
    state.done[:3] = state.done[4] = False
    state.length[:5] = torch.tensor([0, 8, 3, 5, 7])
    state.position[:5] = 11 + state.length[:5]
    state.pending.copy_(torch.randn(state.pending.shape, generator=make))
    state.text_ids[:5] = torch.randint(40, (5, state.text_ids.shape[1]), generator=make)
    state.seen[:5] = torch.rand(5, state.seen.shape[1], generator=make) < 0.3
    return state


def frames(talker: Talker, device: torch.device) -> Tensor:
    """Codes of `SLOTS`; the last ends its speech."""
    codes = torch.randint(talker.codes, (len(SLOTS), talker.codebooks), generator=torch.Generator().manual_seed(1))
    codes[-1, 0] = talker.config.codec_eos_token_id
    return codes.to(device)


def check(dtype: torch.dtype, device: str = "cpu") -> None:
    with torch.inference_mode(False):
        talker = tiny_talker(dtype=dtype).to(device)
        talker.finalize()
    ours, theirs = begun_rows(talker), begun_rows(talker)
    # Slot 3 is done: as a second row that writes to the scratch row it would leave there whichever came last.
    for slots in (torch.tensor(SLOTS), torch.tensor([4, 0, 1, 2])):
        found, wanted = begin_kernel(slots.to(device), ours, talker), begin_reference(slots.to(device), theirs, talker)
        for tensor, expected in zip(found, wanted, strict=True):
            assert torch.equal(tensor, expected)
    codes = frames(talker, slots.device if device == "cpu" else torch.device(device))[1:]
    limits = torch.tensor([[9, 0], [9, 0], [9, 0], [9, 0]], device=device)[:, 0]
    finish_kernel(codes, found, limits, ours, talker)
    finish_reference(codes, wanted, limits, theirs, talker)
    for name, tensor, expected in zip(StepRows._fields, ours, theirs, strict=True):
        # Sums of float32 in another order, which may round to the next number of the dtype.
        rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 1e-5) if name == "pending" else 0.0
        torch.testing.assert_close(tensor, expected, atol=1e-6 if rtol else 0.0, rtol=rtol)
    assert ours.done.tolist() == [False, True, True, True, False, True, True]
    assert ours.length.tolist() == [1, 9, 3, 5, 8, 0, 0]


@in_the_interpreter
def test_interpreted() -> None:
    check(torch.float32)
    # The interpreter truncates to bfloat16, but rounds to this as a GPU does.
    check(torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_equal_the_references_on_a_gpu(dtype: torch.dtype) -> None:
    check(dtype, "cuda")
    with torch.inference_mode(False):
        talker = tiny_talker(dtype=dtype).cuda()
        talker.finalize()
    for rows in (1, 5):
        check_kernels(rows, allocate(talker, CAPACITY, 0).step_rows, talker)
    assert not begin.is_broken
    assert not finish.is_broken
