"""Registered voices: ready to speak with before a tick is asked to."""

import pytest
import tiny_vox
import torch

from sonoro.core.config import EngineConfig
from sonoro.core.types import Reference, SpeechRequest
from sonoro.engine.request import Playback, Request
from sonoro.engine.voices import Voices
from sonoro.models import registry
from sonoro.models.base import SpeechModel
from sonoro.models.shared.streaming import PRIMED
from sonoro.runtime.threads import Inline


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_vox.write_checkpoint(folder)
    return registry.load(folder, device="cpu").model


def test_a_registered_voice_is_primed_where_it_is_loaded(model: SpeechModel) -> None:
    """Its file holds patches alone. A tick only copies what they leave in the codec."""
    samples = 0.1 * torch.randn(12000, generator=torch.Generator().manual_seed(0))
    recording = Reference(pcm=samples.numpy().astype("<f4").tobytes(), sample_rate=16000, text="One.")
    voices, other = (Voices(model, EngineConfig(slots=1), Inline(), torch.device("cpu"), ()) for _ in range(2))
    digest, data = voices.encode((recording,)).result()
    found = {}
    for name, fields in (("registered", {"voice": "me"}), ("given", {"references": (recording,)})):
        params = model.spec.resolve(SpeechRequest(id="1", text="Hello.", **fields), {"me": digest})
        request, asked = Request(params, [], None, Playback(0.0)), other if name == "registered" else voices
        asked.ask(request)
        other.load(digest, data)
        if request in asked.awaiting:
            asked.attach(request)
        assert request.voice is not None
        found[name] = request.voice.primed[PRIMED].tensors
    assert len(found["given"]) == len(model.codec.decoder.layout) + 1
    for registered, given in zip(found["registered"], found["given"], strict=True):
        assert torch.equal(registered, given)
    assert any(tensor.any() for tensor in found["given"])
