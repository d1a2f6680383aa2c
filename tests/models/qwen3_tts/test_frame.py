"""The frame step: official greedy codes, its equality with the training forward, and independence of its rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from capture import device_only
from reference_assets import Case
from sonoro.models.base import Controls, Pages
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.frame import frame
from sonoro.models.qwen3_tts.prompt import TalkerPrompt
from sonoro.models.qwen3_tts.sampling import row_controls
from sonoro.models.qwen3_tts.state import FrameState, allocate, place, prefill, reset, stage
from speaking import capacity, pages_of
from tiny_talker import begin_talker, controls, random_prompt, reference_prompt, tiny_config, tiny_talker

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


def row_tensors(state: FrameState, slot: int) -> list[Tensor]:
    """Every tensor of one row, copied."""
    rows = [value for item in fields(state) if isinstance(value := getattr(state, item.name), Tensor)]
    slots = CAPACITY.slots + 1
    pages = state.cache.table[slot].long()
    pages = pages[pages < CAPACITY.pages]
    return [
        *(value[slot].clone() for value in rows if value.shape[0] == slots),
        state.cache.keys[:, pages].clone(),
        state.cache.values[:, pages].clone(),
    ]


def poison(state: FrameState) -> None:
    """NaN wherever an earlier request could have left numbers."""
    for value in (state.cache.keys, state.cache.values, state.loop.keys, state.loop.values, state.pending):
        value.fill_(torch.nan)


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
    prompt = random_prompt(talker, 3, controls(seed=5, max_frames=9, ignore_eos=True))
    state = new_state(talker)
    begin_talker(talker, state, [prompt], torch.tensor([2]))
    steps: list[list[Tensor]] = []
    for _ in range(9):
        steps.append([])
        frame(talker, state, torch.tensor([2]), steps[-1])
    codes = codes_of(state, 2)
    text = torch.cat((prompt.trail, torch.full((9,), PAD)))[:9]
    inputs = torch.cat((talker.embed_prompt(prompt), talker.embed_frames(codes) + talker.embed_text(text)))
    output = talker.talker_forward(inputs[None])
    decided = slice(prompt.positions - 1, prompt.positions + 8)
    expected = torch.stack([step[0][0] for step in steps])
    torch.testing.assert_close(output.logits[0, decided], expected, atol=1e-10, rtol=0)
    depth = torch.stack([torch.cat(step[1:]) for step in steps])
    torch.testing.assert_close(talker.predictor_logits(output.hidden[0, decided], codes), depth, atol=1e-10, rtol=0)


def prompts_of_all_kinds(talker: Talker) -> list[TalkerPrompt]:
    """Greedy and random, filtered and not, with and without an end, of different lengths."""
    kinds: list[Controls] = [
        controls(seed=1, max_frames=14),
        controls(temperature=0, max_frames=11),
        controls(seed=3, segment=2, max_frames=17, top_k=0, top_p=0.8, ignore_eos=True),
        controls(seed=4, max_frames=9, top_k=5, repetition_penalty=1.8, subtalker_top_p=0.6, subtalker_top_k=0),
        controls(seed=2**62 + 5, temperature=1.4, max_frames=13, top_k=200, subtalker_dosample=False),
    ]
    return [random_prompt(talker, 20 + index, wanted) for index, wanted in enumerate(kinds)]


def test_a_row_speaks_the_same_in_any_batch(talker: Talker) -> None:
    prompts = prompts_of_all_kinds(talker)
    expected = [alone(talker, prompt) for prompt in prompts]
    state = new_state(talker)
    slots = [3, 0, 4, 1, 2]
    begin_talker(talker, state, prompts, torch.tensor(slots))
    generator = torch.Generator().manual_seed(1)
    for _ in range(17):
        run(talker, state, [slots[index] for index in torch.randperm(5, generator=generator)], 1)
    for slot, codes in zip(slots, expected, strict=True):
        assert state.done[slot]
        assert torch.equal(codes_of(state, slot), codes)


def test_rows_join_pause_and_finish_without_a_trace(talker: Talker) -> None:
    prompts = prompts_of_all_kinds(talker)
    expected = [alone(talker, prompt) for prompt in prompts]
    state = new_state(talker)
    scratch = CAPACITY.slots
    found: dict[int, Tensor] = {}
    slot_of: dict[int, int] = {}
    waiting = [2, 0, 4, 1, 3]
    for tick in range(80):
        if tick % 3 == 0 and waiting and len(slot_of) < 2:
            index = waiting.pop()
            slot_of[index] = next(slot for slot in (1, 3) if slot not in slot_of.values())
            begin_talker(talker, state, [prompts[index]], torch.tensor([slot_of[index]]))
        running = [slot for place, slot in enumerate(slot_of.values()) if (tick + place) % 4]
        run(talker, state, [*running, scratch, scratch], 1)
        for index, slot in list(slot_of.items()):
            if state.done[slot]:
                found[index] = codes_of(state, slot)
                del slot_of[index]
    assert len(found) == 5
    for index, codes in found.items():
        assert torch.equal(codes, expected[index])


def test_an_earlier_request_cannot_be_read(talker: Talker) -> None:
    first, second = (random_prompt(talker, key, controls(seed=7, max_frames=20)) for key in (1, 2))
    second = replace(second, controls=controls(seed=8, max_frames=8))
    expected = alone(talker, second)
    state = new_state(talker)
    begin_talker(talker, state, [first], torch.tensor([2]))
    run(talker, state, [2], 20)
    poison(state)
    begin_talker(talker, state, [second], torch.tensor([2]))
    run(talker, state, [2], 8)
    assert torch.equal(codes_of(state, 2), expected)
    assert not state.frames[2, 8:].any()


def test_reset_leaves_nothing_and_a_free_row_stays_as_it_is(talker: Talker) -> None:
    fresh, state = new_state(talker), new_state(talker)
    begin_talker(talker, state, [random_prompt(talker, 1, controls(max_frames=20))], torch.tensor([2]))
    run(talker, state, [2], 6)
    reset(state, [2])
    run(talker, state, [2], 3)
    # Keys and values are left: no page is a free row's.
    for found, expected in zip(row_tensors(state, 2)[:-2], row_tensors(fresh, 2)[:-2], strict=True):
        assert torch.equal(found, expected)
    assert (state.cache.table == CAPACITY.pages).all()


def test_rows_that_are_done_or_not_given_are_left_alone(talker: Talker) -> None:
    prompts = [
        random_prompt(talker, key, controls(max_frames=limit, ignore_eos=True)) for key, limit in ((1, 4), (2, 30))
    ]
    third = random_prompt(talker, 3, controls(max_frames=30))
    state = new_state(talker)
    begin_talker(talker, state, [*prompts, third], torch.tensor([0, 1, 2]))
    run(talker, state, [0, 1], 4)
    assert state.done.tolist() == [True, False, False, True, True, True]
    before = {slot: row_tensors(state, slot) for slot in (0, 2, 3)}
    run(talker, state, [1, 0], 5)
    for slot, tensors in before.items():
        for found, expected in zip(row_tensors(state, slot), tensors, strict=True):
            assert torch.equal(found, expected)
    assert state.length.tolist() == [4, 9, 0, 0, 0, 0]


def test_the_frame_that_ends_speech_is_not_appended() -> None:
    with torch.inference_mode(False):
        talker = tiny_talker()
        # Whenever the logit of the end is positive it is by far the largest.
        talker.codec_head.weight[: talker.codes] *= 1e-3
    wanted = controls(temperature=0, max_frames=30)
    prompt = random_prompt(talker, 1, wanted)
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


def test_seeds_and_segments_draw_differently_and_the_same_again(talker: Talker) -> None:
    def spoken(**given: int) -> list[list[int]]:
        wanted = controls(max_frames=8, ignore_eos=True, **given)  # type: ignore[arg-type]
        return alone(talker, random_prompt(talker, 1, wanted)).tolist()

    start = spoken(seed=1)
    assert spoken(seed=1) == start
    for other in ({"seed": 2}, {"seed": 1 + 2**32}, {"seed": 1, "segment": 1}):
        assert spoken(**other) != start


def test_the_predictor_alone_may_be_greedy(talker: Talker) -> None:
    wanted = controls(seed=3, max_frames=8, subtalker_dosample=False)
    state = new_state(talker)
    begin_talker(talker, state, [random_prompt(talker, 1, wanted)], torch.tensor([0]))
    for step in range(8):
        record: list[Tensor] = []
        frame(talker, state, torch.tensor([0]), record)
        if state.done[0]:
            break
        assert state.frames[0, step, 1:].tolist() == [logits[0].argmax().item() for logits in record[1:]]


def test_text_runs_one_id_a_frame_then_the_pad(talker: Talker) -> None:
    """Two prompts whose trails differ from id n on have equal logits up to frame n, and not after it."""
    wanted = controls(temperature=0, max_frames=10, ignore_eos=True)
    prompt = random_prompt(talker, 1, wanted)
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


def test_bfloat16_speaks() -> None:
    with torch.inference_mode(False):
        talker = tiny_talker(dtype=torch.bfloat16)
    codes = alone(talker, random_prompt(talker, 1, controls(max_frames=10, ignore_eos=True)))
    assert codes.shape == (10, talker.codebooks)
    assert (codes < talker.codes).all()
    assert codes.unique().numel() > 10


def test_a_step_has_fixed_shapes_and_asks_nothing_of_the_device() -> None:
    """On the meta device there is no value to ask for: whatever would synchronise or depend on a value raises.

    A number that would be copied to the device, which a graph cannot hold either, is refused by `device_only`.
    """
    with torch.inference_mode(False):
        talker = tiny_talker().to("meta")
    state = new_state(talker)
    wanted = row_controls(controls(top_p=0.9, subtalker_top_p=0.9))
    state.first.set([0], wanted[:1])
    state.rest.set([0], wanted[1:])
    record: list[Tensor] = []
    with device_only():
        frame(talker, state, torch.zeros(3, dtype=torch.int64, device="meta"), record)
    assert [tuple(logits.shape) for logits in record] == [(3, 1088), (3, 64), (3, 64), (3, 64)]


@pytest.mark.gpu
def test_a_captured_step_equals_the_eager_one() -> None:
    with torch.inference_mode(False):
        talker = tiny_talker().cuda()
        talker.finalize()
    prompts = prompts_of_all_kinds(talker)
    found = []
    for is_captured in (False, True):
        state = new_state(talker)
        slots = torch.tensor([3, 0, 4, 1, 2], device="cuda")
        begin_talker(talker, state, prompts, slots)
        graph = torch.cuda.CUDAGraph()
        if is_captured:
            scratch = torch.full((5,), CAPACITY.slots, device="cuda")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                frame(talker, state, scratch)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                frame(talker, state, slots)
        for _ in range(17):
            if is_captured:
                graph.replay()
            else:
                frame(talker, state, slots)
        found.append((state.frames[:-1].cpu(), state.length[:-1].cpu(), state.done.cpu()))
    for eager, captured in zip(*found, strict=True):
        assert torch.equal(eager, captured)


def test_placing_is_padded_with_the_scratch_row(talker: Talker) -> None:
    """Whatever was staged before: the scratch row stays free, on its own page, and rows that speak are left alone."""
    prompts = [random_prompt(talker, key, controls(seed=key)) for key in range(4)]
    state = new_state(talker)
    begin_talker(talker, state, prompts[:3], torch.tensor([4, 0, 2]))
    run(talker, state, [0, 2, 4], 3)
    untouched = [*row_tensors(state, 0), *row_tensors(state, 4)]
    stage(state, prompts[3:], [2], [Pages(pages_of(2, CAPACITY.slots, 6))])
    place(state, torch.tensor([2, CAPACITY.slots, CAPACITY.slots, CAPACITY.slots]))
    assert all(map(torch.equal, untouched, [*row_tensors(state, 0), *row_tensors(state, 4)]))
    assert state.length[-1] == state.position[-1] == 0
    assert (state.cache.table[-1] == CAPACITY.pages).all()
    assert state.done.tolist() == [False, True, False, True, False, True]
    fresh = new_state(talker)
    begin_talker(talker, fresh, prompts[3:], torch.tensor([2]))
    prefill(talker, state, torch.arange(prompts[3].positions))
    run(talker, state, [2], 8)
    run(talker, fresh, [2], 8)
    assert torch.equal(codes_of(state, 2), codes_of(fresh, 2))
