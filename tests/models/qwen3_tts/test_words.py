"""What watched heads of the talker look at: full attention within the text, in every layout; frames stay the same."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from parity import Case, assert_shares_of, capacity, full_attention
from tiny_checkpoint import write_checkpoint
from tiny_talker import begin_talker, controls, reference_prompt, tiny_config, tiny_talker
from torch import Tensor

from builtin_voice.forwards import embed_prompt
from sonoro.core.errors import CheckpointError
from sonoro.core.types import SpeechRequest
from sonoro.models import registry
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.frame import frame
from sonoro.models.qwen3_tts.prompt import TalkerPrompt
from sonoro.models.qwen3_tts.state import FrameState, allocate
from sonoro.models.words import ShowsWords
from sonoro.words.heads import FILE, WordHeads, read_heads, write_heads
from sonoro.words.tracking import Pointing

PAD = tiny_config().tts_pad_token_id
CAPACITY = capacity(slots=3, positions=96, frames=40, text=24)
HEADS = WordHeads(text_first=Pointing(layer=0, head=1), text_along=Pointing(layer=1, head=0))
FRAMES = 10


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def spoken(talker: Talker, prompt: TalkerPrompt, heads: WordHeads | None) -> tuple[FrameState, list[Tensor]]:
    """Row 1 after some frames of `prompt`, and what its heads looked at in each."""
    state, seen = allocate(talker, CAPACITY, PAD, heads), []
    begin_talker(talker, state, [prompt], torch.tensor([1]))
    for _ in range(FRAMES):
        frame(talker, state, torch.tensor([1]))
        if state.watch is not None:
            seen.append(state.watch.attention[1].clone())
    return state, seen


def attention_of(talker: Talker, prompt: TalkerPrompt, frames: Tensor) -> dict[tuple[int, int], Tensor]:
    """By layer and head the whole attention matrix of a prompt and what was spoken, from its own forward."""
    trail = [*prompt.trail.tolist(), *[PAD] * len(frames)][: len(frames)]
    rows = torch.cat(
        [embed_prompt(talker, prompt), talker.embed_frames(frames) + talker.embed_text(torch.tensor(trail))]
    )
    return full_attention(talker.model, rows)


@pytest.mark.parametrize("layout", ["custom_voice_whole", "custom_voice_stream", "in_context_whole", "x_vector_stream"])
def test_watched_heads_are_full_attention_within_the_text(
    reference: Callable[[str], dict[str, Case]], layout: str
) -> None:
    case = reference("greedy")[layout]
    with torch.inference_mode(False):
        talker = tiny_talker(case.facts["variant"], case.facts["topology"], torch.float64)
    prompt = reference_prompt(case, controls(temperature=0, max_frames=40))
    state, seen = spoken(talker, prompt, HEADS)
    whole = attention_of(talker, prompt, state.frames[1, :FRAMES])
    assert_shares_of(whole, seen, HEADS.places, prompt.positions - 1, (prompt.text_start, prompt.text_count))


@pytest.mark.parametrize("layout", ["custom_voice_whole", "custom_voice_stream", "in_context_whole", "x_vector_stream"])
def test_the_text_of_a_prompt_is_where_it_says(reference: Callable[[str], dict[str, Case]], layout: str) -> None:
    case = reference("greedy")[layout]
    prompt = reference_prompt(case, controls())
    fed = [*prompt.text_rows.tolist(), *prompt.trail.tolist()]
    end = tiny_config(case.facts["variant"], case.facts["topology"]).tts_eos_token_id
    text = fed[prompt.text_start : fed.index(end, prompt.text_start)]
    assert 0 < len(text) < prompt.text_count
    assert all(one not in (PAD, end) for one in text)


def test_what_is_spoken_is_the_same_bits_whether_heads_are_watched_or_not(
    reference: Callable[[str], dict[str, Case]],
) -> None:
    case = reference("greedy")["custom_voice_whole"]
    with torch.inference_mode(False):
        talker = tiny_talker(case.facts["variant"], case.facts["topology"])
    prompt = reference_prompt(case, controls(max_frames=40))
    watched, plain = (spoken(talker, prompt, heads)[0] for heads in (HEADS, None))
    assert plain.watch is None
    assert torch.equal(watched.frames, plain.frames)
    assert torch.equal(watched.pending, plain.pending)


def test_a_checkpoint_comes_with_its_table_of_heads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    model = registry.load(tmp_path, device="cpu", dtype="float32").model
    assert isinstance(model, ShowsWords)
    assert model.word_heads == WordHeads()
    write_heads(tmp_path / FILE, HEADS)
    assert read_heads(tmp_path) == HEADS
    assert registry.load(tmp_path, device="cpu", dtype="float32").model.word_heads == HEADS
    (tmp_path / FILE).write_text('{"text_first": {"layer": 1}}')
    with pytest.raises(CheckpointError, match=FILE):
        registry.load(tmp_path, device="cpu", dtype="float32")


def test_tokens_read_the_characters_of_the_text_and_the_last_reads_none() -> None:
    model = registry.load(None, device="cpu", dtype="float32").model
    text = "the cafe is open, isn't it?"
    spans = model.token_spans(text)
    assert spans[-1] == (len(text), len(text))
    assert "".join(text[start:end] for start, end in spans) == text
    asked = SpeechRequest(id="a", text=text, options={"non_streaming_mode": True})
    request = msgspec.structs.replace(model.spec.resolve(asked), max_frames=20)
    assert model.prepare(request, text, 0, [], None).text_count == len(spans)
