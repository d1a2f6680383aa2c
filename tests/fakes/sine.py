"""A speech model that speaks sine waves: one frame per character, its pitch from voice, seed, segment and position.

The codec keeps each slot's phase, so a chunk cut or joined wrongly is heard. "unspeakable" cannot be prepared,
"explosive" cannot be staged. A row that is stepped before all of its prompt was run, that is not where it was staged,
or whose pages belong to another, fails loudly. Knows only the protocols.
"""

from types import SimpleNamespace

import torch

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import ModelSpec, OptionSpec, SamplingParams
from sonoro.models.base import CodecChoice, Controls, SavedVoice, Voice


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


class SineModel:
    position_bytes, fingerprint = 64, "of a sine"

    def __init__(self, voices=("low", "high")):
        modes = ("named", "cloned") if voices else ("cloned",)
        sampling = SamplingParams(temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0)
        options = (OptionSpec(name="loudness", type="int", default=50, minimum=0, maximum=100),)
        self.spec = ModelSpec(name="sine", sample_rate=8000, hop=80, max_frames=2000, voice_modes=modes, voices=voices,
                              languages=("auto", "english"), sampling=sampling, options=options,
                              speaker_embedding_size=2)  # fmt: skip
        self.codec, self.encoded, self.checked = SineCodec(), 0, []

    def segments(self, text, language):
        return [text]

    def prepare(self, request, segment, index, before, voice):
        if "unspeakable" in segment:
            raise InvalidRequest("text", segment, "it must be speakable")
        limits = request.max_frames, request.ignore_eos, request.options
        controls = Controls(request.sampling, request.seed, index, *limits)
        pitch = (voice.data if voice else self.spec.voices.index(request.voice) * 20) + request.seed + index
        # What was said before is heard in the pitch, every code of it.
        pitch += sum(len(frames) + int(frames[:, 0].sum()) for _, frames in before)
        made = {"pitch": pitch, "loudness": request.options["loudness"], "text": segment}
        made |= {"positions": len(segment), "text_ids": len(segment), "prefix": None}
        return SimpleNamespace(controls=controls, voice=voice, **made)

    def live_text(self, request, voice):
        return None

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

    def allocate(self, capacity):
        """`missing` counts prompt rows not yet run, `owner` says whose a staged row is, `held` who was given pages."""
        length, target, limit, pitch, missing = torch.zeros(5, capacity.slots + 1).long()
        frames = torch.zeros(capacity.slots + 1, capacity.max_frames, 2).long()
        owner = torch.full((capacity.max_tokens + 1,), capacity.slots)
        rows = {"length": length, "target": target, "limit": limit, "pitch": pitch, "missing": missing}
        return SimpleNamespace(done=length == 0, frames=frames, owner=owner, held={}, capacity=capacity, **rows)

    def check_kernels(self, state, rows):
        assert state.done.all(), "kernels are checked before anybody speaks"
        self.checked.append(rows)

    def reset(self, state, slots):
        for slot in slots:
            state.done[slot], state.length[slot], state.frames[slot], state.missing[slot] = True, 0, 0, 0
            state.held.pop(slot, None)

    def stage(self, state, prompts, slots, pages):
        end, capacity, state.staged = 0, state.capacity, list(zip(prompts, slots, pages, strict=True))
        for prompt, slot, (given, cached) in state.staged:
            if "explosive" in prompt.text:
                raise RuntimeError("it exploded")
            assert len(set(given)) * capacity.page_positions >= prompt.positions + prompt.controls.max_frames
            assert set(given) <= set(range(capacity.pages)), "the last page is scratch"
            state.owner[end : end + prompt.positions - cached] = slot
            end += prompt.positions - cached
        assert end <= capacity.max_tokens, "more prompt rows than can be staged"
        return end

    def admit(self, state, slots):
        self.reset(state, slots[slots < state.capacity.slots].tolist())
        for place, (prompt, slot, (given, cached)) in zip(slots.tolist(), state.staged, strict=False):
            assert place == slot, "a slot was given what was staged for another"
            in_use = {page for other, held in state.held.items() if not state.done[other] for page in held}
            own = given[cached // state.capacity.page_positions :]
            assert not in_use & set(own), "a page was given to two rows"
            state.held[slot], state.missing[slot], state.done[slot] = list(given), prompt.positions - cached, False
            state.limit[slot], state.frames[slot, :, 1] = prompt.controls.max_frames, prompt.loudness
            state.target[slot] = state.limit[slot] + 1 if prompt.controls.ignore_eos else len(prompt.text)
            state.pitch[slot] = prompt.pitch

    def prefill(self, state, tokens):
        state.missing -= torch.bincount(state.owner[tokens], minlength=len(state.missing))
        state.missing[-1] = 0

    def frame(self, state, slots):
        assert not state.missing[slots].any(), "a row was stepped before its prompt was run"
        at = state.length[slots]
        keeps = ~state.done[slots] & (at < state.target[slots])
        state.frames[slots[keeps], at[keeps], 0] = (state.pitch[slots] + at * at)[keeps] % 50
        state.length[slots] = at + keeps
        state.done[slots] |= ~keeps | (at + keeps >= state.limit[slots])
