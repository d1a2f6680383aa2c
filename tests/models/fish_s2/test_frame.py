"""The frame step: the official codes, greedy and drawn; how frames are fed back and when they end.

That its rows are independent is tested with those of every family.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import capacity
from tiny_dual_ar import begin_rows, builder, cases, controls, random_prompt, tiny_dual_ar, voice_of
from tiny_fish import uniforms
from torch import Tensor

from sonoro.models.fish_s2 import frame as frame_module
from sonoro.models.fish_s2.backbone import DualAR
from sonoro.models.fish_s2.frame import frame
from sonoro.models.fish_s2.state import allocate
from sonoro.models.shared.prompts import RowPrompt
from sonoro.models.shared.slots import DepthState
from sonoro.ops.repetition_aware import nucleus_argmax

CAPACITY = capacity(slots=5, positions=256, frames=40, text=1)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def lm() -> DualAR:
    """In float64, so that codes do not hang on rounding."""
    return tiny_dual_ar(torch.float64)


def run(lm: DualAR, state: DepthState, slots: Sequence[int], frames: int) -> None:
    for _ in range(frames):
        frame(lm, state, torch.tensor(slots))


def codes_of(state: DepthState, slot: int) -> Tensor:
    return state.frames[slot, : state.length[slot]].clone()


def alone(lm: DualAR, prompt: RowPrompt) -> Tensor:
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
    assert prompt.rows.tolist() == case.tensors["columns"].tolist()
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


def test_what_was_said_in_the_ten_frames_before_is_drawn_again_from_a_wider_nucleus(lm: DualAR) -> None:
    """Not the first frame, and at a temperature and a top-p of its own: told step by step from logits and noise."""
    wanted = [controls(seed=seed, max_frames=40, temperature=1.5, top_p=0.6, ignore_eos=True) for seed in range(5)]
    state, slots, replaced = allocate(lm, CAPACITY), torch.arange(5), 0
    begin_rows(lm, state, [random_prompt(index, own) for index, own in enumerate(wanted)], slots)
    for length in range(40):
        row, record = state.samplers[0].read(slots), list[Tensor]()
        frame(lm, state, slots, record)
        logits, noise = record[0].clone(), frame_module._noise(lm, row, torch.full((5,), length))
        logits[:, -1] = -torch.inf
        normal = nucleus_argmax(logits, noise[:, 0], row.sampling)
        one = torch.ones_like(row.sampling.top_p)
        wide = nucleus_argmax(logits, noise[:, -1], row.sampling._replace(temperature=one, top_p=0.9 * one))
        for slot in range(5):
            is_repeated = int(normal[slot]) in state.frames[slot, max(1, length - 10) : length, 0].tolist()
            replaced += is_repeated
            assert state.frames[slot, length, 0] == (wide if is_repeated else normal)[slot]
    assert 20 < replaced < 180
    expected, state = state.frames[:5, :2].clone(), allocate(lm, CAPACITY)
    begin_rows(lm, state, [random_prompt(index, own) for index, own in enumerate(wanted)], slots)
    run(lm, state, range(5), 1)
    state.frames[:5, 0, 0] = expected[:, 1, 0]
    run(lm, state, range(5), 1)
    assert torch.equal(state.frames[:5, 1], expected[:, 1])


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
