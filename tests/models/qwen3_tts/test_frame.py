"""The frame step: official greedy codes, its equality with the training forward, how text and ends are fed.

That its rows are independent is tested with those of every family.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from parity import Case, capacity
from tiny_talker import begin_talker, controls, random_prompt, reference_prompt, tiny_config, tiny_talker
from torch import Tensor

from builtin_voice.forwards import embed_prompt, predictor_logits, talker_forward
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.frame import frame
from sonoro.models.qwen3_tts.prompt import TalkerPrompt
from sonoro.models.qwen3_tts.state import FrameState, allocate

PAD = tiny_config().tts_pad_token_id
CAPACITY = capacity(slots=5, positions=96, frames=40, text=24)
VARIANTS = [
    f"{mode}_{layout}"
    for mode in ("custom_voice", "voice_design", "x_vector", "in_context")
    for layout in ("stream", "whole")
]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def talker() -> Talker:
    """In float64, so that codes do not hang on rounding."""
    with torch.inference_mode(False):
        return tiny_talker(dtype=torch.float64)


def new_state(talker: Talker) -> FrameState:
    return allocate(talker, CAPACITY, PAD)


def run(talker: Talker, state: FrameState, slots: Sequence[int], frames: int) -> None:
    for _ in range(frames):
        frame(talker, state, torch.tensor(slots))


def codes_of(state: FrameState, slot: int) -> Tensor:
    return state.frames[slot, : state.length[slot]].clone()


def alone(talker: Talker, prompt: TalkerPrompt) -> Tensor:
    """The frames of `prompt` spoken by itself in a fresh state, run until its row is done."""
    state = new_state(talker)
    begin_talker(talker, state, [prompt], torch.tensor([0]))
    for _ in range(prompt.controls.max_frames):
        frame(talker, state, torch.tensor([0]))
    assert state.done[0]
    return codes_of(state, 0)


@pytest.mark.parametrize("name", [*VARIANTS, "ending"])
def test_greedy_codes_and_logits_match_the_official_ones(
    reference: Callable[[str], dict[str, Case]], name: str
) -> None:
    case = reference("greedy")[name]
    expected = torch.from_numpy(case.tensors["codes"])
    count, ends = len(expected), name == "ending"
    assert ends or count >= 32
    with torch.inference_mode(False):
        talker = tiny_talker(case.facts["variant"], case.facts["topology"], end_scale=case.facts["eos_row_scale"])
    state = new_state(talker)
    limit = count + 1 if ends else count
    begin_talker(talker, state, [reference_prompt(case, controls(temperature=0, max_frames=limit))], torch.tensor([3]))
    steps = dict(zip(case.facts["logit_steps"], torch.from_numpy(case.tensors["logits"]), strict=True))
    for step in range(count + ends):
        record: list[Tensor] = []
        frame(talker, state, torch.tensor([3]), record)
        assert len(record) == talker.codebooks
        if step in steps:
            # Float32, other order of sums.
            torch.testing.assert_close(record[0][0], steps[step], atol=1e-4, rtol=0)
    assert torch.equal(codes_of(state, 3), expected)
    assert state.done[3]


def test_official_batch_of_unequal_prompts(reference: Callable[[str], dict[str, Case]]) -> None:
    cases = [reference("greedy")[name] for name in ("pair_long", "pair_short")]
    with torch.inference_mode(False):
        talker = tiny_talker()
    state = new_state(talker)
    prompts = [reference_prompt(case, controls(temperature=0, max_frames=36)) for case in cases]
    begin_talker(talker, state, prompts, torch.tensor([4, 1]))
    run(talker, state, [1, 4], 36)
    for slot, case in zip((4, 1), cases, strict=True):
        assert torch.equal(codes_of(state, slot), torch.from_numpy(case.tensors["codes"]))


@pytest.mark.parametrize("topology", ["1.7b", "0.6b"])
def test_training_forward_gives_the_logits_of_the_steps(topology: str) -> None:
    with torch.inference_mode(False):
        talker = tiny_talker(topology=topology, dtype=torch.float64)
    prompt = random_prompt(3, controls(seed=5, max_frames=9, ignore_eos=True))
    state = new_state(talker)
    begin_talker(talker, state, [prompt], torch.tensor([2]))
    steps: list[list[Tensor]] = []
    for _ in range(9):
        steps.append([])
        frame(talker, state, torch.tensor([2]), steps[-1])
    codes = codes_of(state, 2)
    text = torch.cat((prompt.trail, torch.full((9,), PAD)))[:9]
    inputs = torch.cat((embed_prompt(talker, prompt), talker.embed_frames(codes) + talker.embed_text(text)))
    output = talker_forward(talker, inputs[None])
    decided = slice(prompt.positions - 1, prompt.positions + 8)
    expected = torch.stack([step[0][0] for step in steps])
    torch.testing.assert_close(output.logits[0, decided], expected, atol=1e-10, rtol=0)
    depth = torch.stack([torch.cat(step[1:]) for step in steps])
    torch.testing.assert_close(predictor_logits(talker, output.hidden[0, decided], codes), depth, atol=1e-10, rtol=0)


def test_the_frame_that_ends_speech_is_not_appended() -> None:
    with torch.inference_mode(False):
        talker = tiny_talker()
        # Whenever the logit of the end is positive it is by far the largest.
        talker.codec_head.weight[: talker.codes] *= 1e-3
    wanted = controls(temperature=0, max_frames=30)
    prompt = random_prompt(1, wanted)
    state = new_state(talker)
    begin_talker(talker, state, [prompt], torch.tensor([0]))
    steps = 0
    while not state.done[0]:
        frame(talker, state, torch.tensor([0]))
        steps += 1
    made = int(state.length[0])
    assert 2 <= made < 30
    assert steps == made + 1
    assert not state.frames[0, made:].any()
    endless = alone(talker, replace(prompt, controls=replace(wanted, ignore_eos=True)))
    assert len(endless) == 30
    assert torch.equal(endless[:made], state.frames[0, :made])


def test_the_predictor_alone_may_be_greedy(talker: Talker) -> None:
    wanted = controls(seed=3, max_frames=8, subtalker_dosample=False)
    state = new_state(talker)
    begin_talker(talker, state, [random_prompt(1, wanted)], torch.tensor([0]))
    for step in range(8):
        record: list[Tensor] = []
        frame(talker, state, torch.tensor([0]), record)
        if state.done[0]:
            break
        assert state.frames[0, step, 1:].tolist() == [logits[0].argmax().item() for logits in record[1:]]


def test_text_runs_one_id_a_frame_then_the_pad(talker: Talker) -> None:
    """Two prompts whose trails differ from id n on have equal logits up to frame n, and not after it."""
    wanted = controls(temperature=0, max_frames=10, ignore_eos=True)
    prompt = random_prompt(1, wanted)
    trail = torch.arange(5)
    changed = trail.clone()
    changed[2] += 9
    padded = torch.cat((trail, torch.full((3,), PAD)))
    logits = []
    for ids in (trail, changed, padded):
        state = new_state(talker)
        begin_talker(talker, state, [replace(prompt, trail=ids)], torch.tensor([0]))
        steps = []
        for _ in range(10):
            record: list[Tensor] = []
            frame(talker, state, torch.tensor([0]), record)
            steps.append(record[0][0])
        logits.append(torch.stack(steps))
    assert torch.equal(logits[0][:3], logits[1][:3])
    assert not torch.isclose(logits[0][3], logits[1][3]).all()
    assert torch.equal(logits[0], logits[2])
