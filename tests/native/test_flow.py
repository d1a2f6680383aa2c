"""The compiled decode step of a backbone and a flow head against the one in torch, which is its reference.

Both sum in float32, each in its own order: latents, which are fed back, stay within 2e-5 over sixty frames.
"""

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import tiny_pocket
import torch
from parity import begin, capacity
from tiny_pocket_lm import NEVER, controls, model_of, random_prompt

from sonoro.models.pocket_tts import compiled as module
from sonoro.models.pocket_tts.compiled import CompiledFrame, packed
from sonoro.models.pocket_tts.model import PocketTTS
from sonoro.models.pocket_tts.prompt import PocketPrompt
from sonoro.models.pocket_tts.state import FrameState
from sonoro.models.shared import compiled as shared
from sonoro.native import build
from sonoro.native.library import CompiledCode
from sonoro.nn.linear import Linear
from sonoro.nn.transformer import DecoderLayer
from sonoro.ops.eight_bits import quantize
from sonoro.words.heads import WordHeads
from sonoro.words.tracking import Pointing

CAPACITY = capacity(slots=5, positions=192, frames=64, text=1)
KINDS = (
    {"seed": 1, "max_frames": 14},
    {"seed": 2, "max_frames": 60, "threshold": -NEVER, "after": 4},
    {"seed": 3, "segment": 2, "max_frames": 60, "threshold": -NEVER, "ignore_eos": True, "temperature": 0.9},
    {"temperature": 0, "max_frames": 9},
    {"seed": 2**62 + 5, "max_frames": 60, "threshold": -6.0, "after": 0},
)
HAS_COMPILER = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def compiled_step(model: PocketTTS, state: FrameState, library: CompiledCode) -> CompiledFrame:
    lm = model._modules.lm
    return CompiledFrame(lm, packed(lm, library), state)


def prompts_of(model: PocketTTS, kinds: Sequence[dict[str, object]]) -> list[PocketPrompt]:
    """Of different lengths, all in the voice of `model`."""
    voice = model._own_voice("alba")
    return [
        model._prompts.build(f"Number {'one ' * index}is this.", controls(**kind), voice)
        for index, kind in enumerate(kinds)
    ]


def assert_equal(found: FrameState, expected: FrameState, slots: Sequence[int]) -> None:
    for name in ("done", "length", "position", "last"):
        ours, theirs = (getattr(state, name)[[*slots]] for state in (found, expected))
        assert torch.equal(ours, theirs), name
    for name in ("frames", "pending"):
        ours, theirs = (getattr(state, name)[[*slots]] for state in (found, expected))
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    if expected.watch is not None:
        assert found.watch is not None
        attention = found.watch.attention, expected.watch.attention
        torch.testing.assert_close(*(rows[[*slots]] for rows in attention), atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", tiny_pocket.VARIANTS)
def test_latents_and_state_are_those_of_torch(library: CompiledCode, variant: str) -> None:
    model = model_of(variant)
    model.word_heads = WordHeads(text_first=Pointing(layer=1, head=2))
    if variant == "first":
        model.configure({"flow_steps": 3})
    found, expected = (model.allocate(CAPACITY) for _ in range(2))
    for state in (found, expected):
        begin(model, state, prompts_of(model, KINDS), [4, 2, 0, 3, 1])
    step = compiled_step(model, found, library).frame
    # The batch changes; slots that are done stay in it, and the scratch slot pads it.
    for slots in [[4, 2], [4], [0, 1, 2, 3, 4], [3, 5, 5], *[[1, 4, 0, 3, 2]] * 60]:
        step(torch.tensor(slots))
        model.frame(expected, torch.tensor(slots))
        assert_equal(found, expected, range(5))
    assert expected.done.all()
    assert expected.frames[:5].abs().max() < 20
    assert expected.length[[4, 2, 0, 3]].tolist() == [14, 10, 60, 9]


@pytest.mark.parametrize("count", [1, 3, 4, 16])
def test_any_batch_with_any_options_is_that_of_torch(library: CompiledCode, count: int) -> None:
    choose, model = random.Random(count), model_of("pointwise")
    options = {
        "threshold": (NEVER, -NEVER, -3.0), "after": (-1, 0, 7), "ignore_eos": (True, False), "max_frames": (1, 7, 12),
        "temperature": (0, 1e-6, 0.3, 2.0), "seed": (0, 2**40 + 1, 2**63 - 1), "segment": (0, 3),
    }  # fmt: skip
    drawn = [{name: choose.choice(values) for name, values in options.items()} for _ in range(count)]
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    room = capacity(slots=count, positions=192, frames=12, text=1)
    found, expected = (model.allocate(room) for _ in range(2))
    for state in (found, expected):
        begin(model, state, prompts_of(model, drawn), slots.tolist())
    step = compiled_step(model, found, library)
    for _ in range(13):
        step.frame(slots)
        model.frame(expected, slots)
    assert expected.done.all()
    assert_equal(found, expected, range(count))


def test_a_slot_does_not_depend_on_its_batch(library: CompiledCode) -> None:
    model = model_of("drifting")
    prompts = prompts_of(model, [{"seed": seed, "max_frames": 12, "ignore_eos": True} for seed in range(5)])
    together, alone = (model.allocate(CAPACITY) for _ in range(2))
    for state in (together, alone):
        begin(model, state, prompts, range(5))
    steps = compiled_step(model, together, library), compiled_step(model, alone, library)
    for _ in range(12):
        steps[0].frame(torch.arange(5))
        for slot in range(5):
            steps[1].frame(torch.tensor([slot]))
    # Bit by bit, unlike in torch.
    assert torch.equal(together.frames[:5], alone.frames[:5])
    assert torch.equal(together.pending[:5], alone.pending[:5])


def quantised(model: PocketTTS) -> PocketTTS:
    with torch.inference_mode(False):
        layers = [layer for layer in model._modules.lm.modules() if isinstance(layer, DecoderLayer)]
        for part in (part for layer in layers for part in layer.modules() if isinstance(part, Linear)):
            stored, part.scale = quantize(part.weight.data, "int8")
            part.weight.requires_grad_(False)
            part.weight.data = stored
    return model


@pytest.mark.parametrize("is_quantised", [False, True], ids=["float32", "int8"])
def test_a_prompt_that_runs_in_compiled_code_leaves_the_same_keys_and_values(
    library: CompiledCode, is_quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_quantised and not library.packs:
        return
    model = quantised(model_of()) if is_quantised else model_of()
    prompts = prompts_of(model, [{"seed": index, "max_frames": 8} for index in range(5)])
    found, expected = (model.allocate(CAPACITY) for _ in range(2))
    begin(model, expected, prompts, range(5))
    # Fewer rows than a prompt has, and several prompts packed.
    monkeypatch.setattr(module, "_ROWS", 7)
    step = compiled_step(model, found, library)
    runs = SimpleNamespace(stage=model.stage, admit=model.admit, prefill=lambda state, tokens: step.prefill(tokens))
    begin(runs, found, prompts, range(5))
    for ours, theirs in ((found.cache.keys, expected.cache.keys), (found.cache.values, expected.cache.values)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        assert ours.any()
    assert torch.equal(found.pending, expected.pending)
    monkeypatch.undo()
    step = compiled_step(model, found, library)
    for _ in range(8):
        step.frame(torch.arange(5))
        model.frame(expected, torch.arange(5))
    assert_equal(found, expected, range(5))


@HAS_COMPILER
def test_without_a_library_or_in_another_dtype_there_is_no_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed(model_of()._modules.lm) is not None
    assert packed(model_of(dtype=torch.bfloat16)._modules.lm) is None
    monkeypatch.setattr(shared, "load", lambda: None)
    assert packed(model_of()._modules.lm) is None


@HAS_COMPILER
def test_the_model_offers_its_compiled_step() -> None:
    model = model_of()
    state = model.allocate(CAPACITY)
    begin(model, state, [random_prompt(3, controls(max_frames=3))], [1])
    step = model.compiled_steps(state)
    assert step is not None
    for _ in range(4):
        step.frame(torch.tensor([1]))
    assert state.length[1] == 3
