"""How far a batch moves what its rows decide alone, in every family that decides for codes, at tiny sizes."""

import pytest
import torch
from families import FAMILIES
from parity import NEAR_TIE, SPREAD, capacity, moved

GREEDY = {
    "talker": {"temperature": 0, "subtalker_dosample": False},
    "dual_ar": {"temperature": 0},
}


@pytest.mark.parametrize("dtype", SPREAD)
@pytest.mark.parametrize("name", GREEDY)
def test_a_batch_moves_a_gap_by_no_more_than_rounding_does(name: str, dtype: str) -> None:
    tiny = FAMILIES[name]
    model = tiny.load(getattr(torch, dtype)).model
    drawn = {"max_frames": 12, "ignore_eos": True} | GREEDY[name]
    prompts = [tiny.prompt(30 + number, seed=number, **drawn) for number in range(8)]
    found = moved(model, prompts, capacity(8, 192, 40, 24), 12)
    assert found.by.isfinite().float().mean() > 0.8
    assert found.rms < SPREAD[dtype]
    assert found.most < NEAR_TIE[dtype]


def test_a_row_that_is_another_one_is_no_near_tie() -> None:
    """What the limits are for: a row that hears its neighbour moves gaps by as much as they are wide."""
    tiny = FAMILIES["dual_ar"]
    model = tiny.load(torch.bfloat16).model
    frame = model.frame

    def swapped(state, slots, record=None):  # type: ignore[no-untyped-def]
        frame(state, slots, record)
        if record is not None and len(slots) > 1:
            record[:] = [values.roll(1, 0) for values in record]

    model.frame = swapped
    drawn = {"max_frames": 4, "ignore_eos": True} | GREEDY["dual_ar"]
    prompts = [tiny.prompt(30 + number, seed=number, **drawn) for number in range(3)]
    found = moved(model, prompts, capacity(3, 192, 40, 24), 4)
    assert found.rms > 10 * SPREAD["bfloat16"]
