"""What watched heads of a backbone look at, in every family: full attention within the text; frames stay the same."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_dual_ar
import tiny_vox_lm
import torch
from families import FAMILIES, TinyFamily, tiny
from parity import assert_shares_of, begin, capacity, full_attention
from sine_engines import Engine
from tiny_checkpoint import write_checkpoint
from torch import Tensor
from without_gpu import device_only

from sonoro.core.config import EngineConfig
from sonoro.core.errors import CheckpointError
from sonoro.core.types import Failed, Finished, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import Spoken
from sonoro.models.words import ShowsWords
from sonoro.ops.dispatch import Operation
from sonoro.runtime.graphs import GraphSet
from sonoro.words.heads import FILE, WordHeads, write_heads
from sonoro.words.tracking import Pointing

__all__ = ["tiny"]

CAPACITY = capacity(slots=3, positions=192, frames=40, text=24)
HEADS = WordHeads(text_first=Pointing(layer=0, head=1), text_along=Pointing(layer=1, head=0))
FRAMES = 8


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def spoken(model: Any, prompt: Any, heads: WordHeads) -> tuple[Any, list[Tensor]]:
    """Row 1 after some frames of `prompt`, and what its heads looked at in each."""
    model.word_heads = heads
    state, seen = model.allocate(CAPACITY), []
    begin(model, state, [prompt], [1])
    for _ in range(FRAMES):
        model.frame(state, torch.tensor([1]))
        if heads.places:
            seen.append(model.attention(state)[1].clone())
    return state, seen


def dual_ar_rows(lm: Any, prompt: Any, frames: Tensor) -> Tensor:
    """What the slow AR is given of a prompt and `frames` [T, K]."""
    codes = torch.cat((frames[:, :1] + lm.config.semantic_start_token_id, frames), dim=1)
    return lm.embed(torch.cat((torch.from_numpy(prompt.rows), codes)))


def patch_rows(lm: Any, prompt: Any, frames: Tensor) -> Tensor:
    """What the base LM is given of a prompt and `frames` [T, P, D]."""
    rows = torch.from_numpy(prompt.rows)
    heard = rows[:, 2:].contiguous().view(torch.float32).view(-1, *frames.shape[1:]).to(frames.dtype)
    return torch.cat((lm.embed(rows[:, 0], heard, rows[:, 1] > 0), lm.embed_patches(frames)))


BACKBONES = {"dual_ar": (dual_ar_rows, "slow"), "patches": (patch_rows, "base_lm")}


@pytest.mark.parametrize("key", [2, 3, 5])
@pytest.mark.parametrize("family", BACKBONES)
def test_watched_heads_are_full_attention_within_the_text(family: str, key: int) -> None:
    """Whatever stands before the text: nothing, an earlier turn, a transcript, recordings."""
    tiny, (embed, stack) = FAMILIES[family], BACKBONES[family]
    model = tiny.load(torch.float64).model
    prompt = tiny.prompt(key, seed=key, max_frames=30, ignore_eos=True)
    state, seen = spoken(model, prompt, HEADS)
    lm = model._modules.lm
    whole = full_attention(getattr(lm, stack), embed(lm, prompt, state.frames[1, :FRAMES]))
    # A new position is that of the row that was pending: the prompt's last, then each frame.
    assert_shares_of(whole, seen, HEADS.places, prompt.positions - 1, (prompt.text_start, prompt.text_count))
    assert state.watch.attention.shape[1:] == (2, 192)


def test_the_text_is_where_the_prompt_says_and_its_tokens_read_all_of_it() -> None:
    text = "Not so long, is it? Well: é."
    dual_ar, patches = tiny_dual_ar.builder(), tiny_vox_lm.builder()
    heard = torch.zeros(2, 10, dtype=torch.int64)
    before = [Spoken("<|speaker:0|>Hello.", heard)]
    patch = Spoken("Once.", torch.zeros(2, 4, 8))
    made = [
        (dual_ar, dual_ar.build(text, tiny_dual_ar.controls())),
        (dual_ar, dual_ar.build(text, tiny_dual_ar.controls(), before)),
        (patches, patches.build(text, tiny_vox_lm.controls())),
        (patches, patches.build(text, tiny_vox_lm.controls(), [patch])),
        (patches, patches.build(text, tiny_vox_lm.controls(), instructions="A calm voice")),
    ]
    for builder, prompt in made:
        spans = builder.token_spans(text)
        ids = prompt.rows[prompt.text_start : prompt.text_start + prompt.text_count, 0].tolist()
        assert len(ids) == len(spans)
        # The first may be read with a space that stands before it.
        assert ids[1:-1] == builder._tokenizer.encode(text)[1:]
        read = {at for start, end in spans for at in range(start, end)}
        assert read >= {at for at in range(len(text)) if text[at] != " "}
        assert spans[-1] == (len(text), len(text))


def test_a_tag_of_a_speaker_is_read_by_no_token() -> None:
    text = "<|speaker:3|>You. <|speaker:4|> Me."
    spans = tiny_dual_ar.builder().token_spans(text)
    assert "".join(text[start:end] for start, end in spans).split() == ["You.", "Me."]


def test_chinese_is_read_by_a_token_a_character() -> None:
    builder = tiny_vox_lm.builder()
    multiple = next(token for token in builder._characters)
    word = {index: token for token, index in builder._tokenizer.vocabulary.items()}[multiple].replace("▁", "")
    spans = builder.token_spans(word)
    assert [word[start:end] for start, end in spans[-len(word) - 1 : -1]] == list(word)


def test_what_is_spoken_is_the_same_bits_whether_heads_are_watched_or_not(tiny: TinyFamily) -> None:
    model, prompt = tiny.load().model, tiny.prompt(3, seed=3, max_frames=30, ignore_eos=True)
    watched, plain = (spoken(model, prompt, heads)[0] for heads in (HEADS, WordHeads()))
    assert plain.watch is None
    assert torch.equal(watched.frames, plain.frames)
    assert torch.equal(watched.pending, plain.pending)


def test_a_frame_with_watched_heads_may_be_captured(tiny: TinyFamily) -> None:
    model = tiny.load(device="meta").model
    model.word_heads = HEADS
    state, slots = model.allocate(CAPACITY), torch.empty(3, dtype=torch.int64, device="meta")
    with device_only():
        model.frame(state, slots)
        assert model.attention(state)[slots].shape == (3, 2, 192)


def test_kernels_are_checked_with_arguments_that_they_take(tiny: TinyFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = set()

    def bind(operation: Operation, arguments: Callable[[], tuple[Any, ...]], tolerance: float) -> None:
        for function in (operation.kernel, operation.reference):
            inspect.signature(function).bind(*arguments())
        operation.is_supported(*arguments())
        checked.add(operation.name)

    monkeypatch.setattr(Operation, "check", bind)
    model = tiny.load().model
    model.word_heads = HEADS
    model.check_kernels(model.allocate(CAPACITY), 2)
    assert {"point", "decode_attention", "clear_rows"} <= checked


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_equals_eager_with_watched_heads(tiny: TinyFamily, dtype: torch.dtype) -> None:
    """Frames and attention, bit by bit at the same padded size."""
    found = []
    with torch.cuda.stream(torch.cuda.Stream()):
        model = tiny.load(dtype, "cuda").model
        model.word_heads = HEADS
        for is_eager in (False, True):
            state = model.allocate(CAPACITY)
            model.check_kernels(state, 2)

            def frame(slots: Tensor, state: Any = state) -> Tensor:
                model.frame(state, slots)
                return model.attention(state)[slots]

            step = GraphSet("frame", frame, (2,), CAPACITY.slots, torch.device("cuda"), is_eager=is_eager)
            step.capture()
            begin(model, state, [tiny.prompt(key, seed=key, max_frames=30, ignore_eos=True) for key in (2, 3)], [0, 2])
            seen = [step.run([0, 2]).clone() for _ in range(FRAMES)]
            assert (step.eager_launches, step.graph_launches)[is_eager] == 0
            found.append((state.frames[[0, 2], :FRAMES], torch.stack(seen)))
        torch.testing.assert_close(*found, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("layer", "head"), [(3, 0), (0, 4), (-1, 0)])
def test_a_table_of_heads_that_the_model_lacks_is_refused(layer: int, head: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    write_heads(tmp_path / FILE, WordHeads(text_first=Pointing(layer=layer, head=head)))
    words = rf"word_heads\.json names layer {layer}, head {head}, from 0; the model has 3 layers of 4 heads"
    with pytest.raises(CheckpointError, match=words):
        registry.load(tmp_path, device="cpu")


def test_words_of_every_family_have_times_where_a_table_says_which_head_points(
    tiny: TinyFamily, tmp_path: Path
) -> None:
    """Estimated ones, in order and within the audio; of random weights, whose attention means nothing."""
    tiny.write(tmp_path)
    write_heads(tmp_path / FILE, HEADS)
    model = registry.load(tmp_path, device="cpu", dtype="float32", load_format="dummy").model
    assert isinstance(model, ShowsWords)
    assert model.word_heads == HEADS
    engine = Engine(model, EngineConfig(slots=2, max_positions=1024, max_frames=64))
    text = "One of them, and  another."
    engine.submit(SpeechRequest(id="a", text=text, with_words=True, max_frames=20, ignore_eos=True))
    events = []
    while engine.has_work:
        events += engine.tick()
    assert not [event for event in events if isinstance(event, Failed)]
    assert isinstance(events[-1], Finished)
    words = [word for event in events for word in event.words or ()]
    assert [word.text for word in words] == ["One", "of", "them", "and", "another"]
    assert all(text[word.start : word.end] == word.text and word.is_estimated for word in words)
    times = [at for word in words for at in (word.start_s, word.end_s)]
    assert times == sorted(times)
    assert times[-1] <= events[-1].frames * model.spec.frame_s
