"""The frame step: the official patches and ends; noise by address.

That its rows are independent is tested with those of every family.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_vox
import torch
from parity import begin, capacity
from tiny_vox_lm import NEVER, begin_rows, cases, controls, prompt_of, random_prompt, tiny_lm
from torch import Tensor

from sonoro.models.base import Pages
from sonoro.models.shared.prompts import RowPrompt
from sonoro.models.voxcpm2 import frame as frame_module
from sonoro.models.voxcpm2.backbone import VoxLM
from sonoro.models.voxcpm2.frame import frame
from sonoro.models.voxcpm2.state import FrameState, admit, allocate, is_text_alone, prefill, stage

CAPACITY = capacity(slots=5, positions=128, frames=40, text=1)
WIDTHS = {"frames": (4, 8), "patch": (4, 8)}

ALIKE = {"atol": 1e-9, "rtol": 0}
"""Float64: another batch sums in another order, and nothing amplifies that much in some frames."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def lm() -> VoxLM:
    """In float64, so that no level of the quantiser hangs on rounding."""
    return tiny_lm(torch.float64)


def run(lm: VoxLM, state: FrameState, slots: Sequence[int], frames: int) -> None:
    for _ in range(frames):
        frame(lm, state, torch.tensor(slots))


def patches_of(state: FrameState, slot: int) -> Tensor:
    return state.frames[slot, : state.length[slot]].clone()


def alone(lm: VoxLM, prompt: RowPrompt) -> Tensor:
    """The frames of `prompt` spoken by itself in a fresh state, run until its row is done."""
    state = allocate(lm, CAPACITY)
    begin_rows(lm, state, [prompt], torch.tensor([0]))
    run(lm, state, [0], prompt.controls.max_frames)
    assert state.done[0]
    return patches_of(state, 0)


def use_stored_noise(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    stored = torch.from_numpy(tiny_vox.noise(seed, 40))
    monkeypatch.setattr(frame_module, "_noise", lambda row, length, like: stored[length].to(like.dtype))


@pytest.mark.parametrize("name", ["zero_shot", "continuation", "reference", "both"])
def test_patches_are_the_official_ones(reference_root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight in a row, each fed back, with all that they are made of; float32."""
    case = cases("runs", reference_root)[name]
    facts, stored = case.facts, {key: torch.from_numpy(value) for key, value in case.tensors.items()}
    use_stored_noise(monkeypatch, facts["seed"])
    lm = tiny_lm()
    count = len(stored["patches"])
    assert count == 8
    wanted = controls(max_frames=count, cfg=facts["cfg"], steps=facts["steps"], min_len=NEVER)
    prompt = prompt_of(cases("prompts", reference_root)[facts["prompt"]], wanted)
    state = allocate(lm, CAPACITY)
    begin_rows(lm, state, [prompt], torch.tensor([3]))
    record: list[Tensor] = []
    for _ in range(count):
        frame(lm, state, torch.tensor([3]), record)
    for place_of, key in enumerate(("hidden", "residual", "stop")):
        found = torch.cat(record[place_of::4])
        torch.testing.assert_close(found, stored[key], atol=1e-4, rtol=0)
    torch.testing.assert_close(patches_of(state, 3), stored["patches"], atol=1e-4, rtol=0)
    assert state.done[3]


@pytest.mark.parametrize("name", ["random_2", "always_0", "always_1", "always_2", "always_5"])
def test_speech_ends_where_the_official_one_does(
    reference_root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the patch at which it was decided, which is kept, and not before it may."""
    case = cases("ends", reference_root)[name]
    facts, stop = case.facts, torch.from_numpy(case.tensors["stop"])
    use_stored_noise(monkeypatch, facts["seed"])
    lm = tiny_lm(stop=facts["stop"])
    wanted = controls(max_frames=30, steps=facts["steps"], min_len=facts["min_len"])
    prompt = prompt_of(cases("prompts", reference_root)[facts["prompt"]], wanted)
    state = allocate(lm, CAPACITY)
    begin_rows(lm, state, [prompt], torch.tensor([1]))
    record: list[Tensor] = []
    for _ in range(facts["frames"]):
        assert not state.done[1]
        frame(lm, state, torch.tensor([1]), record)
    assert state.done[1]
    assert state.length[1] == facts["frames"]
    # 5e-6 of logits that are some hundreds where the head always stops: 40 steps of float32.
    torch.testing.assert_close(torch.cat(record[2::4]), stop, atol=2e-4, rtol=5e-6)
    if name != "random_2":
        assert facts["frames"] == facts["min_len"] + 2


def test_the_seed_the_segment_and_the_frame_decide_the_noise(lm: VoxLM) -> None:
    """The same in any batch and any slot; another seed or segment is other noise, and other speech."""
    wanted = [controls(seed=seed, segment=segment, max_frames=3) for seed, segment in ((5, 0), (6, 0), (5, 1), (5, 0))]
    prompts = [random_prompt(4, one) for one in wanted]
    state = allocate(lm, CAPACITY)
    slots = torch.tensor([4, 0, 2, 1])
    begin_rows(lm, state, prompts, slots)
    length = torch.zeros(4, dtype=torch.int64)
    noise = [frame_module._noise(state.samplers[0].read(slots), length + index, state.patch) for index in range(3)]
    for drawn in noise:
        assert drawn.shape == (4, *WIDTHS["patch"])
        assert torch.equal(drawn[0], drawn[3])
        single = frame_module._noise(state.samplers[0].read(slots[:1]), length[:1], state.patch)
        assert torch.equal(single[0], noise[0][0])
        for other in (1, 2):
            assert not torch.isclose(drawn[0], drawn[other]).any()
    assert not torch.isclose(noise[0], noise[1]).any()
    run(lm, state, slots.tolist(), 3)
    made = [patches_of(state, slot) for slot in slots.tolist()]
    torch.testing.assert_close(made[0], made[3], **ALIKE)
    assert (made[0] - made[1]).abs().max() > 0.1
    assert (made[0] - made[2]).abs().max() > 0.1


def test_the_end_may_be_ignored() -> None:
    lively = tiny_lm(torch.float64, stop="always")
    assert len(alone(lively, random_prompt(3, controls(max_frames=30, min_len=6)))) == 8
    assert len(alone(lively, random_prompt(3, controls(max_frames=30, ignore_eos=True)))) == 30


def test_speech_goes_on_where_both_are_as_likely() -> None:
    """As the first of the largest says, which going on is."""
    undecided = tiny_lm(torch.float64)
    undecided.stop_head.weight.zero_()
    assert len(alone(undecided, random_prompt(3, controls(max_frames=9, min_len=0)))) == 9


def test_text_alone_is_told_apart_and_does_not_need_the_local_encoder(
    lm: VoxLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [Pages([0, 1, 2, 3])]
    heard, text = random_prompt(3, controls(max_frames=4)), random_prompt(4, controls(max_frames=4))
    assert not is_text_alone([text, heard], [*pages, *pages])
    assert is_text_alone([text], pages)
    # What is on pages already is not run.
    reference = random_prompt(2, controls(max_frames=4))
    last = int(reference.rows[:, 1].nonzero()[0][-1])
    assert not is_text_alone([reference], [Pages([0, 1, 2, 3], last)])
    assert is_text_alone([reference], [Pages([0, 1, 2, 3], last + 1)])
    states = []
    for is_text in (False, True):
        states.append(state := allocate(lm, CAPACITY))
        if is_text:
            monkeypatch.setattr(VoxLM, "embed_patches", None)
        run_prefill = functools.partial(prefill, lm, is_text_alone=is_text)
        begin(SimpleNamespace(stage=stage, admit=admit, prefill=run_prefill), state, [text], [2])
    for ours, theirs in ((state.cache.keys, states[0].cache.keys), (state.cache.values, states[0].cache.values)):
        torch.testing.assert_close(ours, theirs, **ALIKE)
    for name in ("pending", "patch", "is_audio"):
        assert torch.equal(getattr(state, name), getattr(states[0], name))


def test_both_language_models_share_the_pages_of_a_slot(lm: VoxLM) -> None:
    state = allocate(lm, CAPACITY)
    assert state.cache.keys.shape[0] == 5
    assert state.base.page_table is state.residual.page_table is state.cache.page_table
    begin_rows(lm, state, [random_prompt(3, controls(max_frames=4))], torch.tensor([2]))
    for stack, layers in ((state.base, 3), (state.residual, 2)):
        assert stack.keys.shape[0] == layers
        assert stack.keys.any(dim=(1, 2, 3, 4)).all()
        assert stack.keys.untyped_storage().data_ptr() == state.cache.keys.untyped_storage().data_ptr()
