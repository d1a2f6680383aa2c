"""The frame step of every family, through the protocol: no row knows of another, nor of what was in its slot before."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from families import TinyFamily, tiny
from parity import begin, capacity, pages_of, rounding_by_shape, rows_of
from torch import Tensor
from torch.utils._pytree import tree_leaves
from without_gpu import device_only

from sonoro.core.errors import ConfigError
from sonoro.core.types import SamplingParams
from sonoro.models.base import PackingModel, Pages, Prompt, SpeechModel, TextPromptModel
from sonoro.nn.kvcache import PagedKVCache
from sonoro.runtime.graphs import GraphSet
from sonoro.runtime.sampling import Controls

__all__ = ["rounding_by_shape", "tiny"]

CAPACITY = capacity(slots=5, positions=192, frames=40, text=24)
SCRATCH = CAPACITY.slots


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model(tiny: TinyFamily) -> SpeechModel:
    """In float64, so that no decision hangs on rounding."""
    return tiny.load(torch.float64).model


@pytest.fixture(scope="module")
def spoken_alone(tiny: TinyFamily, model: SpeechModel) -> list[Tensor]:
    """What each of the prompts of all kinds is by itself; no two are alike."""
    with torch.inference_mode():
        frames = [alone(model, prompt) for prompt in tiny.prompts_of_all_kinds()]
    assert len({tuple(one.flatten().tolist()) for one in frames}) == len(frames)
    return frames


def begun(model: SpeechModel, prompts: Sequence[Prompt], slots: Sequence[int]) -> Any:
    """A fresh state whose rows `slots` are ready for the first frame of `prompts`."""
    state = model.allocate(CAPACITY)
    begin(model, state, prompts, slots)
    return state


def run(model: SpeechModel, state: Any, slots: Sequence[int], frames: int) -> None:
    for _ in range(frames):
        model.frame(state, torch.tensor(slots, device=state.done.device))


def frames_of(state: Any, slot: int) -> Tensor:
    return state.frames[slot, : state.length[slot]].clone()


def alone(model: SpeechModel, prompt: Prompt) -> Tensor:
    """The frames of `prompt` spoken by itself in a fresh state, run until its row is done."""
    state = begun(model, [prompt], [0])
    run(model, state, [0], prompt.controls.max_frames)
    assert state.done[0]
    return frames_of(state, 0)


def assert_alike(found: Tensor, expected: Tensor) -> None:
    """Codes are equal. Patches are up to float64 rounding: another batch sums in another order."""
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def row_of(state: Any, slot: int) -> list[Tensor]:
    """Everything that is one row's alone, but for what its pages hold; copied."""
    index = torch.tensor([slot])
    controls = tree_leaves([sampler.read(index) for sampler in state.samplers])
    return [*(rows[slot].clone() for rows in rows_of(state)), *controls, state.cache.page_table[slot].clone()]


def pages_held(state: Any, slot: int) -> list[Tensor]:
    """The keys and values on a row's pages, copied."""
    pages = state.cache.page_table[slot].long()
    pages = pages[pages < CAPACITY.pages]
    return [state.cache.keys[:, pages].clone(), state.cache.values[:, pages].clone()]


def all_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def poison(state: Any, slot: int) -> None:
    """Garbage wherever an earlier request of row `slot` could have left something, NaN where that can be."""
    for value in rows_of(state):
        if value.is_floating_point():
            value.fill_(torch.nan)
        else:
            value[slot] = 1
    for item in fields(state):
        cache = getattr(state, item.name)
        if isinstance(cache, PagedKVCache):
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
    given = SamplingParams(temperature=7.0, top_k=1, top_p=0.1, repetition_penalty=3.0)
    garbage = Controls(given, 99, 9, 1, ignore_eos=True).pack()
    for sampler in state.samplers:
        sampler.set([slot], [garbage])


def speak_in_turns(
    model: SpeechModel, prompts: Sequence[Prompt], sizes: Sequence[int], *, is_eager: bool = False
) -> tuple[list[Tensor], GraphSet]:
    """The frames of `prompts`, which join, pause and finish in two slots; batches are padded to `sizes`."""
    state = model.allocate(CAPACITY)
    device = state.done.device
    step = GraphSet("frame", lambda rows: model.frame(state, rows), sizes, SCRATCH, device, is_eager=is_eager)
    step.capture()
    found: dict[int, Tensor] = {}
    slot_of: dict[int, int] = {}
    waiting = [2, 0, 4, 1, 3]
    for tick in range(80):
        if tick % 3 == 0 and waiting and len(slot_of) < 2:
            index = waiting.pop()
            slot_of[index] = next(slot for slot in (1, 3) if slot not in slot_of.values())
            begin(model, state, [prompts[index]], [slot_of[index]])
        running = [slot for place, slot in enumerate(slot_of.values()) if (tick + place) % 4]
        step.run(running or [SCRATCH])
        for index, slot in [*slot_of.items()]:
            if state.done[slot]:
                found[index] = frames_of(state, slot)
                del slot_of[index]
    return [found[index] for index in range(len(prompts))], step


@pytest.mark.usefixtures("rounding_by_shape")
def test_a_row_speaks_the_same_in_any_batch(tiny: TinyFamily, model: SpeechModel, spoken_alone: list[Tensor]) -> None:
    slots, draw = [3, 0, 4, 1, 2], random.Random(1)
    state = begun(model, tiny.prompts_of_all_kinds(), slots)
    for _ in range(17):
        run(model, state, draw.sample(slots, 5), 1)
    for slot, expected in zip(slots, spoken_alone, strict=True):
        assert state.done[slot]
        assert_alike(frames_of(state, slot), expected)


def test_a_batch_fed_the_same_frames_decides_as_its_rows_alone(tiny: TinyFamily) -> None:
    """In float32, step by step, up to the order of sums: 1e-4."""
    model, prompts = tiny.load().model, tiny.prompts_of_all_kinds()
    slots = [3, 0, 4, 1, 2]
    together, singles = begun(model, prompts, slots), [begun(model, [prompt], [0]) for prompt in prompts]
    for _ in range(9):
        batch: list[Tensor] = []
        model.frame(together, torch.tensor(slots), batch)
        for row, (slot, single) in enumerate(zip(slots, singles, strict=True)):
            own: list[Tensor] = []
            is_done = bool(single.done[0])
            model.frame(single, torch.tensor([0]), own)
            assert [tuple(one.shape) for one in own] == [(1, *shape) for shape in tiny.decided]
            for found, expected in zip(batch, own, strict=True):
                if not is_done:
                    torch.testing.assert_close(found[row], expected[0], atol=1e-4, rtol=0)
            for ours, theirs in zip(rows_of(single), rows_of(together), strict=True):
                ours[0] = theirs[slot]


@pytest.mark.parametrize("sizes", [(), (1, 3)], ids=str)
def test_rows_join_pause_and_finish_without_a_trace(
    tiny: TinyFamily, model: SpeechModel, spoken_alone: list[Tensor], sizes: tuple[int, ...]
) -> None:
    found, _ = speak_in_turns(model, tiny.prompts_of_all_kinds(), sizes)
    for frames, expected in zip(found, spoken_alone, strict=True):
        assert_alike(frames, expected)


@pytest.mark.parametrize("key", [2, 3, 4, 5])
def test_an_earlier_request_cannot_be_read(tiny: TinyFamily, model: SpeechModel, key: int) -> None:
    """Whatever the prompt of the one that follows is like."""
    first = tiny.prompt(1, seed=7, max_frames=20, ignore_eos=True)
    second = tiny.prompt(key, seed=8, max_frames=8, ignore_eos=True)
    expected = alone(model, second)
    state = begun(model, [first], [2])
    run(model, state, [2], 20)
    poison(state, 2)
    begin(model, state, [second], [2])
    run(model, state, [2], 8)
    assert_alike(frames_of(state, 2), expected)
    assert not state.frames[2, 8:].any()


def test_reset_leaves_nothing_and_a_free_row_stays_as_it_is(tiny: TinyFamily, model: SpeechModel) -> None:
    fresh, state = model.allocate(CAPACITY), begun(model, [tiny.prompt(3, max_frames=20, ignore_eos=True)], [2])
    run(model, state, [2], 6)
    assert state.length[2] == 6
    assert not all_equal(row_of(state, 2), row_of(fresh, 2))
    model.reset(state, [2])
    run(model, state, [2], 3)
    assert all_equal(row_of(state, 2), row_of(fresh, 2))
    # Keys and values are left: no page is a free row's.
    assert (state.cache.page_table == CAPACITY.pages).all()


def test_rows_that_are_done_or_not_given_are_left_alone(tiny: TinyFamily, model: SpeechModel) -> None:
    prompts = [tiny.prompt(key, max_frames=limit, ignore_eos=True) for key, limit in ((1, 4), (2, 30), (3, 30))]
    state = begun(model, prompts, [0, 1, 2])
    run(model, state, [0, 1], 4)
    assert state.done.tolist() == [True, False, False, True, True, True]
    before = {slot: [*row_of(state, slot), *pages_held(state, slot)] for slot in (0, 2, 3)}
    run(model, state, [1, 0], 5)
    for slot, expected in before.items():
        assert all_equal([*row_of(state, slot), *pages_held(state, slot)], expected)
    assert state.length.tolist() == [4, 9, 0, 0, 0, 0]


def test_placing_is_padded_with_the_scratch_row(tiny: TinyFamily, model: SpeechModel) -> None:
    """Whatever was staged before: the scratch row stays free, on its own page, and rows that speak are left alone."""
    *others, last = [tiny.prompt(key, seed=key, ignore_eos=True) for key in range(4)]
    state = begun(model, others, [4, 0, 2])
    run(model, state, [0, 2, 4], 3)
    before = [part for slot in (0, 4) for part in (*row_of(state, slot), *pages_held(state, slot))]
    tokens = model.stage(state, [last], [2], [Pages(pages_of(2, SCRATCH, state.cache.page_table.shape[1]))])
    model.admit(state, torch.tensor([2, SCRATCH, SCRATCH]))
    assert all_equal([part for slot in (0, 4) for part in (*row_of(state, slot), *pages_held(state, slot))], before)
    assert all_equal(row_of(state, SCRATCH), row_of(model.allocate(CAPACITY), SCRATCH))
    assert state.done.tolist() == [False, True, False, True, False, True]
    model.prefill(state, torch.arange(tokens))
    run(model, state, [2], 8)
    fresh = begun(model, [last], [2])
    run(model, fresh, [2], 8)
    assert_alike(frames_of(state, 2), frames_of(fresh, 2))


def test_prompts_are_padded_with_scratch_rows(tiny: TinyFamily, model: SpeechModel) -> None:
    prompt, state = tiny.prompt(3, ignore_eos=True), model.allocate(CAPACITY)
    tokens = model.stage(state, [prompt], [1], [Pages(pages_of(1, SCRATCH, state.cache.page_table.shape[1]))])
    assert tokens == prompt.positions - getattr(prompt, "stored", 0)
    model.admit(state, torch.tensor([1]))
    model.prefill(state, torch.tensor([*range(tokens), *[CAPACITY.max_tokens] * 7]))
    run(model, state, [1], prompt.controls.max_frames)
    assert_alike(frames_of(state, 1), alone(model, prompt))


def test_a_step_with_prompts_in_it_leaves_what_a_prefill_and_a_step_leave(tiny: TinyFamily, model: SpeechModel) -> None:
    if not isinstance(model, PackingModel):
        pytest.skip("its step takes no prompts: run by a family that is a PackingModel")
    table = model.allocate(CAPACITY).cache.page_table.shape[1]
    own = [Pages(pages_of(slot, SCRATCH, table)) for slot in (3, 0)]
    first, *late = [tiny.prompt(key, seed=key, ignore_eos=True) for key in range(40)]
    if isinstance(model, TextPromptModel):
        late = [prompt for prompt in late if model.is_text_alone([prompt], own[:1])]
    late = late[:2]
    states = [begun(model, [first], [2]) for _ in range(2)]
    slots = torch.tensor([2, 3, 0, SCRATCH])
    for state, packs in zip(states, (True, False), strict=True):
        run(model, state, [2], 3)
        tokens = torch.tensor([*range(model.stage(state, late, [3, 0], own)), CAPACITY.max_tokens])
        model.admit(state, torch.tensor([3, 0]))
        if packs:
            model.prefill_and_frame(state, tokens, slots)
        else:
            model.prefill(state, tokens)
            model.frame(state, slots)
        run(model, state, [0, 2, 3], 6)
    packed, apart = states
    assert packed.length.tolist() == apart.length.tolist() == [7, 0, 10, 7, 0, 0]
    for slot in (0, 2, 3):
        assert_alike(frames_of(packed, slot), frames_of(apart, slot))
        for ours, theirs in zip(pages_held(packed, slot), pages_held(apart, slot), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


def test_prompts_out_of_fused_operations_leave_what_the_forward_leaves(tiny: TinyFamily, model: SpeechModel) -> None:
    prompts, states = tiny.prompts_of_all_kinds(), []
    for is_fused in (True, False):
        state = model.allocate(dataclasses.replace(CAPACITY, is_prefill_fused=is_fused))
        begin(model, state, prompts, range(len(prompts)))
        states.append(state)
    fused, plain = states
    assert plain.cache.keys.any()
    for ours, theirs in ((fused.cache.keys, plain.cache.keys), (fused.cache.values, plain.cache.values)):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    assert torch.equal(fused.pending, plain.pending)


def test_seeds_and_segments_draw_differently_and_the_same_again(tiny: TinyFamily, model: SpeechModel) -> None:
    wanted = ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1 + 2**32}, {"seed": 1, "segment": 1})
    state = begun(model, [tiny.prompt(1, max_frames=8, ignore_eos=True, **own) for own in wanted], range(5))
    run(model, state, range(5), 8)
    first, again, *others = (frames_of(state, slot) for slot in range(5))
    assert_alike(again, first)
    for other in others:
        assert not torch.isclose(other, first).all()


def test_bfloat16_speaks(tiny: TinyFamily) -> None:
    model = tiny.load(torch.bfloat16).model
    frames = alone(model, tiny.prompt(1, max_frames=10, ignore_eos=True))
    assert len(frames) == 10
    assert frames.unique().numel() > 10
    # An id past the codes would raise.
    assert model.codec.decode(frames[None]).isfinite().all()


def test_more_positions_than_the_model_has_are_refused(model: SpeechModel) -> None:
    with pytest.raises(ConfigError, match=r"at most \d+ for") as refusal:
        model.allocate(replace(CAPACITY, max_positions=1_000_000))
    assert refusal.value.field == "max_positions"


def test_place_prefill_frame_and_its_parts_may_be_captured(tiny: TinyFamily) -> None:
    """On the meta device there is no value to ask for: whatever would synchronise or depend on a value raises.

    A number that would be copied to the device, which a graph cannot hold either, is refused by `device_only`.
    """
    model = tiny.load(device="meta").model
    state, slots = model.allocate(CAPACITY), torch.empty(3, dtype=torch.int64, device="meta")
    record: list[Tensor] = []
    with device_only():
        model.admit(state, slots)
        model.prefill(state, slots)
        model.frame(state, slots, record)
        parts = {name: part(slots) for name, part in model.parts(state).items()}
    assert [tuple(decided.shape) for decided in record] == [(3, *shape) for shape in tiny.decided]
    assert parts.keys() == {"backbone", "depth", "sample"}
    assert all(made.shape[0] == 3 for made in tree_leaves(parts))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3,), (1, 2)], ids=str)
def test_graph_equals_eager_bit_by_bit(tiny: TinyFamily, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """At the same padded size."""
    found = []
    with torch.cuda.stream(torch.cuda.Stream()):
        model = tiny.load(dtype, "cuda").model
        for is_eager in (False, True):
            frames, step = speak_in_turns(model, tiny.prompts_of_all_kinds(), sizes, is_eager=is_eager)
            assert (step.eager_launches, step.graph_launches)[is_eager] == 0
            found.append(frames)
        assert all_equal(*found)


def test_prompts_that_are_embedded_by_parts_are_the_same(
    model: SpeechModel, tiny: TinyFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tiny.prompts_of_all_kinds()[: CAPACITY.slots]
    whole = begun(model, prompts, range(len(prompts)))
    monkeypatch.setattr("sonoro.models.shared.slots._EMBEDDED_AT_ONCE", 3)
    parted = begun(model, prompts, range(len(prompts)))
    for slot in range(len(prompts)):
        for found, expected in zip(row_of(parted, slot), row_of(whole, slot), strict=True):
            assert torch.equal(found, expected)
