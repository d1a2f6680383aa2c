"""The two ends of a frame: references against what they promise, kernels against references."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from interpreter import in_the_interpreter
from sonoro.models.ends import (
    EndRows,
    Feedback,
    begin,
    begin_kernel,
    begin_reference,
    check_kernels,
    finish,
    finish_kernel,
    finish_reference,
)

CODES, BOOKS, WIDTH, FRAMES = 11, 3, 20, 9
SLOTS = (4, 0, 3, 1, 2)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rows_of(dtype: torch.dtype, device: str = "cpu") -> EndRows:
    """In the midst of speaking: the first frame, one before the limit; slots 3 and 5, the scratch row, are done."""
    make = torch.Generator().manual_seed(0)
    done = torch.tensor([False, False, False, True, False, True])
    length = torch.tensor([0, 8, 3, 5, 7, 0])
    pending = torch.randn(6, WIDTH, generator=make).to(dtype)
    frames = torch.randint(CODES, (6, FRAMES, BOOKS), generator=make)
    return EndRows(*(rows.to(device) for rows in (done, length, 11 + length, pending, frames)))


def feedback_of(dtype: torch.dtype, device: str = "cpu", earliest_end: int = 1) -> Feedback:
    make = torch.Generator().manual_seed(1)
    first, tables = torch.randn(CODES + 1, WIDTH, generator=make), torch.randn(BOOKS, CODES, WIDTH, generator=make)
    return Feedback(first.to(device, dtype), tables.to(device, dtype), 2.5, earliest_end)


def frames_of(ends: tuple[int, ...] = (4,)) -> Tensor:
    """Codes of `SLOTS`; those at `ends` say the end of speech."""
    codes = torch.randint(CODES, (len(SLOTS), BOOKS), generator=torch.Generator().manual_seed(2))
    codes[list(ends), 0] = CODES
    return codes


def test_a_frame_is_appended_and_fed_back() -> None:
    state, feedback, codes = rows_of(torch.float64), feedback_of(torch.float64), frames_of()
    before = EndRows(*(rows.clone() for rows in state))
    start = begin_reference(torch.tensor(SLOTS), state)
    assert start.rows.tolist() == [4, 0, 5, 1, 2]
    assert torch.equal(start.inputs, state.pending[start.rows])
    assert (start.position - start.length)[:2].tolist() == [11, 11]
    finish_reference(codes, start, torch.full((5,), 9), state, feedback)
    assert state.done.tolist() == [False, True, True, True, False, True]
    # Slot 2 said the end: its frames stay as they were, and it keeps its length.
    assert state.length.tolist() == [1, 9, 3, 5, 8, 0]
    for line, slot in ((0, 4), (1, 0), (3, 1)):
        assert torch.equal(state.frames[slot, before.length[slot]], codes[line])
        assert state.position[slot] == before.position[slot] + 1
        total = feedback.first[codes[line, 0]] + sum(feedback.tables[book, codes[line, book]] for book in range(BOOKS))
        torch.testing.assert_close(state.pending[slot], total / 2.5, atol=1e-12, rtol=0)
    for rows, was in zip(state, before, strict=True):
        assert torch.equal(rows[3], was[3])
    assert torch.equal(state.frames[2], before.frames[2])


def test_an_end_that_comes_too_early_is_kept_as_code_0_and_fed_back_alone() -> None:
    state, feedback, codes = rows_of(torch.float64), feedback_of(torch.float64), frames_of(ends=(1,))
    start = begin_reference(torch.tensor(SLOTS), state)
    finish_reference(codes, start, torch.full((5,), 9), state, feedback)
    assert not state.done[0]
    assert state.frames[0, 0].tolist() == [0, *codes[1, 1:].tolist()]
    assert torch.equal(state.pending[0], feedback.first[-1])


def check(dtype: torch.dtype, device: str = "cpu") -> None:
    feedback, index = feedback_of(dtype, device), torch.tensor(SLOTS, device=device)
    # Slot 3 is done: as a second row that writes to the scratch row it would leave there whichever came last.
    for slots, ends in ((index, (4,)), (index[[0, 1, 3, 4]], (1,))):
        ours, theirs = rows_of(dtype, device), rows_of(dtype, device)
        found, wanted = begin_kernel(slots, ours), begin_reference(slots, theirs)
        for tensor, expected in zip(found, wanted, strict=True):
            assert torch.equal(tensor, expected)
        if len(slots) == len(SLOTS):
            continue
        codes = frames_of(ends)[: len(slots)].to(device)
        limits = torch.tensor([[9, 0]] * len(slots), device=device)[:, 0]
        finish_kernel(codes, found, limits, ours, feedback)
        finish_reference(codes, wanted, limits, theirs, feedback)
        for name, tensor, expected in zip(EndRows._fields, ours, theirs, strict=True):
            # Sums of float32 in another order, which may round to the next number of the dtype, thrice.
            rtol = {torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(dtype, 1e-5) if name == "pending" else 0.0
            torch.testing.assert_close(tensor, expected, atol=1e-6 if rtol else 0.0, rtol=rtol)
        assert ours.length.tolist() == [1, 9, 4, 5, 8, 0]


def check_ended(dtype: torch.dtype, device: str = "cpu") -> None:
    """A row that ends is the only one that writes to the scratch row."""
    ours, theirs, feedback = rows_of(dtype, device), rows_of(dtype, device), feedback_of(dtype, device)
    start, codes = begin_reference(torch.tensor([2], device=device), ours), frames_of()[4:].to(device)
    for rows, run in ((ours, finish_kernel), (theirs, finish_reference)):
        run(codes, start, start.length + 1, rows, feedback)
    for tensor, expected in zip(ours, theirs, strict=True):
        assert torch.equal(tensor, expected)
    assert ours.done[2]


@in_the_interpreter
def test_interpreted() -> None:
    # The interpreter truncates to bfloat16, but rounds to float16 as a GPU does.
    for dtype in (torch.float32, torch.float16):
        check(dtype)
        check_ended(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_equal_the_references_on_a_gpu(dtype: torch.dtype) -> None:
    check(dtype, "cuda")
    check_ended(dtype, "cuda")
    for count in (1, 5):
        check_kernels(count, rows_of(dtype, "cuda"), feedback_of(dtype, "cuda"))
    assert not begin.is_broken
    assert not finish.is_broken
