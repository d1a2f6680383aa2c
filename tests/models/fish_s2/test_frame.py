"""The frame step: the official codes, greedy and drawn; independence of its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capture import device_only
from sonoro.models.base import Controls
from sonoro.models.fish_s2 import frame as frame_module
from sonoro.models.fish_s2.backbone import DualAR
from sonoro.models.fish_s2.frame import frame, parts
from sonoro.models.fish_s2.prompt import FishPrompt
from sonoro.models.fish_s2.state import allocate, prefill
from sonoro.models.slots import DepthRows, clear_rows, place_rows
from speaking import capacity
from tiny_dual_ar import begin_rows, builder, cases, controls, random_prompt, tiny_dual_ar, voice_of
from tiny_fish import uniforms

CAPACITY = capacity(slots=5, positions=256, frames=40, text=1)
CODES = 64


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def lm() -> DualAR:
    """In float64, so that codes do not hang on rounding."""
    return tiny_dual_ar(torch.float64)


def run(lm: DualAR, state: DepthRows, slots: Sequence[int], frames: int) -> None:
    for _ in range(frames):
        frame(lm, state, torch.tensor(slots))


def codes_of(state: DepthRows, slot: int) -> Tensor:
    return state.frames[slot, : state.length[slot]].clone()


def alone(lm: DualAR, prompt: FishPrompt) -> Tensor:
    """The frames of `prompt` spoken by itself in a fresh state, run until its row is done."""
    state = allocate(lm, CAPACITY)
    begin_rows(lm, state, [prompt], torch.tensor([0]))
    run(lm, state, [0], prompt.controls.max_frames)
    assert state.done[0]
    return codes_of(state, 0)


@pytest.mark.parametrize("name", ["plain", "reference", "ending"])
def test_greedy_codes_and_logits_match_the_official_ones(reference_root: Path, name: str) -> None:
    case = cases("greedy", reference_root)[name]
    lm, ends = tiny_dual_ar(end_scale=case.facts["end_scale"]), name == "ending"
    voice = voice_of(cases("prompts", reference_root)[case.facts["prompt"]])
    expected = torch.from_numpy(case.tensors["made"]).long()
    count, logits = len(expected), torch.from_numpy(case.tensors["logits"])
    wanted = controls(temperature=0, max_frames=count + ends)
    prompt = builder().build(case.facts["text"], wanted, voice=voice)
    assert prompt.columns.tolist() == case.tensors["columns"].tolist()
    state = allocate(lm, CAPACITY)
    begin_rows(lm, state, [prompt], torch.tensor([3]))
    for step in range(count + ends):
        record: list[Tensor] = []
        frame(lm, state, torch.tensor([3]), record)
        assert len(record) == lm.codebooks
        # Float32, other order of sums.
        torch.testing.assert_close(record[0][0], logits[step], atol=1e-4, rtol=0)
        if step < min(4, count):
            depth = torch.from_numpy(case.tensors["depth_logits"][step])
            torch.testing.assert_close(torch.cat(record[1:]), depth, atol=1e-4, rtol=0)
    assert ends or count == 24
    # All rows of the official columns: the token, then the codes.
    made = codes_of(state, 3)
    assert torch.equal(torch.cat((made[:, :1] + lm.config.semantic_start_token_id, made), dim=1), expected)
    assert state.done[3]


@pytest.mark.parametrize("name", ["server", "library", "narrow", "single", "wide", "first_is_end"])
def test_drawn_codes_match_the_official_ones(reference_root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same uniform numbers, replaced repetitions included."""
    case = cases("sampled", reference_root)[name]
    facts, expected = case.facts, torch.from_numpy(case.tensors["made"]).long()
    count, drawn = len(expected), uniforms(facts["seed"], 31, is_first_end=name == "first_is_end")
    noise = -(-torch.from_numpy(drawn).log()).log()
    assert facts["replaced"] or facts["top_k"] == 1
    settings = {key: facts[key] for key in ("temperature", "top_p", "top_k")}
    prompt = builder().build(facts["text"], controls(max_frames=count, **settings))
    lm = tiny_dual_ar()
    state = allocate(lm, CAPACITY)
    begin_rows(lm, state, [prompt], torch.tensor([1]))
    monkeypatch.setattr(frame_module, "_noise", lambda lm, row, length: noise[length])
    run(lm, state, [1], count)
    made = codes_of(state, 1)
    assert torch.equal(made, expected[:, 1:])
    assert (name == "first_is_end") == (int(expected[0, 0]) == lm.config.eos_token_id)
    assert state.done[1]


def prompts_of_all_kinds() -> list[FishPrompt]:
    """Greedy and random, filtered and not, with and without an end, of different lengths."""
    kinds: list[Controls] = [
        controls(seed=1, max_frames=14),
        controls(temperature=0, max_frames=11),
        controls(seed=3, segment=2, max_frames=17, top_k=0, top_p=1.0, ignore_eos=True),
        controls(seed=4, max_frames=9, top_k=5),
        controls(seed=2**62 + 5, temperature=1.4, max_frames=13, top_k=200),
    ]
    return [random_prompt(20 + index, wanted) for index, wanted in enumerate(kinds)]


def test_a_row_speaks_the_same_in_any_batch(lm: DualAR) -> None:
    prompts = prompts_of_all_kinds()
    expected = [alone(lm, prompt) for prompt in prompts]
    assert len({tuple(codes.flatten().tolist()) for codes in expected}) == 5
    state = allocate(lm, CAPACITY)
    slots = [3, 0, 4, 1, 2]
    begin_rows(lm, state, prompts, torch.tensor(slots))
    generator = torch.Generator().manual_seed(1)
    for _ in range(17):
        run(lm, state, [slots[index] for index in torch.randperm(5, generator=generator)], 1)
    for slot, codes in zip(slots, expected, strict=True):
        assert state.done[slot]
        assert torch.equal(codes_of(state, slot), codes)


def test_rows_join_pause_and_finish_without_a_trace(lm: DualAR) -> None:
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
                found[index] = codes_of(state, slot)
                del slot_of[index]
    assert len(found) == 5
    for index, codes in found.items():
        assert torch.equal(codes, expected[index])


def test_an_earlier_request_cannot_be_read(lm: DualAR) -> None:
    first = random_prompt(1, controls(seed=7, max_frames=20))
    second = random_prompt(2, controls(seed=8, max_frames=8))
    expected = alone(lm, second)
    state = allocate(lm, CAPACITY)
    begin_rows(lm, state, [first], torch.tensor([2]))
    run(lm, state, [2], 20)
    for value in (state.cache.keys, state.cache.values, state.loop.keys, state.loop.values, state.pending):
        value.fill_(torch.nan)
    begin_rows(lm, state, [second], torch.tensor([2]))
    run(lm, state, [2], 8)
    assert torch.equal(codes_of(state, 2), expected)
    assert not state.frames[2, 8:].any()


def test_reset_leaves_nothing_and_a_free_row_stays_as_it_is(lm: DualAR) -> None:
    fresh, state = allocate(lm, CAPACITY), allocate(lm, CAPACITY)
    begin_rows(lm, state, [random_prompt(1, controls(max_frames=20))], torch.tensor([2]))
    run(lm, state, [2], 6)
    clear_rows(state, [2])
    run(lm, state, [2], 3)
    for rows in ("done", "length", "frames", "pending", "position"):
        assert torch.equal(getattr(state, rows)[2], getattr(fresh, rows)[2]), rows
    assert (state.cache.table == CAPACITY.pages).all()
    slot = torch.tensor([2])
    for found, cleared in zip(state.samplers[0].read(slot), fresh.samplers[0].read(slot), strict=True):
        assert torch.equal(found, cleared)


def test_a_frame_is_fed_back_as_its_column_is_embedded(lm: DualAR) -> None:
    state = allocate(lm, CAPACITY)
    begin_rows(lm, state, [random_prompt(1, controls(max_frames=20, ignore_eos=True))], torch.tensor([2]))
    for length in range(3):
        run(lm, state, [2], 1)
        made = state.frames[2, length]
        column = torch.cat((made[:1] + lm.config.semantic_start_token_id, made))
        torch.testing.assert_close(state.pending[2], lm.embed(column), atol=1e-12, rtol=0)


def test_the_end_may_be_ignored(lm: DualAR) -> None:
    lively = tiny_dual_ar(torch.float64, end_scale=3.0)
    wanted = controls(seed=2, max_frames=30)
    ended = alone(lively, random_prompt(3, wanted))
    assert len(ended) < 30
    endless = alone(lively, random_prompt(3, replace(wanted, ignore_eos=True)))
    assert len(endless) == 30


def test_place_prefill_and_frame_may_be_captured() -> None:
    """On the meta device there is no value to ask for: whatever would synchronise or depend on a value raises."""
    lm = tiny_dual_ar().to("meta")
    state = allocate(lm, CAPACITY)
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    record: list[Tensor] = []
    with device_only():
        place_rows(state, slots)
        prefill(lm, state, slots)
        frame(lm, state, slots, record)
        for part in parts(lm, state).values():
            part(slots)
    assert [tuple(logits.shape) for logits in record] == [(3, CODES + 1)] + [(3, CODES)] * 9


@pytest.mark.gpu
def test_a_captured_step_equals_the_eager_one() -> None:
    lm = tiny_dual_ar().cuda()
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
        found.append([codes_of(state, slot) for slot in range(5)])
    for eager, captured in zip(*found, strict=True):
        assert torch.equal(eager, captured)
