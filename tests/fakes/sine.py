"""A speech model that speaks sine waves: one frame per character, its pitch from voice, seed, segment and position.

The codec keeps each slot's phase, so a chunk cut or joined wrongly is heard. "unspeakable" cannot be prepared,
"explosive" cannot be prefilled. Knows only the protocols.
"""

from types import SimpleNamespace

import torch

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import ModelSpec, OptionSpec, SamplingParams
from sonoro.models.base import Controls, Voice


class SineCodec:
    sample_rate, hop = 8000, 80

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


class SineModel:
    def __init__(self, voices=("low", "high")):
        modes = ("named", "cloned") if voices else ("cloned",)
        sampling = SamplingParams(temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0)
        options = (OptionSpec(name="loudness", type="int", default=50, minimum=0, maximum=100),)
        self.spec = ModelSpec(name="sine", sample_rate=8000, hop=80, max_frames=2000, voice_modes=modes, voices=voices,
                              languages=("auto", "english"), sampling=sampling, options=options)  # fmt: skip
        self.codec, self.encoded = SineCodec(), 0

    def segments(self, text, language):
        return [text]

    def prepare(self, request, segment, index, before, voice):
        if "unspeakable" in segment:
            raise InvalidRequest("text", segment, "it must be speakable")
        limits = request.max_frames, request.ignore_eos, request.options
        controls = Controls(request.sampling, request.seed, index, *limits)
        pitch = (voice.data if voice else self.spec.voices.index(request.voice) * 20) + request.seed + index
        made = {"pitch": pitch + sum(map(len, before)), "loudness": request.options["loudness"], "text": segment}
        return SimpleNamespace(controls=controls, voice=voice, positions=len(segment), text_ids=len(segment), **made)

    def encode_voice(self, references):
        self.encoded += 1
        return Voice(5, torch.tensor([[[7, 50]]]).repeat(1, 9, 1)[0] if references[0].use == "prompt" else None)

    def allocate(self, capacity):
        length, target, limit, pitch = torch.zeros(4, capacity.slots + 1).long()
        done = length > 0
        frames = torch.zeros(capacity.slots + 1, capacity.max_frames, 2).long()
        return SimpleNamespace(done=done, length=length, target=target, limit=limit, pitch=pitch, frames=frames)

    def prefill(self, state, prompts, slots):
        for prompt, slot in zip(prompts, slots.tolist(), strict=True):
            if "explosive" in prompt.text:
                raise RuntimeError("it exploded")
            state.done[slot], state.length[slot], state.pitch[slot] = False, 0, prompt.pitch
            state.limit[slot], state.frames[slot, :, 1] = prompt.controls.max_frames, prompt.loudness
            state.target[slot] = state.limit[slot] + 1 if prompt.controls.ignore_eos else len(prompt.text)

    def frame(self, state, slots):
        at = state.length[slots]
        keeps = ~state.done[slots] & (at < state.target[slots])
        state.frames[slots[keeps], at[keeps], 0] = (state.pitch[slots] + at * at)[keeps] % 50
        state.length[slots] = at + keeps
        state.done[slots] |= ~keeps | (at + keeps >= state.limit[slots])
