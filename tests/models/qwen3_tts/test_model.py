"""The whole model behind its protocol: what each variant offers, and speech against the official implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import Case, begin, capacity
from tiny_checkpoint import TOPOLOGIES, VARIANTS, write_checkpoint
from tiny_talker import voice_of
from torch import Tensor

from sonoro.core.errors import InvalidReference, InvalidRequest, UnknownLanguage, UnknownVoice
from sonoro.core.options import OptionValue
from sonoro.core.types import Reference, SamplingParams, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import SpeechModel, Voice
from sonoro.models.qwen3_tts.config import RELEASED, Configs, read_configs, released_configs
from sonoro.models.qwen3_tts.model import spec_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], SpeechModel]:
    root, loaded = tmp_path_factory.mktemp("checkpoints"), {}
    for variant in VARIANTS:
        for topology in TOPOLOGIES:
            folder = root / f"{variant}-{topology}"
            write_checkpoint(folder, variant=variant, topology=topology)
            loaded[variant, topology] = registry.load(folder, device="cpu").model
    return loaded


GREEDY: dict[str, OptionValue] = {"subtalker_dosample": False}


def request(model: SpeechModel, text: str, **fields: object) -> SpeechRequest:
    """A greedy request with this model's defaults filled in."""
    whole = SpeechRequest(
        id="1", text=text, **{"sampling": SamplingParams(temperature=0), "options": GREEDY, "max_frames": 8} | fields
    )
    return model.spec.resolve(whole)


def spoken(model: SpeechModel, whole: SpeechRequest, voice: Voice | None = None) -> Tensor:
    """All frames [T, K] of a one-segment request, from a slot in the middle of the state."""
    assert whole.max_frames is not None
    with torch.inference_mode():
        prompt = model.prepare(whole, whole.text, 0, [], voice)
        state = model.allocate(capacity(4, prompt.positions + whole.max_frames, whole.max_frames, prompt.text_ids))
        slots = torch.tensor([2])
        begin(model, state, [prompt], slots)
        for _ in range(whole.max_frames):
            model.frame(state, slots)
        return state.frames[2, : int(state.length[2])].clone()


SILENCE_FREE = Reference(
    pcm=(0.1 * np.random.default_rng(0).standard_normal(24000)).astype("<f4").tobytes(),
    sample_rate=24000,
    use="reference",
)


def test_greedy_speech_is_the_official_one_in_every_variant(
    models: dict[tuple[str, str], SpeechModel], reference: Callable[[str], dict[str, Case]]
) -> None:
    """Codes are identical: the reference tool keeps only runs whose decisions are no near ties."""
    seen = set()
    for case in reference("greedy").values():
        facts = case.facts
        if facts["eos_row_scale"] != 1.0 or facts["batch"] != 1:
            continue
        model = models[facts["variant"], facts["topology"]]
        voice = voice_of(case)
        whole = request(
            model,
            facts["text"],
            voice=facts["speaker"],
            language=facts["language"],
            references=(SILENCE_FREE,) if voice else (),
            max_frames=facts["frames"],
            options=GREEDY | {"non_streaming_mode": facts["non_streaming"]},
        )
        # The door refuses instructions where the official wrapper drops them; below it they are obeyed.
        whole = SpeechRequest(
            **{name: getattr(whole, name) for name in whole.__struct_fields__} | {"instructions": facts["instruct"]}
        )
        assert torch.equal(spoken(model, whole, voice), torch.from_numpy(case.tensors["codes"])), case.name
        seen.add((facts["variant"], facts["non_streaming"]))
    assert seen == {(variant, non_streaming) for variant in VARIANTS for non_streaming in (False, True)}


def test_in_context_audio_is_the_official_one(
    models: dict[tuple[str, str], SpeechModel], reference: Callable[[str], dict[str, Case]]
) -> None:
    """From recording to sound. Float32 through a codec of random weights: 1e-4, as for the codec alone."""
    case = reference("clone")["in_context"]
    model = models[case.facts["variant"], case.facts["topology"]]
    recording = Reference(
        pcm=(case.tensors["ref_audio"].astype("<f4") / 32768).tobytes(), sample_rate=24000, text=case.facts["ref_text"]
    )
    voice = model.encode_voice([recording])
    whole = request(
        model,
        case.facts["text"],
        language=case.facts["language"],
        references=(recording,),
        max_frames=len(case.tensors["codes"]),
        options=GREEDY | {"non_streaming_mode": case.facts["non_streaming"]},
    )
    frames = spoken(model, whole, voice)
    assert torch.equal(frames, torch.from_numpy(case.tensors["codes"]))
    history, slots = model.codec.allocate(2), torch.tensor([1])
    with torch.inference_mode():
        model.codec.reset(history, slots)
        model.codec.prime(history, slots, voice)
        audio = [model.codec.decode(chunk[None], slots, history)[0] for chunk in frames.split([1, len(frames) - 1])]
    torch.testing.assert_close(torch.cat(audio), torch.from_numpy(case.tensors["waveform"]), atol=1e-4, rtol=0)


def test_the_segment_decides_what_is_drawn(models: dict[tuple[str, str], SpeechModel]) -> None:
    model = models["custom_voice", "1.7b"]
    whole = request(model, "You and I.", sampling=SamplingParams(), options={}, seed=3)
    prompts = [model.prepare(whole, whole.text, index, [], None) for index in (0, 0, 1)]
    with torch.inference_mode():
        state = model.allocate(capacity(3, 64, 8, 32))
        slots = torch.arange(3)
        begin(model, state, prompts, slots)
        for _ in range(8):
            model.frame(state, slots)
    first, same, other = state.frames[:3]
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_says_what_it_can_do(name: str) -> None:
    configs = released_configs(name)
    spec = spec_of(name, configs)
    assert (spec.sample_rate, spec.hop, spec.max_frames) == (24000, 1920, 8192)
    assert spec.sampling == SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)
    assert spec.languages[0] == "auto"
    assert len(spec.languages) == 11
    assert not any("dialect" in language for language in spec.languages)
    variant = name.rsplit("-", 1)[1]
    mode = {"base": "cloned", "customvoice": "named", "voicedesign": "described"}[variant]
    assert spec.voice_modes == (mode,)
    assert len(spec.voices) == (9 if mode == "named" else 0)
    assert spec.accepts_instructions == (name in ("qwen3-tts-1.7b-customvoice", "qwen3-tts-1.7b-voicedesign"))
    defaults = {option.name: option.default for option in spec.options}
    assert defaults == {
        "non_streaming_mode": mode != "cloned",
        "subtalker_dosample": True,
        "subtalker_temperature": 0.9,
        "subtalker_top_k": 50,
        "subtalker_top_p": 1.0,
    }


def test_a_checkpoint_that_does_not_sample_is_greedy_until_told_otherwise() -> None:
    configs = released_configs("qwen3-tts-0.6b-customvoice")
    greedy = Configs(configs.model, dataclasses.replace(configs.generation, do_sample=False), configs.codec)
    spec = spec_of("greedy", greedy)
    assert spec.sampling.temperature == 0.0
    resolved = spec.resolve(SpeechRequest(id="1", text="a", sampling=SamplingParams(temperature=0.5)))
    assert resolved.sampling.temperature == 0.5


def test_without_generation_config_the_official_defaults_hold(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    spec = spec_of("bare", read_configs(tmp_path))
    assert spec.max_frames == 2048
    assert spec.sampling == SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)


def test_what_a_variant_cannot_do_is_refused(models: dict[tuple[str, str], SpeechModel]) -> None:
    custom, design, base = (models[variant, "0.6b"] for variant in ("custom_voice", "voice_design", "base"))
    with pytest.raises(UnknownVoice, match="'nobody' is not allowed; known voices: serena, ryan, eric, dylan"):
        request(custom, "a", voice="nobody")
    with pytest.raises(UnknownLanguage, match="known languages: auto, chinese, english, german, french"):
        request(custom, "a", language="sichuan_dialect")
    with pytest.raises(InvalidRequest, match="instructions"):
        request(custom, "a", instructions="Whisper")
    with pytest.raises(InvalidRequest, match="subtalker_top_p: 2 is not allowed"):
        request(custom, "a", options={"subtalker_top_p": 2})
    with pytest.raises(UnknownVoice):
        request(design, "a", voice="ryan")
    with pytest.raises(InvalidReference, match="cannot clone"):
        design.encode_voice([SILENCE_FREE])
    with pytest.raises(InvalidReference, match="give one"):
        request(base, "a")


def test_segments_are_normalised_when_the_checkpoint_asks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = tmp_path / "config.json"
    plain = registry.load(tmp_path, device="cpu").model
    config.write_text(config.read_text().replace("{", '{"text_normalizer": "english", "max_segment_letters": 40,', 1))
    normalising = registry.load(tmp_path, device="cpu").model
    text = "I have 2 cats. They are both very old by now."
    assert [part.text for part in plain.segments(text, "english")] == [text]
    segments = [part.text for part in normalising.segments(text, "english")]
    assert len(segments) == 2
    assert "two" in segments[0]


def test_parts_are_the_pieces_of_a_frame(models: dict[tuple[str, str], SpeechModel]) -> None:
    model = models["base", "1.7b"]
    with torch.inference_mode():
        state, slots = model.allocate(capacity(3, 32, 8, 8)), torch.tensor([1, 0])
        parts = model.parts(state)
        backbone, depth, sample = (parts[name](slots) for name in ("backbone", "depth", "sample"))
    assert set(parts) == {"backbone", "depth", "sample"}
    books = state.frames.shape[2]
    assert backbone.shape[0] == 2
    assert [tuple(logits.shape) for logits in depth] == [(2, 64)] * (books - 1)
    assert [tuple(codes.shape) for codes in sample] == [(2,)] * books
    assert state.done.all()
    assert not state.length.any()
