"""The frame step: the official patches and ends; noise by address; independence of its rows."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_vox
from capture import device_only
from sonoro.models.base import Controls
from sonoro.models.voxcpm2 import frame as frame_module
from sonoro.models.voxcpm2.backbone import VoxLM
from sonoro.models.voxcpm2.frame import frame, parts
from sonoro.models.voxcpm2.prompt import VoxPrompt
from sonoro.models.voxcpm2.state import FrameState, allocate, place, prefill, reset
from speaking import capacity
from tiny_vox_lm import NEVER, begin_rows, cases, controls, prompt_of, random_prompt, tiny_lm

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


def alone(lm: VoxLM, prompt: VoxPrompt) -> Tensor:
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
    torch.testing.assert_close(torch.cat(record[2::4]), stop, atol=2e-4, rtol=0)
    if name != "random_2":
        assert facts["frames"] == facts["min_len"] + 2


def prompts_of_all_kinds() -> list[VoxPrompt]:
    """All modes, guided and not, with and without an end, of different lengths and counts of steps."""
    kinds: list[Controls] = [
        controls(seed=1, max_frames=14, min_len=NEVER),
        controls(seed=2, max_frames=11, min_len=4, cfg=1.0),
        controls(seed=3, segment=2, max_frames=17, ignore_eos=True, steps=4),
        controls(seed=4, max_frames=9, cfg=3.5, steps=2),
        controls(seed=2**62 + 5, max_frames=13, min_len=0, steps=7),
    ]
    return [random_prompt(20 + index, wanted) for index, wanted in enumerate(kinds)]


def test_a_row_speaks_the_same_in_any_batch(lm: VoxLM) -> None:
    prompts = prompts_of_all_kinds()
    expected = [alone(lm, prompt) for prompt in prompts]
    assert {len(patches) for patches in expected} >= {14, 17}
    state = allocate(lm, CAPACITY)
    slots = [3, 0, 4, 1, 2]
    begin_rows(lm, state, prompts, torch.tensor(slots))
    generator = torch.Generator().manual_seed(1)
    for _ in range(17):
        run(lm, state, [slots[index] for index in torch.randperm(5, generator=generator)], 1)
    for slot, patches in zip(slots, expected, strict=True):
        assert state.done[slot]
        torch.testing.assert_close(patches_of(state, slot), patches, **ALIKE)


def test_a_batch_fed_the_same_patches_equals_its_rows_alone() -> None:
    """In float32, step by step: what a row makes of the same past does not depend on who else is there."""
    lm, prompts = tiny_lm(), prompts_of_all_kinds()
    together = allocate(lm, CAPACITY)
    slots = torch.tensor([3, 0, 4, 1, 2])
    begin_rows(lm, together, prompts, slots)
    singles = []
    for prompt in prompts:
        singles.append(allocate(lm, CAPACITY))
        begin_rows(lm, singles[-1], [prompt], torch.tensor([0]))
    flipped = 0
    for _ in range(9):
        batch: list[Tensor] = []
        frame(lm, together, slots, batch)
        for row, (slot, state) in enumerate(zip(slots.tolist(), singles, strict=True)):
            if state.done[0]:
                continue
            own: list[Tensor] = []
            frame(lm, state, torch.tensor([0]), own)
            # A level of the quantiser may flip by rounding; none does here.
            flipped += not torch.allclose(own[0][0], batch[0][row], atol=1e-4)
            torch.testing.assert_close(own[3][0], batch[3][row], atol=1e-4, rtol=0)
            for rows in ("frames", "pending", "patch"):
                getattr(state, rows)[0] = getattr(together, rows)[slot]
    assert not flipped


def test_rows_join_pause_and_finish_without_a_trace(lm: VoxLM) -> None:
    prompts = prompts_of_all_kinds()
    expected = [alone(lm, prompt) for prompt in prompts]
    state = allocate(lm, CAPACITY)
    found: dict[int, Tensor] = {}
    slot_of: dict[int, int] = {}
    waiting = [2, 0, 4, 1, 3]
    for tick in range(80):
        if tick % 3 == 0 and waiting and len(slot_of) < 2:
            index = waiting.pop()
            slot_of[index] = next(slot for slot in (1, 3) if slot not in slot_of.values())
            begin_rows(lm, state, [prompts[index]], torch.tensor([slot_of[index]]))
        running = [slot for place, slot in enumerate(slot_of.values()) if (tick + place) % 4]
        run(lm, state, [*running, state.scratch, state.scratch], 1)
        for index, slot in list(slot_of.items()):
            if state.done[slot]:
                found[index] = patches_of(state, slot)
                del slot_of[index]
    assert len(found) == 5
    for index, patches in found.items():
        torch.testing.assert_close(patches, expected[index], **ALIKE)


@pytest.mark.parametrize("key", [2, 3, 4, 5])
def test_an_earlier_request_cannot_be_read(lm: VoxLM, key: int) -> None:
    """Whatever the mode of the one that follows."""
    first = random_prompt(1, controls(seed=7, max_frames=20, ignore_eos=True))
    second = random_prompt(key, controls(seed=8, max_frames=8, ignore_eos=True))
    expected = alone(lm, second)
    state = allocate(lm, CAPACITY)
    begin_rows(lm, state, [first], torch.tensor([2]))
    run(lm, state, [2], 20)
    for value in (state.cache.keys, state.cache.values, state.pending, state.patch):
        value.fill_(torch.nan)
    state.is_audio.fill_(True)
    begin_rows(lm, state, [second], torch.tensor([2]))
    run(lm, state, [2], 8)
    torch.testing.assert_close(patches_of(state, 2), expected, **ALIKE)
    assert not state.frames[2, 8:].any()


def test_reset_leaves_nothing_and_a_free_row_stays_as_it_is(lm: VoxLM) -> None:
    fresh, state = allocate(lm, CAPACITY), allocate(lm, CAPACITY)
    begin_rows(lm, state, [random_prompt(3, controls(max_frames=20, ignore_eos=True))], torch.tensor([2]))
    run(lm, state, [2], 6)
    reset(state, [2])
    run(lm, state, [2], 3)
    for rows in ("done", "length", "frames", "pending", "position", "patch", "is_audio", "options"):
        assert torch.equal(getattr(state, rows)[2], getattr(fresh, rows)[2]), rows
    assert (state.cache.table == CAPACITY.pages).all()
    slot = torch.tensor([2])
    for found, cleared in zip(state.samplers[0].read(slot), fresh.samplers[0].read(slot), strict=True):
        assert torch.equal(found, cleared)


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


def test_both_language_models_share_the_pages_of_a_slot(lm: VoxLM) -> None:
    state = allocate(lm, CAPACITY)
    assert state.cache.keys.shape[0] == 5
    assert state.base.table is state.residual.table is state.cache.table
    begin_rows(lm, state, [random_prompt(3, controls(max_frames=4))], torch.tensor([2]))
    for stack, layers in ((state.base, 3), (state.residual, 2)):
        assert stack.keys.shape[0] == layers
        assert stack.keys.any(dim=(1, 2, 3, 4)).all()
        assert stack.keys.untyped_storage().data_ptr() == state.cache.keys.untyped_storage().data_ptr()


def test_place_prefill_and_frame_may_be_captured() -> None:
    """On the meta device there is no value to ask for: whatever would synchronise or depend on a value raises."""
    lm = tiny_lm().to("meta")
    state = allocate(lm, CAPACITY)
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    record: list[Tensor] = []
    with device_only():
        place(state, slots)
        prefill(lm, state, slots)
        frame(lm, state, slots, record)
        for part in parts(lm, state).values():
            part(slots)
    assert [tuple(made.shape) for made in record] == [(3, 48), (3, 48), (3, 2), (3, 4, 8)]


@pytest.mark.gpu
def test_a_captured_step_equals_the_eager_one() -> None:
    lm = tiny_lm().cuda()
    prompts = prompts_of_all_kinds()
    found = []
    for is_captured in (False, True):
        state = allocate(lm, CAPACITY)
        slots = torch.tensor([3, 0, 4, 1, 2], device="cuda")
        begin_rows(lm, state, prompts, slots)
        graph = torch.cuda.CUDAGraph()
        if is_captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                frame(lm, state, torch.full((5,), state.scratch, device="cuda"))
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                frame(lm, state, slots)
        for _ in range(17):
            if is_captured:
                graph.replay()
            else:
                frame(lm, state, slots)
        found.append([patches_of(state, slot) for slot in range(5)])
    for eager, captured in zip(*found, strict=True):
        assert torch.equal(eager, captured)
