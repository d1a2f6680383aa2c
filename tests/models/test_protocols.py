"""The protocols of a model: a small core, which is enough to speak, and optional ones that a model has or has not."""

import inspect

import pytest
from sine_engines import Engine, config_of, drain
from sine_models import SineModel, VoicedSineModel

from sonoro.core.types import SpeechRequest
from sonoro.models import registry
from sonoro.models.base import CloningModel, EmbeddingModel, LiveTextModel, ProfiledModel, SpeechModel
from sonoro.models.fish_s2.model import FishS2
from sonoro.models.qwen3_tts.model import Qwen3TTS
from sonoro.models.voxcpm2.model import VoxCPM2

OPTIONAL = (LiveTextModel, CloningModel, EmbeddingModel, ProfiledModel)


def members(protocol: type) -> set[str]:
    own = {name for name in vars(protocol) if not name.startswith("_")}
    return own | set(inspect.get_annotations(protocol))


def test_the_core_is_small_and_a_fake_of_70_lines_has_it() -> None:
    assert len(members(SpeechModel)) <= 13
    assert all(hasattr(SineModel(), name) for name in members(SpeechModel))
    assert len(inspect.getsource(SineModel).splitlines()) <= 70


def test_a_model_of_the_core_alone_speaks_whole_and_live_text() -> None:
    assert not any(isinstance(SineModel(), protocol) for protocol in OPTIONAL)
    engine = Engine(SineModel(), config_of())
    engine.submit(SpeechRequest(id="whole", text="Hello there."))
    engine.submit(SpeechRequest(id="live", text="Hello there.", is_live=True))
    engine.end_text("live")
    ends = [event for event in drain(engine) if hasattr(event, "reason")]
    assert {(end.request_id, end.reason, end.frames) for end in ends} == {("whole", "stop", 12), ("live", "stop", 12)}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Qwen3TTS, OPTIONAL),
        (FishS2, (CloningModel, ProfiledModel)),
        (VoxCPM2, (CloningModel, ProfiledModel)),
        (VoicedSineModel, (CloningModel, EmbeddingModel)),
    ],
)
def test_models_have_the_optional_protocols_they_can_serve(model: type, expected: tuple[type, ...]) -> None:
    assert tuple(protocol for protocol in OPTIONAL if issubclass(model, protocol)) == expected
    # A method is a method: what a class lacks, no instance has.
    assert all(callable(getattr(model, name)) for protocol in expected for name in members(protocol))


def test_the_built_in_voice_keeps_the_core() -> None:
    model = registry.load(device="cpu").model
    assert {name for name in members(SpeechModel) if not hasattr(model, name)} == set()
