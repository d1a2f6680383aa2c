"""The whole model behind its protocol: what it offers, and speech through the engine."""

from pathlib import Path

import numpy as np
import pytest
import tiny_fish
import torch
from parity import begin, capacity
from sine_engines import Engine, audio, drain, end
from tiny_dual_ar import cases, voice_of
from tiny_fish import HOP
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.core.errors import (
    InvalidReference,
    InvalidRequest,
    TensorMismatch,
    UnknownLanguage,
    UnknownVoice,
)
from sonoro.core.types import Finished, Reference, SamplingParams, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import SavedVoice, SpeechModel, Voice
from sonoro.models.fish_s2.config import model_config
from sonoro.models.fish_s2.model import spec_of
from sonoro.models.fish_s2.prompt import FishVoice

GREEDY = SamplingParams(temperature=0)
TURNS = "<|speaker:0|>One of them. " + "word " * 18 + "<|speaker:1|> Another one. " + "word " * 18


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-fish"
    tiny_fish.write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> SpeechModel:
    return registry.load(folder, device="cpu").model


def request(model: SpeechModel, text: str, **fields: object) -> SpeechRequest:
    """A greedy request with this model's defaults filled in."""
    return model.spec.resolve(SpeechRequest(id="1", text=text, **{"sampling": GREEDY, "max_frames": 8} | fields))


def spoken(model: SpeechModel, whole: SpeechRequest, voice: Voice | None = None, **given: object) -> Tensor:
    """All frames [T, K] of one segment, from a slot in the middle of the state."""
    assert whole.max_frames is not None
    arguments = {"segment": whole.text, "index": 0, "before": []} | given
    with torch.inference_mode():
        prompt = model.prepare(whole, voice=voice, **arguments)
        state = model.allocate(capacity(4, prompt.positions + whole.max_frames, whole.max_frames, 1))
        slots = torch.tensor([2])
        begin(model, state, [prompt], slots)
        for _ in range(whole.max_frames):
            model.frame(state, slots)
        return state.frames[2, : int(state.length[2])].clone()


def recording(seconds: float = 0.6, text: str | None = "Ok.", **fields: object) -> Reference:
    samples = 0.1 * np.random.default_rng(int(seconds * 10)).standard_normal(int(seconds * 44100))
    return Reference(pcm=samples.astype("<f4").tobytes(), sample_rate=44100, text=text, **fields)


@pytest.mark.parametrize("name", ["plain", "reference", "ending"])
def test_greedy_speech_is_the_official_one(model: SpeechModel, tmp_path: Path, reference_root: Path, name: str) -> None:
    case = cases("greedy", reference_root)[name]
    if case.facts["end_scale"] != 0.25:
        tiny_fish.write_checkpoint(tmp_path, end_scale=case.facts["end_scale"])
        model = registry.load(tmp_path, device="cpu").model
    voice = voice_of(cases("prompts", reference_root)[case.facts["prompt"]])
    whole = request(model, case.facts["text"], max_frames=24)
    assert torch.equal(spoken(model, whole, voice), torch.from_numpy(case.tensors["made"][:, 1:]).long())


def test_the_released_model_says_what_it_can_do() -> None:
    spec = spec_of("fish-s2-pro", model_config("fish-s2-pro"))
    assert (spec.sample_rate, spec.hop, spec.max_frames) == (44100, 2048, 2048)
    assert (spec.voice_modes, spec.voices, spec.languages) == (("named", "cloned"), ("default",), ("auto",))
    assert spec.sampling == SamplingParams(temperature=0.8, top_k=30, top_p=0.8, repetition_penalty=1.0)
    assert not spec.options
    assert not spec.accepts_instructions


def test_what_it_cannot_do_is_refused(model: SpeechModel) -> None:
    with pytest.raises(UnknownVoice, match="known voices: default"):
        request(model, "a", voice="nobody")
    with pytest.raises(UnknownLanguage):
        request(model, "a", language="english")
    with pytest.raises(InvalidRequest, match="instructions"):
        request(model, "a", instructions="Whisper")
    penalised = request(model, "a", sampling=SamplingParams(repetition_penalty=1.1))
    with pytest.raises(InvalidRequest, match=r"repetition_penalty: 1.1 .*leave it out"):
        model.prepare(penalised, "a", 0, [], None)


def test_a_voice_is_the_codes_of_its_references(model: SpeechModel) -> None:
    references = [recording(0.6, "One."), recording(0.8, "<|speaker:4|>Two.")]
    voice = model.encode_voice(references)
    assert voice.reference_frames is None
    assert isinstance(voice.data, FishVoice)
    assert voice.data.transcripts == ("One.", "<|speaker:4|>Two.")
    frames = [model.codec.encode(torch.from_numpy(reference.samples.copy())) for reference in references]
    assert torch.equal(voice.data.frames, torch.cat(frames))
    assert [len(part) for part in frames] == [-(-len(reference.samples) // HOP) for reference in references]
    # Another rate is resampled first.
    other = Reference(pcm=references[0].pcm, sample_rate=22050, text="One.")
    assert len(model.encode_voice([other]).data.frames) == -(-2 * len(other.samples) // HOP)


def test_a_reference_that_cannot_be_used_is_refused(model: SpeechModel) -> None:
    with pytest.raises(InvalidReference, match="ref_text"):
        model.encode_voice([recording(), recording(text=None, use="reference")])
    with pytest.raises(InvalidReference, match=r"at least 0\.5 s"):
        model.encode_voice([recording(0.4)])


def test_the_segment_and_what_was_said_before_decide_what_is_drawn(model: SpeechModel) -> None:
    whole = request(model, "You and I.", sampling=SamplingParams(), seed=3)
    before = [("Hello.", torch.zeros(3, tiny_fish.NUM_CODEBOOKS, dtype=torch.int64))]
    first, same, other, later = (
        spoken(model, whole, index=index, before=said) for index, said in ((0, []), (0, []), (1, []), (0, before))
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not torch.equal(first, later)


def test_parts_are_the_pieces_of_a_frame(model: SpeechModel) -> None:
    with torch.inference_mode():
        state, slots = model.allocate(capacity(3, 32, 8, 1)), torch.tensor([1, 0])
        found = {name: part(slots) for name, part in model.parts(state).items()}
    assert set(found) == {"backbone", "depth", "sample"}
    assert tuple(found["backbone"].shape) == (2, 65)
    assert [tuple(logits.shape) for logits in found["depth"]] == [(2, 64)] * 9
    assert [tuple(codes.shape) for codes in found["sample"]] == [(2,)] * 10
    assert state.done.all()


def test_the_floor_counts_every_pass(model: SpeechModel) -> None:
    """Float32, 3 slow layers once and 2 fast ones nine times, the heads, and 3 positions of 3 layers."""
    layer = (192 + 128) * 64 + 3 * 96 * 64 + 2 * 64
    weights = 3 * (layer + 2 * 16) + 9 * 2 * layer + 65 * 64 + 9 * 64 * 64
    assert model.position_bytes == 2 * 3 * 2 * 16 * 4
    assert model.frame_bytes(1, 3) == 4 * weights + 3 * model.position_bytes


def engine_of(model: SpeechModel) -> Engine:
    sizes = {"slots": 3, "max_positions": 1536, "max_frames": 64, "segment_letters": 200}
    return Engine(model, EngineConfig(**sizes))


def test_turns_continue_the_conversation_and_audio_is_each_decoded_afresh(tmp_path: Path) -> None:
    """A request of two segments is the two prompts of a conversation, and the audio of both from zero history."""
    tiny_fish.write_checkpoint(tmp_path, end_scale=1.5)
    model = registry.load(tmp_path, device="cpu").model
    first, second = (part.text for part in model.segments(TURNS, "auto"))
    engine = engine_of(model)
    engine.submit(SpeechRequest(id="a", text=TURNS, seed=5))
    events = drain(engine)
    whole = request(model, TURNS, sampling=SamplingParams(), seed=5, max_frames=64)
    said = spoken(model, whole, segment=first)
    answer = spoken(model, whole, segment=second, index=1, before=[(first, said)])
    assert 0 < len(said) < 64
    assert not torch.equal(answer, spoken(model, whole, segment=second, index=1))
    with torch.inference_mode():
        expected = torch.cat([model.codec.decode(frames[None])[0] for frames in (said, answer)])
    # A step of 16 bits: chunks round otherwise than the whole.
    np.testing.assert_allclose(audio(events, "a"), expected.numpy(), atol=1.51 / 32768)


def test_random_weights_speak_with_varied_codes(folder: Path) -> None:
    """64 frames hold at least 20 codes of each codebook; the folder needs config.json alone."""
    model = registry.load(folder, device="cpu", load_format="dummy").model
    whole = request(model, "Hello you", sampling=SamplingParams(), max_frames=64, ignore_eos=True)
    frames = spoken(model, whole)
    assert len(frames) == 64
    assert all(len(codes.unique()) >= 20 for codes in frames.T)


def test_random_weights_need_a_configuration_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    first, again = (registry.load(tmp_path, device="cpu", load_format="dummy").model for _ in range(2))
    whole = request(first, "Hello you", sampling=SamplingParams(), max_frames=5, ignore_eos=True)
    frames = spoken(first, whole)
    assert torch.equal(frames, spoken(again, whole))
    assert torch.equal(first.codec.decode(frames[None]), again.codec.decode(frames[None]))


def test_a_voice_is_saved_and_loaded_bit_by_bit(model: SpeechModel) -> None:
    voice = model.encode_voice([recording(0.6, "One."), recording(0.8, "Zwei ä.")])
    again = model.load_voice(model.save_voice(voice))
    assert again.data.transcripts == voice.data.transcripts
    assert torch.equal(again.data.frames, voice.data.frames)
    assert again.reference_frames is None


@pytest.mark.parametrize(
    ("tensors", "facts", "reason"),
    [
        ({}, {"transcripts": "[]"}, "is frames"),
        ({"frames": torch.zeros(3, 9, dtype=torch.int64)}, {"transcripts": "[]"}, r"frames \[R, 10\] int64"),
        ({"frames": torch.zeros(3, 10)}, {"transcripts": "[]"}, "int64"),
        ({"frames": torch.zeros(0, 10, dtype=torch.int64)}, {"transcripts": "[]"}, "codes from 0 to 63"),
        ({"frames": torch.full((3, 10), 64)}, {"transcripts": "[]"}, "codes from 0 to 63"),
        ({"frames": torch.zeros(3, 10, dtype=torch.int64)}, {}, "has transcripts"),
        ({"frames": torch.zeros(3, 10, dtype=torch.int64)}, {"transcripts": "{"}, "has transcripts"),
        ({"frames": torch.zeros(3, 10, dtype=torch.int64)}, {"transcripts": "3"}, "has transcripts"),
        ({"frames": torch.zeros(3, 10, dtype=torch.int64)}, {"transcripts": '"One."'}, "a list of strings"),
        ({"frames": torch.zeros(3, 10, dtype=torch.int64)}, {"transcripts": '{"One.": 1}'}, "a list of strings"),
        ({"frames": torch.zeros(3, 10, dtype=torch.int64)}, {"transcripts": "[1]"}, "a list of strings"),
    ],
)
def test_what_is_no_voice_of_this_model_is_refused(
    model: SpeechModel, tensors: dict[str, Tensor], facts: dict[str, str], reason: str
) -> None:
    with pytest.raises(TensorMismatch, match=reason):
        model.load_voice(SavedVoice(tensors, facts))


def test_the_fingerprint_tells_trainings_apart(model: SpeechModel, folder: Path, tmp_path: Path) -> None:
    assert registry.load(folder, device="cpu").model.fingerprint == model.fingerprint
    tiny_fish.write_checkpoint(tmp_path, seed=1)
    assert registry.load(tmp_path, device="cpu").model.fingerprint != model.fingerprint


def test_a_registered_voice_speaks_as_its_reference(model: SpeechModel) -> None:
    references = (recording(text="It's me."),)
    engine = engine_of(model)
    engine.submit(SpeechRequest(id="given", text="Like this.", references=references, seed=6, max_frames=12))
    me = {"voice": "me", "voice_digest": engine.encode_voice(references).result(timeout=60).digest}
    engine.submit(SpeechRequest(id="named", text="Like this.", seed=6, max_frames=12, **me))
    events = drain(engine)
    assert end(events, "named").frames == end(events, "given").frames
    np.testing.assert_allclose(audio(events, "named"), audio(events, "given"), atol=1.01 / 32768)


def test_live_text_is_spoken_sentence_by_sentence(model: SpeechModel) -> None:
    """As each sentence is complete, each as the next turn of the conversation."""
    engine = engine_of(model)
    engine.submit(SpeechRequest(id="a", text="", is_live=True, seed=2))
    events, text = [], "<|speaker:0|>Hello there, you. And so it goes on. <|speaker:1|>Is it?"
    for start in range(0, len(text), 7):
        engine.append("a", text[start : start + 7])
        events += engine.tick()
    engine.end_text("a")
    events += drain(engine)
    finished = end(events, "a")
    assert isinstance(finished, Finished), finished
    assert finished.frames * HOP == len(audio(events, "a"))


def test_characters_of_turns_are_counted(tmp_path: Path) -> None:
    tiny_fish.write_checkpoint(tmp_path, end_scale=1.5)
    engine = engine_of(registry.load(tmp_path, device="cpu").model)
    engine.submit(SpeechRequest(id="a", text=TURNS, seed=5))
    finished = end(drain(engine), "a")
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.characters) == ("stop", len(TURNS))
