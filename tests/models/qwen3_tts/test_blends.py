"""A blend of speakers is the weighted sum of their rows, where one speaker has its row."""

import numpy as np
import pytest
import torch
from families import FAMILIES
from sine_engines import Clock, Engine, audio, drain, tuned

from sonoro.core.errors import UnknownVoice
from sonoro.core.types import SpeechRequest
from sonoro.models.registry import describe
from sonoro.text.script import scripted


def test_blends_speak_between_their_voices() -> None:
    model = FAMILIES["talker"].load(torch.float64).model
    first, second = model.spec.voices[:2]
    engine = Engine(model, tuned(slots=2, max_positions=1024, max_frames=64), Clock(), ticks_late=1)

    def spoken(voice: str, text: str = "Hello you.", **fields: str) -> np.ndarray:
        engine.submit(scripted(SpeechRequest(id="a", text=text, voice=voice, **fields), model.spec))
        return audio(drain(engine), "a")

    alone, other, half = spoken(first), spoken(second), spoken(f"{first}+{second}")
    assert np.array_equal(spoken(f"{first}(2)"), alone)
    assert np.array_equal(spoken(f"{second}+{first}"), half)
    assert not np.array_equal(half, alone)
    assert not np.array_equal(half, other)
    assert np.array_equal(spoken(first, f"[voice:{first}+{second}]Hello you.", markup="voices"), half)
    # Nearly all of one voice: its row, but for rounding, at the place of the x-vector.
    near = spoken(f"{first}(1)+{second}(.000001)")
    np.testing.assert_allclose(near[:200], alone[:200], atol=2e-3)


def test_unknown_voices_and_other_families_are_refused() -> None:
    spec = FAMILIES["talker"].load().model.spec
    for voice in (f"{spec.voices[0]}+nobody", f"{spec.voices[0]}-{spec.voices[1]}"):
        with pytest.raises(UnknownVoice, match="known voices"):
            spec.resolve(SpeechRequest(id="a", text="Hi.", voice=voice))
    built_in = describe(None).spec
    with pytest.raises(UnknownVoice, match="nora"):
        built_in.resolve(SpeechRequest(id="a", text="Hi.", voice="nora+hugh"))
    other = FAMILIES["latents"].load().model.spec
    with pytest.raises(UnknownVoice):
        other.resolve(SpeechRequest(id="a", text="Hi.", voice=f"{other.voices[0]}+{other.voices[-1]}"))
