"""VoxCPM2 behind the protocol and in the engine: what it can do, voices, options, segments, many requests."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny_vox
import torch
from parity import begin, capacity
from sine_engines import Engine, audio, drain, end, tuned
from tiny_vox import ENCODER_HOP, HOP
from torch import Tensor

from sonoro.core.errors import (
    ConfigError,
    InvalidReference,
    InvalidRequest,
    TensorMismatch,
    UnknownLanguage,
    UnknownVoice,
)
from sonoro.core.types import AudioChunk, Event, Finished, Reference, SamplingParams, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import SavedVoice, SpeechModel, Spoken, Voice
from sonoro.models.voxcpm2.backbone import VoxLM
from sonoro.models.voxcpm2.config import read
from sonoro.models.voxcpm2.frame import floor_bytes
from sonoro.models.voxcpm2.model import spec_of
from sonoro.models.voxcpm2.prompt import VoxVoice
from sonoro.nn.weights import empty

TEXT = "Hello you, this is the one."
LONG = "It is the first of them. This is another one! And is this the third?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-vox"
    tiny_vox.write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> SpeechModel:
    return registry.load(folder, device="cpu").model


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    """It never wants to end."""
    folder = tmp_path_factory.mktemp("endless")
    tiny_vox.write_checkpoint(folder, stop="never")
    return registry.load(folder, device="cpu").model


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    """It ends as early as it may."""
    folder = tmp_path_factory.mktemp("brief")
    tiny_vox.write_checkpoint(folder, stop="always")
    return registry.load(folder, device="cpu").model


def request(model: SpeechModel, text: str, **fields: object) -> SpeechRequest:
    """A request with this model's defaults filled in."""
    return model.spec.resolve(SpeechRequest(id="1", text=text, **{"max_frames": 8} | fields))


def spoken(model: SpeechModel, whole: SpeechRequest, voice: Voice | None = None, **given: object) -> Tensor:
    """All frames [T, P, D] of one segment, from a slot in the middle of the state."""
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


def recording(seconds: float = 0.6, text: str | None = "One.", **fields: object) -> Reference:
    samples = 0.1 * np.random.default_rng(int(seconds * 10)).standard_normal(int(seconds * 16000))
    return Reference(pcm=samples.astype("<f4").tobytes(), sample_rate=16000, text=text, **fields)


def sounded_like(seconds: float = 0.5) -> Reference:
    return recording(seconds, None, use="reference")


def test_the_released_model_says_what_it_can_do() -> None:
    spec = spec_of("voxcpm2", read("voxcpm2"))
    assert (spec.sample_rate, spec.hop, spec.max_frames, spec.frame_s) == (48000, 7680, 4096, 0.16)
    assert spec.voice_modes == ("named", "described", "cloned")
    assert (spec.voices, spec.languages) == (("default",), ("auto",))
    assert spec.accepts_instructions
    defaults = {option.name: option.default for option in spec.options}
    assert defaults == {"cfg_value": 2.0, "solver_steps": 10, "min_len": 2}
    bounds = {option.name: (option.minimum, option.maximum) for option in spec.options}
    assert bounds["cfg_value"] == (0.1, 10)
    assert bounds["solver_steps"] == (1, 10)
    assert spec.attempts == 3


def test_what_it_cannot_do_is_refused(model: SpeechModel) -> None:
    with pytest.raises(UnknownVoice, match="known voices: default"):
        request(model, "a", voice="nobody")
    with pytest.raises(UnknownLanguage):
        request(model, "a", language="english")
    for name, value in (("cfg_value", 0.05), ("cfg_value", 10.5), ("cfg_value", float("nan")), ("solver_steps", 0)):
        with pytest.raises(InvalidRequest, match=rf"{name}: .*it must be a"):
            request(model, "a", options={name: value})
    cooler = request(model, "a", sampling=SamplingParams(temperature=0.5))
    with pytest.raises(InvalidRequest, match=r"temperature: 0.5 .*it must be 1, or left out"):
        model.prepare(cooler, "a", 0, [], None)
    with pytest.raises(ConfigError, match="at most 4096") as refusal:
        model.allocate(capacity(1, 5000, 8, 1))
    assert refusal.value.field == "max_positions"


def test_a_voice_is_what_was_made_of_its_recordings(model: SpeechModel) -> None:
    """Silence fills what is continued up before it, what is sounded like after it."""
    prompt, reference = recording(0.501, "Once."), sounded_like(0.701)
    voice = model.encode_voice([reference, prompt])
    data = voice.data
    assert isinstance(data, VoxVoice)
    assert data.transcript == "Once."
    assert voice.reference_frames is data.prompt
    for given, made, padding in ((prompt, data.prompt, 1), (reference, data.reference, 0)):
        samples = given.samples.copy()
        missing = -len(samples) % ENCODER_HOP
        assert missing
        filled = np.pad(samples, (missing, 0) if padding else (0, missing))
        assert torch.equal(made, model.codec.encode(torch.from_numpy(filled)))
        assert made.shape[1:] == (tiny_vox.PATCH, tiny_vox.LATENTS)
        assert len(made) == len(filled) // ENCODER_HOP
    alone = model.encode_voice([reference])
    assert alone.reference_frames is None
    assert not len(alone.data.prompt)
    # Another rate is resampled first.
    other = Reference(pcm=prompt.pcm, sample_rate=8000, text="Once.")
    assert len(model.encode_voice([other]).data.prompt) == -(-2 * len(other.samples) // ENCODER_HOP)


def test_recordings_that_cannot_be_used_are_refused(model: SpeechModel) -> None:
    with pytest.raises(InvalidReference, match="one to continue and one to sound like"):
        model.encode_voice([recording(), recording(0.7)])
    with pytest.raises(InvalidReference, match=r"at least 0\.5 s"):
        model.encode_voice([sounded_like(0.4)])


def test_a_voice_is_saved_and_loaded_bit_by_bit(model: SpeechModel) -> None:
    for references in ([recording()], [sounded_like()], [recording(), sounded_like(0.7)]):
        voice = model.encode_voice(references)
        again = model.load_voice(model.save_voice(voice))
        assert again.data.transcript == voice.data.transcript
        assert torch.equal(again.data.prompt, voice.data.prompt)
        assert torch.equal(again.data.reference, voice.data.reference)
        assert (again.reference_frames is None) == (voice.reference_frames is None)


@pytest.mark.parametrize(
    ("tensors", "facts", "reason"),
    [
        ({}, {"transcript": ""}, "has prompt or reference patches"),
        ({"prompt": torch.zeros(2, 4, 8)}, {}, "and a transcript"),
        ({"prompt": torch.zeros(2, 4, 9)}, {"transcript": ""}, r"\[N, 4, 8\] float32: prompt"),
        ({"reference": torch.zeros(2, 4, 8, dtype=torch.float64)}, {"transcript": ""}, "float32: reference"),
        ({"reference": torch.full((2, 4, 8), torch.inf)}, {"transcript": ""}, "finite patches"),
        ({"frames": torch.zeros(2, 4, 8)}, {"transcript": ""}, "frames"),
        ({"prompt": torch.zeros(0, 4, 8)}, {"transcript": ""}, "prompt"),
    ],
)
def test_what_is_no_voice_of_this_model_is_refused(
    model: SpeechModel, tensors: dict[str, Tensor], facts: dict[str, str], reason: str
) -> None:
    with pytest.raises(TensorMismatch, match=reason):
        model.load_voice(SavedVoice(tensors, facts))


def test_options_voice_and_instructions_change_what_is_said(endless: SpeechModel) -> None:
    voice = endless.encode_voice([sounded_like()])
    said = {
        "plain": spoken(endless, request(endless, TEXT)),
        "again": spoken(endless, request(endless, TEXT)),
        "guided": spoken(endless, request(endless, TEXT, options={"cfg_value": 3.0})),
        "quick": spoken(endless, request(endless, TEXT, options={"solver_steps": 4})),
        "told": spoken(endless, request(endless, TEXT, instructions="slowly")),
        "seeded": spoken(endless, request(endless, TEXT, seed=1)),
        "cloned": spoken(endless, request(endless, TEXT), voice),
        "after": spoken(endless, request(endless, TEXT), before=[Spoken("You.", torch.zeros(3, 4, 8))]),
        "later": spoken(endless, request(endless, TEXT), index=1),
    }
    assert torch.equal(said["plain"], said.pop("again"))
    for name, patches in said.items():
        assert patches.shape == (8, 4, 8)
        assert patches.isfinite().all()
        assert name == "plain" or not torch.isclose(patches, said["plain"]).all(), name


def test_speech_is_as_short_as_it_may_be(brief: SpeechModel) -> None:
    for least in (0, 2, 5):
        whole = request(brief, TEXT, options={"min_len": least}, max_frames=30)
        assert len(spoken(brief, whole)) == least + 2


def test_parts_are_the_pieces_of_a_frame(model: SpeechModel) -> None:
    with torch.inference_mode():
        state, slots = model.allocate(capacity(3, 32, 8, 1)), torch.tensor([1, 0])
        found = {name: part(slots) for name, part in model.parts(state).items()}
    assert set(found) == {"backbone", "depth", "sample"}
    assert [tuple(hidden.shape) for hidden in found["backbone"]] == [(2, 48)] * 2
    assert tuple(found["depth"].shape) == (2, 4, 8)
    assert [tuple(made.shape) for made in found["sample"]] == [(2, 2), (2, 48)]
    assert state.done.all()


def test_the_floor_counts_every_call(model: SpeechModel) -> None:
    """In the released sizes 7.6 GB a frame in bfloat16; keys and values of both language models once a row."""
    lm = empty(VoxLM, read("voxcpm2")).to(torch.bfloat16)
    once = 1_321_322_496 + 377_522_176 + 207_711_232 + 20_986_368
    flow, of_patch = 212_040_768 - 4 * (1024 * 1024 + 1024), 64 * 1024 + 1024
    assert floor_bytes(lm) == 2 * (once + 9 * flow - 8 * of_patch)
    assert 7.5e9 < floor_bytes(lm) < 7.7e9
    assert model.position_bytes == 2 * (3 + 2) * 2 * 16 * 4
    assert model.frame_bytes(3, 10) - model.frame_bytes(1, 0) == 30 * model.position_bytes


def engine_of(model: SpeechModel, **changes: object) -> Engine:
    sizes = {"slots": 3, "max_positions": 512, "max_frames": 64, "segment_letters": 40} | changes
    return Engine(model, tuned(**sizes))


def requests_of_all_kinds() -> list[SpeechRequest]:
    return [
        SpeechRequest(id="plain", text=TEXT, seed=1, max_frames=20),
        SpeechRequest(id="quick", text="Not so long.", seed=2, max_frames=9, options={"solver_steps": 3}),
        SpeechRequest(id="told", text="It is.", instructions="A calm voice", seed=3, max_frames=12),
        SpeechRequest(id="continued", text="And like this.", references=(recording(),), seed=4, max_frames=15),
        SpeechRequest(id="like", text="Of you.", references=(sounded_like(),), seed=5, options={"cfg_value": 1.0}),
        SpeechRequest(
            id="both", text="你好，世界！", references=(recording(0.6), sounded_like()), seed=6, max_frames=14
        ),
        SpeechRequest(id="long", text="Goes on.", ignore_eos=True, seed=7, max_frames=40),
    ]


def test_a_text_that_does_not_end_is_cut_at_the_official_limit(endless: SpeechModel) -> None:
    """Six patches for each id and ten, whatever the request allows; as runaway speech, which nothing follows."""
    ids = len(endless.prepare(request(endless, "你"), "你", 0, [], None).rows) - 1
    assert ids == 1
    for allowed, expected in ((None, ("runaway", 16)), (60, ("runaway", 16)), (16, ("length", 16)), (7, ("length", 7))):
        engine = engine_of(endless)
        engine.submit(SpeechRequest(id="a", text="你", max_frames=allowed))
        finished = end(drain(engine), "a")
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.frames) == expected


def test_segments_continue_one_another(brief: SpeechModel) -> None:
    """Each is spoken after all before it: in the voice that the first one happened to have, and in one piece."""
    engine = engine_of(brief)
    engine.submit(SpeechRequest(id="a", text=LONG, seed=5))
    events = drain(engine)
    finished = end(events, "a")
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.frames, finished.characters) == ("stop", 12, len(LONG))
    first, second, third = "It is the first of them.", "This is another one!", "And is this the third?"
    whole = request(brief, LONG, seed=5, max_frames=32)
    said: list[Spoken] = []
    for index, text in enumerate((first, second, third)):
        said.append(Spoken(text, spoken(brief, whole, segment=text, index=index, before=said)))
    with torch.inference_mode():
        expected = brief.codec.decode(torch.cat([patches for _, patches in said])[None])[0]
    np.testing.assert_allclose(audio(events, "a"), expected.numpy(), atol=8 / 32768)


def test_a_registered_voice_speaks_as_its_recordings(model: SpeechModel) -> None:
    references = (recording(), sounded_like())
    engine = engine_of(model)
    engine.submit(SpeechRequest(id="given", text="Like this.", references=references, seed=6, max_frames=8))
    me = {"voice": "me", "voice_digest": engine.encode_voice(references).result(timeout=60).digest}
    engine.submit(SpeechRequest(id="named", text="Like this.", seed=6, max_frames=8, **me))
    events = drain(engine)
    assert end(events, "named").frames == end(events, "given").frames
    np.testing.assert_allclose(audio(events, "named"), audio(events, "given"), atol=8 / 32768)


def test_audio_goes_on_where_the_recording_ends(endless: SpeechModel) -> None:
    """As if the recording had been decoded with it, and cut off."""
    engine = engine_of(endless, chunk_frames=(1, 3))
    voice = endless.encode_voice([recording(0.7)])
    engine.submit(SpeechRequest(id="a", text=TEXT, references=(recording(0.7),), seed=3, max_frames=9))
    events = drain(engine)
    patches = spoken(endless, request(endless, TEXT, seed=3, max_frames=9), voice)
    with torch.inference_mode():
        whole = endless.codec.decode(torch.cat((voice.data.prompt, patches))[None])[0]
        afresh = endless.codec.decode(patches[None])[0]
    np.testing.assert_allclose(audio(events, "a"), whole[-9 * HOP :].numpy(), atol=8 / 32768)
    assert (whole[-9 * HOP :] - afresh).abs().max() > 100 / 32768


def test_live_text_is_spoken_sentence_by_sentence(brief: SpeechModel) -> None:
    engine = engine_of(brief)
    engine.submit(SpeechRequest(id="a", text="", is_live=True, seed=2))
    events: list[Event] = []
    for start in range(0, len(LONG), 7):
        engine.append("a", LONG[start : start + 7])
        events += engine.tick()
    engine.end_text("a")
    events += drain(engine)
    finished = end(events, "a")
    assert isinstance(finished, Finished), finished
    assert (finished.reason, finished.frames) == ("stop", 12)
    assert finished.frames * HOP == len(audio(events, "a"))


def assert_complete(events: Sequence[Event], request_id: str) -> None:
    finished = end(events, request_id)
    assert isinstance(finished, Finished), finished
    samples = audio(events, request_id)
    assert len(samples) == finished.frames * HOP > 0
    assert np.isfinite(samples).all()
    assert samples.std() > 0.001


def test_five_hundred_requests_that_arrive_at_random_end_complete(model: SpeechModel) -> None:
    """Prompts of all modes join while up to 32 others speak; none is lost, none left behind, some are cancelled."""
    draw, kinds = random.Random(4), requests_of_all_kinds()
    engine = engine_of(model, slots=32, max_queued=40)
    events: dict[str, list[Event]] = {}
    cancelled, number, is_full = set(), 0, False
    while number < 500 or engine.has_work:
        while number < 500 and draw.random() < 0.9 and engine.waiting < 20:
            kind, name = draw.choice(kinds), str(number)
            options, frames = {"solver_steps": draw.randint(2, 10)}, draw.randint(1, 12)
            engine.submit(msgspec.structs.replace(kind, id=name, seed=number, max_frames=frames, options=options))
            events[name], number = [], number + 1
        running = [name for name, mine in events.items() if not mine or isinstance(mine[-1], AudioChunk)]
        if running and draw.random() < 0.3:
            name = draw.choice(running)
            engine.cancel(name)
            cancelled.add(name)
        for event in engine.tick():
            events[event.request_id].append(event)
        is_full |= engine.waiting > 0
    assert drain(engine) == []
    assert is_full
    assert len(events) == 500
    for name in events.keys() - cancelled:
        assert_complete(events[name], name)
    assert all(end(events[name], name).reason in ("cancelled", "length", "stop", "runaway") for name in cancelled)
    assert 5 < len(cancelled) < 200


def test_random_weights_speak_with_varied_patches(folder: Path, tmp_path: Path) -> None:
    """They need a configuration alone."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    first, again = (registry.load(tmp_path, device="cpu", load_format="dummy").model for _ in range(2))
    whole = request(first, "Hello you", max_frames=24, ignore_eos=True)
    patches = spoken(first, whole)
    assert torch.equal(patches, spoken(again, whole))
    assert 0.3 < patches.std() < 3
    assert patches.flatten(1).std(dim=0).min() > 0.1
    assert torch.equal(first.codec.decode(patches[None]), again.codec.decode(patches[None]))


def test_the_fingerprint_tells_trainings_apart(model: SpeechModel, folder: Path, tmp_path: Path) -> None:
    assert registry.load(folder, device="cpu").model.fingerprint == model.fingerprint
    tiny_vox.write_checkpoint(tmp_path, seed=1)
    assert registry.load(tmp_path, device="cpu").model.fingerprint != model.fingerprint
