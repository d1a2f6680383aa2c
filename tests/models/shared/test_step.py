"""How a step begins and ends: references against what they promise, kernels against references.

Of both kinds: codes are fed back behind a head's rows, or alone beside text, with those that were sampled marked.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from without_gpu import in_the_interpreter

from sonoro.models.shared.step import (
    Feedback,
    PendingText,
    StepState,
    begin_kernel,
    begin_reference,
    begin_step,
    check_kernels,
    finish_kernel,
    finish_reference,
    finish_step,
)

CODES, BOOKS, WIDTH, FRAMES, TEXTS = 11, 3, 20, 9, 40
SLOTS = (4, 0, 3, 1, 2)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def state_of(dtype: torch.dtype, device: str = "cpu", *, has_text: bool = False) -> StepState:
    """In the midst of speaking: the first frame, one before the limit; slots 3 and 5, the scratch slot, are done."""
    make = torch.Generator().manual_seed(0)
    done = torch.tensor([False, False, False, True, False, True])
    length = torch.tensor([0, 8, 3, 5, 7, 0])
    pending = torch.randn(6, WIDTH, generator=make).to(dtype)
    frames = torch.randint(CODES, (6, FRAMES, BOOKS), generator=make)
    state = StepState(*(rows.to(device) for rows in (done, length, 11 + length, pending, frames)))
    if not has_text:
        return state
    table = torch.randn(TEXTS, WIDTH, generator=make).to(device, dtype)
    ids = torch.randint(TEXTS, (6, 6), generator=make).to(device)
    seen = (torch.rand(6, CODES + 1, generator=make) < 0.3).to(device)
    return state._replace(seen=seen, text=PendingText(ids, table, lambda one: F.embedding(one, table)))


def feedback_of(dtype: torch.dtype, device: str = "cpu", *, has_text: bool = False) -> Feedback:
    make = torch.Generator().manual_seed(1)
    first = torch.randn(CODES + 1, WIDTH, generator=make).to(device, dtype)
    table = torch.randn(BOOKS * CODES, WIDTH, generator=make).to(device, dtype)
    starts = torch.arange(BOOKS, device=device) * CODES

    def embed(codes: Tensor) -> Tensor:
        total = F.embedding(codes + starts, table).to(torch.promote_types(dtype, torch.float32)).sum(1).to(dtype)
        return total if has_text else (first[codes[:, 0]] + total) / 2.5

    common = (embed, table, starts, CODES, CODES)
    return Feedback(*common) if has_text else Feedback(*common, earliest_end=1, first=first, divisor=2.5)


def frames_of(ends: tuple[int, ...] = (4,)) -> Tensor:
    """Codes of `SLOTS`; those at `ends` say the end of speech."""
    codes = torch.randint(CODES, (len(SLOTS), BOOKS), generator=torch.Generator().manual_seed(2))
    codes[list(ends), 0] = CODES
    return codes


def tensors_of(state: StepState) -> dict[str, Tensor]:
    return {name: rows for name, rows in state._asdict().items() if isinstance(rows, Tensor)}


def copied(state: StepState) -> StepState:
    return state._replace(**{name: rows.clone() for name, rows in tensors_of(state).items()})


@pytest.mark.parametrize("has_text", [False, True])
def test_a_frame_is_appended_and_fed_back(has_text: bool) -> None:
    state, feedback = state_of(torch.float64, has_text=has_text), feedback_of(torch.float64, has_text=has_text)
    before, codes = copied(state), frames_of()
    start = begin_reference(torch.tensor(SLOTS), state)
    assert start.slots.tolist() == [4, 0, 5, 1, 2]
    assert (start.position - start.length)[:2].tolist() == [11, 11]
    added = [start.inputs[index] - state.pending[slot] for index, slot in enumerate(start.slots)]
    if state.text is None:
        assert not torch.stack(added).any()
    else:
        table, ids = state.text.table, state.text.ids
        assert table is not None
        # The first frame has no text; the seventh and later ones take the last id.
        expected = [table[ids[4, 5]], torch.zeros(WIDTH), torch.zeros(WIDTH), table[ids[1, 5]], table[ids[2, 2]]]
        torch.testing.assert_close(added, [one.double() for one in expected], atol=1e-12, rtol=0)
    finish_reference(codes, start, torch.full((5,), 9), state, feedback)
    assert state.done.tolist() == [False, True, True, True, False, True]
    # Slot 2 said the end: its frames stay as they were, and it keeps its length.
    assert state.length.tolist() == [1, 9, 3, 5, 8, 0]
    for index, slot in ((0, 4), (1, 0), (3, 1)):
        assert torch.equal(state.frames[slot, before.length[slot]], codes[index])
        assert state.position[slot] == before.position[slot] + 1
        assert feedback.table is not None
        total = sum(feedback.table[book * CODES + codes[index, book]] for book in range(BOOKS))
        if feedback.first is not None:
            total = (feedback.first[codes[index, 0]] + total) / 2.5
        torch.testing.assert_close(state.pending[slot], total, atol=1e-12, rtol=0)
        if state.seen is not None and before.seen is not None:
            assert state.seen[slot].tolist() == [
                was or code == codes[index, 0] for code, was in enumerate(before.seen[slot].tolist())
            ]
    for name, rows in tensors_of(state).items():
        assert torch.equal(rows[3], tensors_of(before)[name][3])
    assert torch.equal(state.frames[2], before.frames[2])


def test_an_end_that_comes_too_early_is_kept_as_code_0_and_fed_back_alone() -> None:
    state, feedback, codes = state_of(torch.float64), feedback_of(torch.float64), frames_of(ends=(1,))
    start = begin_reference(torch.tensor(SLOTS), state)
    finish_reference(codes, start, torch.full((5,), 9), state, feedback)
    assert not state.done[0]
    assert state.frames[0, 0].tolist() == [0, *codes[1, 1:].tolist()]
    assert feedback.first is not None
    assert torch.equal(state.pending[0], feedback.first[-1])


def check(dtype: torch.dtype, device: str = "cpu", *, has_text: bool) -> None:
    feedback, index = feedback_of(dtype, device, has_text=has_text), torch.tensor(SLOTS, device=device)
    # Slot 3 is done: as a second one that writes to the scratch slot it would leave there whichever came last.
    for slots in (index, index[[0, 1, 3, 4]]):
        ours, theirs = (state_of(dtype, device, has_text=has_text) for _ in range(2))
        found, wanted = begin_kernel(slots, ours), begin_reference(slots, theirs)
        for tensor, expected in zip(found, wanted, strict=True):
            assert torch.equal(tensor, expected)
    codes = frames_of((3,) if has_text else (1,))[: len(slots)].to(device)
    limits = torch.tensor([[9, 0]] * len(slots), device=device)[:, 0]
    finish_kernel(codes, found, limits, ours, feedback)
    finish_reference(codes, wanted, limits, theirs, feedback)
    agree(ours, theirs, dtype)
    assert ours.length.tolist() == [1, 9, 3 if has_text else 4, 5, 8, 0]


def agree(ours: StepState, theirs: StepState, dtype: torch.dtype) -> None:
    for name, tensor in tensors_of(ours).items():
        # Sums of float32 in another order, which may round to the next number of the dtype, thrice.
        rtol = {torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(dtype, 1e-5) if name == "pending" else 0.0
        torch.testing.assert_close(tensor, tensors_of(theirs)[name], atol=1e-6 if rtol else 0.0, rtol=rtol)


def check_ended(dtype: torch.dtype, device: str = "cpu") -> None:
    """A slot that ends is the only one that writes to the scratch slot."""
    ours, theirs, feedback = state_of(dtype, device), state_of(dtype, device), feedback_of(dtype, device)
    start, codes = begin_reference(torch.tensor([2], device=device), ours), frames_of()[4:].to(device)
    for state, run in ((ours, finish_kernel), (theirs, finish_reference)):
        run(codes, start, start.length + 1, state, feedback)
    for name, tensor in tensors_of(ours).items():
        assert torch.equal(tensor, tensors_of(theirs)[name])
    assert ours.done[2]


@in_the_interpreter
def test_interpreted() -> None:
    # The interpreter truncates to bfloat16, but rounds to float16 as a GPU does.
    for dtype in (torch.float32, torch.float16):
        for has_text in (False, True):
            check(dtype, has_text=has_text)
        check_ended(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_text", [False, True])
def test_the_kernels_equal_the_references_on_a_gpu(dtype: torch.dtype, has_text: bool) -> None:
    check(dtype, "cuda", has_text=has_text)
    check_ended(dtype, "cuda")
    for count in (1, 5):
        check_kernels(count, state_of(dtype, "cuda", has_text=has_text), feedback_of(dtype, "cuda", has_text=has_text))
    assert not begin_step.is_broken
    assert not finish_step.is_broken
