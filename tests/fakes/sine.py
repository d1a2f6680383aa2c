"""A speech model of sine waves, a frame per character: the core protocol and nothing else. "unspeakable" cannot be
prepared, "explosive" cannot be staged; a slot that is not where it was staged, or not prefilled, fails loudly."""

from types import SimpleNamespace

import torch

from fakes.sine_codec import LOUDNESS, SAMPLING, SineCodec
from sonoro.core.errors import InvalidRequest
from sonoro.core.types import ModelSpec
from sonoro.models.base import Controls


class SineModel:
    position_bytes, fingerprint = 64, "of a sine"

    def __init__(self, voices=("low", "high"), modes=("named",)):
        self.spec = ModelSpec(name="sine", sample_rate=8000, hop=80, max_frames=2000, voice_modes=modes, voices=voices,
                              languages=("auto", "english"), sampling=SAMPLING, options=(LOUDNESS,))  # fmt: skip
        self.codec = SineCodec()

    def segments(self, text, language):
        return [text]

    def prepare(self, request, segment, index, before, voice):
        if "unspeakable" in segment:
            raise InvalidRequest("text", segment, "it must be speakable")
        controls = Controls.of(request, index)
        pitch = (voice.data if voice else self.spec.voices.index(request.voice) * 20) + request.seed + index
        pitch += sum(len(frames) + int(frames[:, 0].sum()) for _, frames in before)
        made = {"pitch": pitch, "text": segment, "positions": len(segment), "text_ids": len(segment), "prefix": None}
        return SimpleNamespace(controls=controls, voice=voice, loudness=request.options["loudness"], **made)

    def allocate(self, capacity):
        frames = torch.zeros(capacity.slots + 1, capacity.max_frames, 2).long()
        state = SimpleNamespace(capacity=capacity, frames=frames)
        state.page_table = torch.full((len(frames), capacity.pages_per_slot), capacity.pages, dtype=torch.int32)
        (state.length, state.target, state.limit, state.pitch, state.not_run, state.begins) = torch.zeros(
            6, len(frames)
        ).long()
        state.done, state.slot_of = state.length == 0, torch.full((capacity.max_tokens + 1,), capacity.slots)
        return state

    def check_kernels(self, state, batch):
        assert state.done.all(), "kernels are checked before anybody speaks"

    def reset(self, state, slots):
        for slot in slots:
            state.done[slot], state.length[slot], state.frames[slot], state.not_run[slot] = True, 0, 0, 0
            state.page_table[slot] = state.capacity.pages

    def stage(self, state, prompts, slots, pages):
        end, capacity, state.staged = 0, state.capacity, list(zip(prompts, slots, pages, strict=True))
        for prompt, slot, (given, cached) in state.staged:
            if "explosive" in prompt.text:
                raise RuntimeError("it exploded")
            assert len(set(given)) * capacity.page_positions >= prompt.positions
            assert set(given) <= set(range(capacity.pages)), "the last page is scratch"
            start, end = end, end + prompt.positions - cached
            assert end <= capacity.max_tokens, "more tokens than can be staged"
            state.slot_of[start:end] = slot
        return end

    def admit(self, state, slots):
        self.reset(state, slots[slots < state.capacity.slots].tolist())
        for asked, (prompt, slot, (given, cached)) in zip(slots.tolist(), state.staged, strict=False):
            assert asked == slot, "a slot was given what was staged for another"
            own = torch.tensor(given[cached // state.capacity.page_positions :])
            assert not torch.isin(state.page_table[~state.done], own).any(), "two slots have the same page"
            state.page_table[slot, : len(given)] = torch.tensor(given)
            state.begins[slot], state.not_run[slot], state.done[slot] = (
                prompt.positions,
                prompt.positions - cached,
                False,
            )
            state.limit[slot], state.frames[slot, :, 1] = prompt.controls.max_frames, prompt.loudness
            state.target[slot] = state.limit[slot] + 1 if prompt.controls.ignore_eos else len(prompt.text)
            state.pitch[slot] = prompt.pitch

    def prefill(self, state, tokens):
        state.not_run[:-1] -= torch.bincount(state.slot_of[tokens], minlength=len(state.not_run))[:-1]

    def frame(self, state, slots):
        assert not state.not_run[slots].any(), "a slot was stepped before its prompt was run"
        at = state.length[slots]
        runs = ~state.done[slots]
        page = (state.begins[slots] - 1 + at) // state.capacity.page_positions
        own = state.page_table[slots[runs], page[runs]]
        assert (own < state.capacity.pages).all(), "a slot was stepped beyond its pages"
        held = torch.bincount(state.page_table[~state.done].flatten(), minlength=state.capacity.pages)
        assert (held[own] == 1).all(), "two slots have the same page"
        keeps = ~state.done[slots] & (at < state.target[slots])
        state.frames[slots[keeps], at[keeps], 0] = (state.pitch[slots] + at * at)[keeps] % 50
        state.length[slots] = at + keeps
        state.done[slots] |= ~keeps | (at + keeps >= state.limit[slots])
