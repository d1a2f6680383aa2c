"""The sine model's codec: frames of pitch and loudness to a sine whose phase each slot keeps."""

import torch

from sonoro.core.types import OptionSpec, SamplingParams
from sonoro.models.base import CodecChoice

LOUDNESS = OptionSpec(name="loudness", type="int", default=50, minimum=0, maximum=100)
SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0)


class SineCodec:
    sample_rate, hop = 8000, 80

    def move(self, device):
        assert device.type == "cpu"

    def settle(self, wanted, batch, chunks):
        return CodecChoice(wanted, torch.float64, "a sine is exact")

    def allocate(self, slots):
        return torch.zeros(slots + 1, dtype=torch.float64)

    def reset(self, history, slots):
        history[slots] = 0

    def prime(self, history, slots, voice):
        self.decode(voice.reference_frames.expand(len(slots), -1, -1), slots, history)

    def decode(self, frames, slots=None, history=None):
        pitch, loudness = frames.double().repeat_interleave(self.hop, 1).unbind(2)
        phase = (pitch + 10).mul(0.01).cumsum(1) + (0 if history is None else history[slots, None])
        if history is not None:
            history[slots] = phase[:, -1]
        return phase.sin() * loudness / 100
