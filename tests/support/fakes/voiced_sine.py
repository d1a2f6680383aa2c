"""The sine model, speaking as recordings and embeddings too: a voice is a pitch, and the frames that go before."""

import msgspec
import torch
from fakes.sine import SineModel

from sonoro.models.base import SavedVoice, Voice


class VoicedSineModel(SineModel):
    def __init__(self, voices=("low", "high")):
        super().__init__(voices, ("named", "cloned") if voices else ("cloned",))
        self.spec, self.encoded = msgspec.structs.replace(self.spec, speaker_embedding_size=2), 0

    def encode_voice(self, references):
        self.encoded += 1
        return Voice(5, torch.tensor([[[7, 50]]]).repeat(1, 9, 1)[0] if references[0].use == "prompt" else None)

    def voice_of(self, embedding):
        return Voice(int(sum(embedding)))

    def save_voice(self, voice):
        frames = {} if voice.reference_frames is None else {"frames": voice.reference_frames}
        return SavedVoice(frames, {"pitch": str(voice.data)})

    def load_voice(self, saved):
        return Voice(int(saved.facts["pitch"]), saved.tensors.get("frames"))
