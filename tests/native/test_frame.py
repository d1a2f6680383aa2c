"""The compiled decode step against the one in torch, which is its reference: same codes, same state.

Both sum in float32, each in its own order, so hidden states differ in the last bits and a decision between two nearly
equal scores may differ too. Such a near tie comes once in some hundred thousand decisions; here are a few hundred, with
fixed seeds, and none is one. What follows from the codes alone must be equal, what was summed nearly so.
"""

import ctypes
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from parity import Pages, begin, capacity, pages_of
from tiny_talker import begin_talker, controls, random_prompt, tiny_config, tiny_talker

from sonoro.core.types import SpeechRequest
from sonoro.models import registry
from sonoro.models.base import Capacity
from sonoro.models.pocket_tts.compiled import Flow
from sonoro.models.pocket_tts.compiled_codec import LatentCodec
from sonoro.models.qwen3_tts import compiled as module
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.compiled import CompiledFrame, CompiledTalker, Frame
from sonoro.models.qwen3_tts.compiled_codec import Codec
from sonoro.models.qwen3_tts.frame import frame
from sonoro.models.qwen3_tts.model import Qwen3TTS
from sonoro.models.qwen3_tts.prompt import TalkerPrompt
from sonoro.models.qwen3_tts.state import FrameState, admit, allocate, stage
from sonoro.models.shared import compiled as shared
from sonoro.models.shared.compiled import has_known_layout, linear_layers
from sonoro.native import build
from sonoro.native.library import BLOCK, CompiledCode, load
from sonoro.nn.linear import Linear
from sonoro.ops.eight_bits import quantize
from sonoro.words.heads import WordHeads
from sonoro.words.tracking import Pointing

PAD = tiny_config().tts_pad_token_id
CAPACITY = capacity(slots=5, positions=96, frames=40, text=24)
HEADS = WordHeads(text_first=Pointing(layer=0, head=1), text_along=Pointing(layer=1, head=0))
KINDS = (
    {"seed": 1, "max_frames": 14},
    {"temperature": 0, "max_frames": 11},
    {"seed": 3, "segment": 2, "max_frames": 17, "top_k": 0, "top_p": 0.8, "ignore_eos": True},
    {"seed": 4, "max_frames": 9, "top_k": 5, "repetition_penalty": 1.8, "subtalker_top_p": 0.6, "subtalker_top_k": 0},
    {"seed": 2**62 + 5, "temperature": 1.4, "max_frames": 13, "top_k": 200, "subtalker_dosample": False},
)

HAS_COMPILER = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def compiled_step(talker: Talker, state: FrameState, library: CompiledCode) -> CompiledFrame:
    return CompiledFrame(CompiledTalker(talker, library), state)


def make_talker(topology: str = "1.7b", *, is_stored_in_8_bits: bool = False) -> Talker:
    with torch.inference_mode(False):
        talker = tiny_talker(topology=topology, is_final=False)
        for part in talker.modules() if is_stored_in_8_bits else ():
            if isinstance(part, Linear):
                scale = part.weight.abs().amax(dim=1, keepdim=True) / 127
                part.weight.copy_((part.weight / scale).round() * scale)
        talker.finalize()
    return talker


def assert_equal(found: FrameState, expected: FrameState, slots: Sequence[int]) -> None:
    for name in ("done", "length", "position", "frames", "seen"):
        ours, theirs = (getattr(state, name)[[*slots]] for state in (found, expected))
        assert torch.equal(ours, theirs), name
    torch.testing.assert_close(found.pending[[*slots]], expected.pending[[*slots]], atol=1e-5, rtol=0)
    if expected.watch is not None:
        assert found.watch is not None
        attention = found.watch.attention, expected.watch.attention
        torch.testing.assert_close(*(rows[[*slots]] for rows in attention), atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_stored_in_8_bits", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("topology", ["1.7b", "0.6b"])
def test_codes_and_state_are_those_of_torch(library: CompiledCode, topology: str, is_stored_in_8_bits: bool) -> None:
    talker = make_talker(topology, is_stored_in_8_bits=is_stored_in_8_bits)
    prompts = [random_prompt(20 + index, controls(**kind)) for index, kind in enumerate(KINDS)]
    found, expected = (allocate(talker, CAPACITY, PAD, HEADS) for _ in range(2))
    for state in (found, expected):
        begin_talker(talker, state, prompts, torch.tensor([4, 2, 0, 3, 1]))
    step = compiled_step(talker, found, library).frame
    # The batch changes; slots that are done stay in it, and the scratch slot pads it.
    for slots in [[4, 2], [4], [0, 1, 2, 3, 4], [3, 5, 5], *[[1, 4, 0, 3, 2]] * 18]:
        step(torch.tensor(slots))
        frame(talker, expected, torch.tensor(slots))
        assert_equal(found, expected, range(5))
    assert expected.done.all()
    assert expected.length[:5].min() >= 3


OPTIONS = {
    "temperature": (0, 1e-6, 0.4, 0.9, 2.0),
    "top_k": (0, 1, 2, 50, 5000),
    "top_p": (1.0, 0.0001, 0.3, 0.999),
    "repetition_penalty": (0.5, 1.0, 1.05, 1.8),
    "ignore_eos": (True, False),
    "max_frames": (1, 7, 12),
    "seed": (0, 2**40 + 1, 2**63 - 1),
    "segment": (0, 3),
    "subtalker_temperature": (0.01, 0.9, 3.0),
    "subtalker_top_k": (0, 1, 50, 5000),
    "subtalker_top_p": (1.0, 0.0001, 0.6),
}


@pytest.mark.parametrize("count", [1, 2, 7, 16, 17])
def test_any_batch_with_any_options_has_the_codes_of_torch(library: CompiledCode, count: int) -> None:
    choose = random.Random(count)
    talker, slots = make_talker(), torch.randperm(count, generator=torch.Generator().manual_seed(count))
    options = [{name: choose.choice(values) for name, values in OPTIONS.items()} for _ in range(count)]
    prompts = [random_prompt(60 + index, controls(**kind)) for index, kind in enumerate(options)]
    room = capacity(slots=count, positions=48, frames=12, text=24)
    found, expected = (allocate(talker, room, PAD, HEADS) for _ in range(2))
    for state in (found, expected):
        begin_talker(talker, state, prompts, slots)
    step = compiled_step(talker, found, library).frame
    for _ in range(12):
        step(slots)
        frame(talker, expected, slots)
    assert expected.done.all()
    assert_equal(found, expected, range(count))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_codes_of_numbers_that_are_not_finite_are_those_of_torch(library: CompiledCode, value: float) -> None:
    talker = make_talker()
    # In the logits of a few ids, and, as all numbers of a layer then are NaN, in all.
    talker.codec_head.weight[7:9, 2] = value
    talker.code_predictor.model.layers[0].mlp.gate_up_proj.weight[3, 2] = value
    prompts = [random_prompt(80 + index, controls(**kind)) for index, kind in enumerate(KINDS)]
    found, expected = (allocate(talker, CAPACITY, PAD) for _ in range(2))
    for state in (found, expected):
        begin_talker(talker, state, prompts, torch.arange(5))
    step = compiled_step(talker, found, library).frame
    for _ in range(4):
        step(torch.arange(5))
        frame(talker, expected, torch.arange(5))
    for name in ("done", "length", "frames", "seen"):
        assert torch.equal(getattr(found, name)[:5], getattr(expected, name)[:5]), name


def test_a_slot_does_not_depend_on_its_batch(library: CompiledCode) -> None:
    talker = make_talker(is_stored_in_8_bits=True)
    prompts = [random_prompt(30 + index, controls(seed=index, max_frames=12, ignore_eos=True)) for index in range(4)]
    together, alone = (allocate(talker, CAPACITY, PAD) for _ in range(2))
    for state in (together, alone):
        begin_talker(talker, state, prompts, torch.arange(4))
    steps = compiled_step(talker, together, library), compiled_step(talker, alone, library)
    for _ in range(12):
        steps[0].frame(torch.arange(4))
        for slot in range(4):
            steps[1].frame(torch.tensor([slot]))
    # Bit by bit, unlike in torch.
    assert torch.equal(together.frames[:4], alone.frames[:4])
    assert torch.equal(together.pending[:4], alone.pending[:4])


@pytest.mark.parametrize("rows", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_a_weight_in_8_bits_is_packed_without_loss_and_no_other(library: CompiledCode, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    steps = torch.randint(-127, 128, (rows, 37), generator=generator, dtype=torch.int8)
    steps[:, 5] = 127 - 254 * (torch.arange(rows) % 2)
    scale = torch.rand(rows, generator=generator) / 300
    weight = (steps.float() * scale[:, None]).t().contiguous().t()
    found = library.pack(weight)
    other = library.pack(torch.randn(37, rows, generator=generator).t())
    assert other is None
    if library.level == "plain":
        assert found is None
        return
    assert found is not None
    packed, by = found
    unpacked = packed.transpose(1, 2).flatten(0, 1)[:rows]
    assert torch.equal(unpacked.float() * by[:, None], weight)


def test_structures_are_as_large_as_in_c(library: CompiledCode) -> None:
    of_families = {"frame": Frame, "codec": Codec, "flow": Flow, "latent_codec": LatentCodec}
    assert {name: library.size_bytes(name) for name in of_families} == {
        name: ctypes.sizeof(structure) for name, structure in of_families.items()
    }


@HAS_COMPILER
def test_libraries_of_other_sources_are_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = [*build.levels()][-1]
    assert build.is_current(level)
    assert not build.is_current(level, tmp_path)
    monkeypatch.setattr(build, "_FLAGS", ())
    assert not build.is_current(level)


@HAS_COMPILER
def test_libraries_without_sources_are_used_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = [*build.levels()][-1]
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert not build.is_current(level, tmp_path)
    build.library(level, tmp_path).write_bytes(b"")
    assert build.is_current(level, tmp_path)


def test_a_quantised_model_has_a_compiled_step_where_bytes_are_read_fast(library: CompiledCode) -> None:
    with torch.inference_mode(False):
        talker = make_talker()
        for layer in talker.model.layers.modules():
            if isinstance(layer, Linear):
                stored, layer.scale = quantize(layer.weight.data, "int8")
                layer.weight.requires_grad_(False)
                layer.weight.data = stored
    assert has_known_layout(linear_layers(talker), library) == library.packs
    if not library.packs:
        return
    prompt = random_prompt(40, controls(seed=2, max_frames=10))
    found, expected = (allocate(talker, CAPACITY, PAD) for _ in range(2))
    for state in (found, expected):
        begin_talker(talker, state, [prompt], torch.tensor([2]))
    step = compiled_step(talker, found, library)
    while not expected.done[2]:
        step.frame(torch.tensor([2]))
        frame(talker, expected, torch.tensor([2]))
    assert_equal(found, expected, [2])


def test_a_prompt_that_runs_in_compiled_code_leaves_the_same_keys_and_values(
    library: CompiledCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker = make_talker(is_stored_in_8_bits=True)
    # Longer than the room for rows, and two of them packed.
    prompts = [random_prompt(50 + index, controls(seed=index)) for index in range(2)]
    found, expected = (allocate(talker, CAPACITY, PAD) for _ in range(2))
    begin_talker(talker, expected, prompts, torch.tensor([1, 3]))
    monkeypatch.setattr(CompiledFrame, "most", 4)
    step = compiled_step(talker, found, library)
    runs = SimpleNamespace(stage=stage, admit=admit, prefill=lambda state, tokens: step.prefill(tokens))
    begin(runs, found, prompts, torch.tensor([1, 3]))
    for ours, theirs in ((found.cache.keys, expected.cache.keys), (found.cache.values, expected.cache.values)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        assert ours.any()
    assert torch.equal(found.pending, expected.pending)


@HAS_COMPILER
def test_without_a_library_or_for_another_layout_there_is_no_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode(False):
        wide = tiny_talker(dtype=torch.float64)
    assert CompiledTalker.of(make_talker()) is not None
    assert CompiledTalker.of(wide) is None
    monkeypatch.setattr(shared, "load", lambda: None)
    assert CompiledTalker.of(make_talker()) is None


@HAS_COMPILER
def test_the_builtin_voice_has_the_same_weights_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode(False):
        narrow = registry.load(device="cpu").model
        monkeypatch.setattr(module, "load", lambda: None)
        wide = registry.load(device="cpu").model
    assert isinstance(narrow, Qwen3TTS)
    assert isinstance(wide, Qwen3TTS)
    library = load()
    assert library is not None
    assert narrow._forms.is_narrow == library.packs
    assert not wide._forms.is_narrow
    found, expected = (model._forms.in_torch.state_dict() for model in (narrow, wide))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.stride() == expected[name].stride(), name


@pytest.fixture(scope="module")
def builtin() -> Qwen3TTS:
    with torch.inference_mode(False):
        loaded = registry.load(device="cpu").model
    assert isinstance(loaded, Qwen3TTS)
    return loaded


SENTENCES = {
    "nora": "The birch canoe slid on the smooth planks.",
    "miles": "It's 7 o'clock, and there are 23 people in the room.",
    "edith": "Yes.",
    "hugh": "What would you like to have for breakfast tomorrow?",
}


@HAS_COMPILER
def test_the_builtin_voice_speaks_the_same_codes(builtin: Qwen3TTS) -> None:
    slots = torch.arange(len(SENTENCES))
    room = Capacity(len(slots), 256, 24, 64, page_positions=16, pages=64, max_tokens=1024)
    prompts: list[TalkerPrompt] = []
    for number, (voice, text) in enumerate(SENTENCES.items()):
        request = builtin.spec.resolve(SpeechRequest(text=text, voice=voice, seed=number, id=voice, max_frames=24))
        segment = builtin.segments(request.text, request.language)[0]
        prompts.append(builtin.prepare(request, segment.text, 0, [], None))
    states = [builtin.allocate(room) for _ in range(2)]
    for state in states:
        pages = [Pages(pages_of(slot, len(slots), 16)) for slot in slots.tolist()]
        tokens = builtin.stage(state, prompts, slots.tolist(), pages)
        builtin.admit(state, slots)
        builtin.prefill(state, torch.arange(tokens))
    found, expected = states
    step = builtin.compiled_steps(found)
    assert step is not None
    while not expected.done.all():
        step.frame(slots)
        builtin.frame(expected, slots)
    assert_equal(found, expected, slots.tolist())
    assert expected.length[:4].min() > 5


@HAS_COMPILER
def test_an_editable_installation_compiles_what_this_processor_loads(tmp_path: Path) -> None:
    loaded, own = load(), build.own_levels()
    assert loaded is not None
    assert loaded.level in own
    wanted = [*build.levels()][-1:]
    assert build.build(tmp_path, wanted) == [build.library(wanted[0], tmp_path)] == [*tmp_path.iterdir()]
