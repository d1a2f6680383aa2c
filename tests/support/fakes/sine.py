"""A speech model of sine waves, a frame per character: the core protocol and nothing else. "unspeakable" cannot be
prepared, "explosive" cannot be staged; a slot that is not where it was staged, or not prefilled, fails loudly."""

from types import SimpleNamespace

import torch
from fakes.sine_codec import LOUDNESS, SAMPLING, SineCodec
from fakes.sine_pages import SinePages

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import ModelSpec
from sonoro.runtime.sampling import Controls
from sonoro.text.splitting import SpokenText


class SineModel:
    position_bytes, fingerprint = 64, "of a sine"

    def __init__(self, voices=("low", "high"), modes=("named",)):
        self.spec = ModelSpec(name="sine", sample_rate=8000, hop=80, max_frames=2000, voice_modes=modes, voices=voices,
                              languages=("auto", "english"), sampling=SAMPLING, options=(LOUDNESS,))  # fmt: skip
        self.codec = SineCodec()

    def segments(self, text, language):
        return [SpokenText(text)]

    def prepare(self, request, segment, index, before, voice):
        if "unspeakable" in segment:
            raise InvalidRequest("text", segment, "it must be speakable")
        controls = Controls.of(request, index)
        pitch = (voice.data if voice else self.spec.voices.index(request.voice) * 20) + request.seed + index
        pitch += sum(len(frames) + int(frames[:, 0].sum()) for _, frames in before)
        made = {"pitch": pitch, "text": segment, "positions": len(segment), "text_ids": len(segment), "prefix": None}
        return SimpleNamespace(controls=controls, voice=voice, loudness=request.options["loudness"], **made)

    def allocate(self, capacity):
        pages, frames = SinePages(capacity), torch.zeros(capacity.slots + 1, capacity.max_frames, 2).long()
        state = SimpleNamespace(capacity=capacity, frames=frames, done=pages.done, pages=pages, page_table=pages.table)
        state.length, state.target, state.limit, state.pitch, state.not_run = torch.zeros(5, len(frames)).long()
        state.slot_of = torch.full((capacity.max_tokens + 1,), capacity.slots)
        return state

    def check_kernels(self, state, batch):
        assert state.done.all(), "kernels are checked before anybody speaks"

    def reset(self, state, slots):
        state.done[slots], state.length[slots], state.frames[slots], state.not_run[slots] = True, 0, 0, 0

    def stage(self, state, prompts, slots, pages):
        end, capacity, state.staged = 0, state.capacity, list(zip(prompts, slots, pages, strict=True))
        for prompt, slot, (given, cached) in state.staged:
            if "explosive" in prompt.text:
                raise RuntimeError("it exploded")
            state.pages.check(given, prompt.positions)
            start, end = end, end + prompt.positions - cached
            assert end <= capacity.max_tokens, "more tokens than can be staged"
            state.slot_of[start:end] = slot
        return end

    def admit(self, state, slots):
        self.reset(state, slots[slots < state.capacity.slots].tolist())
        for asked, (prompt, slot, (given, cached)) in zip(slots.tolist(), state.staged, strict=False):
            assert asked == slot, "a slot was given what was staged for another"
            state.pages.hold(slot, given, prompt.positions, cached)
            state.not_run[slot], state.done[slot] = prompt.positions - cached, False
            state.limit[slot], state.frames[slot, :, 1] = prompt.controls.max_frames, prompt.loudness
            state.target[slot] = state.limit[slot] + 1 if prompt.controls.ignore_eos else len(prompt.text)
            state.pitch[slot] = prompt.pitch

    def prefill(self, state, tokens):
        state.not_run[:-1] -= torch.bincount(state.slot_of[tokens], minlength=len(state.not_run))[:-1]

    def frame(self, state, slots):
        slots, done, length, frames = (rows.numpy() for rows in (slots, state.done, state.length, state.frames))
        target, limit, pitch = (rows.numpy()[slots] for rows in (state.target, state.limit, state.pitch))
        assert not state.not_run.numpy()[slots].any(), "a slot was stepped before its prompt was run"
        at, speaks = length[slots], ~done[slots]
        state.pages.step(slots[speaks], at[speaks])
        keeps = speaks & (at < target)
        frames[slots[keeps], at[keeps], 0] = (pitch + at * at)[keeps] % 50
        length[slots], done[slots] = at + keeps, done[slots] | ~keeps | (at + keeps >= limit)
