"""What can be set of the model: the official bounds of solver steps, its priming, its attempts."""

from pathlib import Path

import pytest
import tiny_vox
import torch
from families import noise
from sine_engines import Engine, drain, end

from sonoro.api import TTS, speech_request
from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, InvalidRequest
from sonoro.core.types import Finished, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import LoadedModel, Prompt, SpeechModel
from sonoro.models.settings import configure
from sonoro.nn.flow import calls

SIZES = {"slots": 2, "max_positions": 512, "max_frames": 64, "segment_letters": 40}


def loaded(folder: Path, stop: str = "always") -> LoadedModel:
    tiny_vox.write_checkpoint(folder, stop=stop)
    return registry.load(folder, device="cpu")


@pytest.fixture
def model(tmp_path: Path) -> SpeechModel:
    return loaded(tmp_path).model


def noting(model: SpeechModel) -> list[int]:
    """The seeds that `model` is asked to prepare with from now on."""
    seeds, prepare = [], model.prepare

    def prepare_and_note(request: SpeechRequest, *rest: object) -> Prompt:
        seeds.append(request.seed)
        return prepare(request, *rest)

    model.prepare = prepare_and_note
    return seeds


def patches(model: SpeechModel, **settings: object) -> torch.Tensor:
    """What `model` says in three frames of so many steps."""
    flow = model._modules.lm.feat_decoder
    generator = torch.Generator().manual_seed(0)
    width = flow.estimator.in_proj.weight.shape[0]
    mu, (cond, start) = torch.randn(3, 2, width, generator=generator), torch.randn(2, 3, 4, 8, generator=generator)
    steps = torch.tensor(settings["steps"])
    with torch.inference_mode():
        return flow.sample(mu, cond, start, torch.full((3,), 2.0), steps)


def test_as_many_steps_as_the_official_package_takes(model: SpeechModel) -> None:
    before = patches(model, steps=[2, 7, 10])
    with pytest.raises(InvalidRequest, match=r"solver_steps: 60 .*<= 10"):
        model.spec.resolve(SpeechRequest(id="a", text="a", options={"solver_steps": 60}))
    configure(model, {"most_solver_steps": 100})
    request = model.spec.resolve(SpeechRequest(id="a", text="a", options={"solver_steps": 100}))
    assert request.options["solver_steps"] == 100
    flow = model._modules.lm.feat_decoder
    assert flow.calls == calls(100) == 96
    # Calls beyond those of a row go nowhere, however many there are; 1e-5 is some tens of roundings of numbers near 1.
    torch.testing.assert_close(patches(model, steps=[2, 7, 10]), before, atol=1e-5, rtol=0)
    many = patches(model, steps=[100, 49, 74])
    assert many.isfinite().all()
    assert not torch.isclose(many[0], before[0]).all()
    for setting in (9, 101):
        with pytest.raises(ConfigError, match=r"model_settings\.most_solver_steps: .*>= 10 and <= 100"):
            configure(model, {"most_solver_steps": setting})


def test_a_single_step_is_the_noise(model: SpeechModel) -> None:
    generator = torch.Generator().manual_seed(0)
    width = model._modules.lm.feat_decoder.estimator.in_proj.weight.shape[0]
    torch.randn(3, 2, width, generator=generator)
    start = torch.randn(2, 3, 4, 8, generator=generator)[1]
    torch.testing.assert_close(patches(model, steps=[1, 1, 1]), start, atol=0, rtol=0)


@pytest.mark.parametrize(("priming", "kept"), [("whole", None), ("last", 3), ("none", 0)])
def test_the_codec_is_primed_as_it_is_set(model: SpeechModel, priming: str, kept: int | None) -> None:
    recording = noise(16000, 0.9, text="One.")
    whole = model.encode_voice([recording])
    assert len(whole.data.prompt) > 3
    configure(model, {"codec_priming": priming})
    voice = model.encode_voice([recording])
    assert torch.equal(voice.data.prompt, whole.data.prompt)
    expected = whole.data.prompt if kept is None else whole.data.prompt[len(whole.data.prompt) - kept :]
    for made in (voice, model.load_voice(model.save_voice(voice))):
        if kept == 0:
            assert made.reference_frames is None
        else:
            assert torch.equal(made.reference_frames, expected)


def test_voices_of_another_priming_are_not_taken(tmp_path: Path) -> None:
    """A saved voice holds what it primed the codec with."""
    first, second = loaded(tmp_path).model, loaded(tmp_path).model
    configure(second, {"codec_priming": "last"})
    assert first.fingerprint != second.fingerprint


def test_audio_that_is_returned_whole_is_tried_as_often_as_officially(tmp_path: Path) -> None:
    """Three times, the seed one higher each time, for a text that never ends; streamed audio once."""
    never = loaded(tmp_path, "never")
    speaker, seeds = TTS(never, config=SIZES), noting(never.model)
    assert speaker.generate("你", seed=5).finish_reason == "runaway"
    assert seeds == [5, 6, 7]
    seeds.clear()
    assert speaker.generate("你", seed=5, attempts=1).finish_reason == "runaway"
    assert seeds == [5]
    seeds.clear()
    for _ in speaker.stream("你", seed=5):
        pass
    assert seeds == [5]


def test_speech_of_six_patches_an_id_is_spoken_again_though_it_ended(model: SpeechModel) -> None:
    """The official package takes that for a bad case, whose limit is ten patches further."""
    for least, expected in ((2, [3]), (6, [3, 4, 5])):
        engine, seeds = Engine(model, EngineConfig(**SIZES)), noting(model)
        engine.submit(SpeechRequest(id="a", text="你", seed=3, attempts=3, options={"min_len": least}))
        finished = end(drain(engine), "a")
        assert isinstance(finished, Finished)
        assert finished.reason == "stop"
        assert seeds == expected


def test_request_defaults_are_left_to_the_model() -> None:
    assert speech_request("a").attempts is None
