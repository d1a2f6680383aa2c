"""Speech models of sine waves: the core protocol, and what a model may add to it or do wrong.

`load` is the factory that engine processes are started with.
"""

import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from sonoro.core.errors import CheckpointNotFound, InvalidRequest
from sonoro.core.options import OptionSpec, VoiceDescription
from sonoro.core.types import ModelSpec, SamplingParams
from sonoro.models.base import CodecChoice, LoadedModel, SavedVoice, Voice
from sonoro.runtime.sampling import Controls
from sonoro.text.splitting import SpokenText
from sonoro.words.heads import WordHeads
from sonoro.words.tracking import Limits, Pointing

STRENGTH = OptionSpec(name="strength", type="int", default=50, minimum=0, maximum=100)
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
        pitch, strength = frames.double().repeat_interleave(self.hop, 1).unbind(2)
        phase = (pitch + 10).mul(0.01).cumsum(1) + (0 if history is None else history[slots, None])
        if history is not None:
            history[slots] = phase[:, -1]
        return phase.sin() * strength / 100


class SinePages:
    """`table` [slots + 1, pages a slot] int32, which the engine writes too; whether slots are `done` [slots + 1]."""

    def __init__(self, capacity):
        self._capacity, self.done = capacity, torch.ones(capacity.slots + 1).bool()
        self.table = torch.full((capacity.slots + 1, capacity.pages_per_slot), capacity.pages, dtype=torch.int32)
        self._begins = torch.zeros(capacity.slots + 1).long()

    def check(self, given, positions):
        assert len(set(given)) * self._capacity.page_positions >= positions
        assert set(given) <= set(range(self._capacity.pages)), "the last page is scratch"

    def hold(self, slot, given, positions, cached):
        """`slot` is given pages for a prompt of `positions`, of which the first `cached` are shared."""
        own = torch.tensor(given[cached // self._capacity.page_positions :])
        assert not torch.isin(self.table[~self.done], own).any(), "two slots have the same page"
        self.table[slot], self._begins[slot] = self._capacity.pages, positions
        self.table[slot, : len(given)] = torch.tensor(given)

    def step(self, slots, at):
        """`slots` that are not done make their frames number `at`: arrays both."""
        table, page = self.table.numpy(), (self._begins.numpy()[slots] - 1 + at) // self._capacity.page_positions
        own = table[slots, page]
        assert (own < self._capacity.pages).all(), "a slot was stepped beyond its pages"
        held = np.bincount(table[~self.done.numpy()].ravel(), minlength=self._capacity.pages)
        assert (held[own] == 1).all(), "two slots have the same page"


class SineModel:
    position_bytes, fingerprint = 64, "of a sine"

    def __init__(self, voices=("low", "high"), modes=("named",)):
        self.spec = ModelSpec(name="sine", sample_rate=8000, hop=80, max_frames=2000, voice_modes=modes, voices=voices,
                              languages=("auto", "english"), sampling=SAMPLING, options=(STRENGTH,))  # fmt: skip
        self.codec = SineCodec()

    def segments(self, text, language, text_format="auto", voice=None):
        return [SpokenText(text)]

    def prepare(self, request, segment, index, before, voice):
        if "unspeakable" in segment:
            raise InvalidRequest("text", segment, "it must be speakable")
        controls = Controls.of(request, index)
        pitch = (voice.data if voice else self.spec.voices.index(request.voice) * 20) + request.seed + index
        pitch += sum(len(frames) + int(frames[:, 0].sum()) for _, frames in before)
        made = {"pitch": pitch, "text": segment, "positions": len(segment), "text_ids": len(segment), "prefix": None}
        return SimpleNamespace(controls=controls, voice=voice, strength=request.options["strength"], **made)

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
            state.limit[slot], state.frames[slot, :, 1] = prompt.controls.max_frames, prompt.strength
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


END = 0
ENDLESS = 1_000_000


class SineText:
    max_letters = ENDLESS

    def __init__(self):
        self.text, self.given = "", 0

    def letters(self, text):
        return len(text)

    def feed(self, text, held=1):
        self.text += text
        spoken = self.text.strip()
        ready = spoken[self.given : max(len(spoken) - held, self.given)]
        self.given += len(ready)
        return [ord(character) for character in ready]

    @property
    def spoken(self):
        return SpokenText(self.text).stripped()

    def finish(self):
        last = self.feed("", held=0)
        return [*last, END] if self.given else []


class LiveSineModel(VoicedSineModel):
    def live_text(self, request, voice):
        return None if voice is not None and voice.reference_frames is not None else SineText()

    def prepare_live(self, request, ids, index, voice):
        prompt = self.prepare(request, "".join(map(chr, ids)), index, [], voice)
        return SimpleNamespace(**vars(prompt) | {"positions": 1, "text_ids": len(ids) - 1, "ids": list(ids)})

    def allocate(self, capacity):
        state = super().allocate(capacity)
        state.texts = {}
        return state

    def admit(self, state, slots):
        super().admit(state, slots)
        for prompt, slot, _ in state.staged:
            state.texts[slot] = getattr(prompt, "ids", None)
            self._hear(state, slot)

    def append_text(self, state, slots, starts, ids):
        for slot, start, new in zip(slots, starts, ids, strict=True):
            if ord("☠") in new:
                raise RuntimeError("it exploded late")
            assert start == len(state.texts[slot]) - 1, "ids were lost, or came twice"
            state.texts[slot] += new
            self._hear(state, slot)

    def frame(self, state, slots):
        for slot, at in zip(slots.tolist(), state.length[slots].tolist(), strict=True):
            ids = None if state.done[slot] else state.texts[slot]
            assert ids is None or ids[-1] == END or at < len(ids), "a row was stepped before its text had come"
        super().frame(state, slots)

    def _hear(self, state, slot):
        ids = state.texts[slot]
        if ids is not None and state.target[slot] != state.limit[slot] + 1:
            state.target[slot] = len(ids) - 1 if ids[-1] == END else ENDLESS


class MeasuredSineModel(LiveSineModel):
    """One voice is 3 LU too loud, the other 6."""

    def __init__(self):
        super().__init__()
        loudness = {"low": VoiceDescription(loudness_lufs=-15.0), "high": VoiceDescription(loudness_lufs=-12.0)}
        self.spec = msgspec.structs.replace(self.spec, voice_descriptions=loudness)


class PrefixedSineModel(SineModel):
    def prepare(self, request, segment, index, before, voice):
        prompt = super().prepare(request, segment, index, before, voice)
        prompt.prefix = np.array([ord(character) for character in segment.rpartition("|")[0]], np.int64)
        return prompt

    def allocate(self, capacity):
        state = super().allocate(capacity)
        state.written = {}
        return state

    def admit(self, state, slots):
        super().admit(state, slots)
        size = state.capacity.page_positions
        for prompt, _, (given, cached) in state.staged:
            for at, page in enumerate(given):
                text = prompt.text[at * size :][:size]
                if at * size < cached:
                    assert state.written.get(page) == text, (
                        f"page {page} holds {state.written.get(page)!r}, not {text!r}"
                    )
                else:
                    state.written[page] = text


class ShownSineModel(SineModel):
    attention_heads, text_layouts = (1, 1), {"text_first": {}}

    def __init__(self, voices=("low", "high")):
        super().__init__(voices)
        self.word_heads = WordHeads(text_first=Pointing(layer=0, head=0, is_measured=True))

    def pointing(self, request, voice):
        return self.word_heads.text_first

    def text_start(self, prompt):
        return 0

    def token_spans(self, text):
        return [*((at, at + 1) for at in range(len(text))), (len(text), len(text))]

    def watching(self, state):
        return state

    def attention(self, state):
        return state.attention

    def allocate(self, capacity):
        state = super().allocate(capacity)
        state.attention = torch.zeros(capacity.slots + 1, 1, capacity.max_positions)
        return state

    def frame(self, state, slots):
        time.sleep(0.002)
        state.attention[slots] = 0
        state.attention[slots, 0, state.length[slots]] = 1
        super().frame(state, slots)


class ErringModel(ShownSineModel):
    """Goes wrong in the way of `fault`, from frame 8 on or at the end; with the seeds `runs` it does not end."""

    def __init__(self, fault, runs=()):
        super().__init__()
        self.fault, self.runs = fault, runs
        limits = Limits(end_frames=5.0, dwell_frames=4.0 if fault == "dwelling" else 1e9, strayed=2.0)
        self.word_heads = WordHeads(text_first=Pointing(layer=0, head=0, is_measured=True, limits=limits))

    def allocate(self, capacity):
        state = super().allocate(capacity)
        state.errs = state.length.bool()
        return state

    def admit(self, state, slots):
        super().admit(state, slots)
        for slot, (prompt, *_) in zip(slots.tolist(), state.staged, strict=False):
            state.errs[slot] = prompt.controls.seed < 10
            if prompt.controls.seed in self.runs:
                state.errs[slot], state.target[slot] = False, state.limit[slot] + 1
            elif state.errs[slot]:
                state.target[slot] = {"unreached": 8, "ending": len(prompt.text) + 40}.get(self.fault, len(prompt.text))

    def frame(self, state, slots):
        super().frame(state, slots)
        for slot in slots[state.errs[slots]].tolist():
            # The frame that was made is the one before the length.
            at = int(state.length[slot]) - 1
            looked = {
                "dwelling": min(at, 8),
                "ending": min(at, int(state.target[slot]) - 40),
                "straying": at if at < 8 else 0,
            }
            state.attention[slot] = 0
            state.attention[slot, 0, looked.get(self.fault, at)] = 1


HELD = "held until there is "
"""Begins the name of a model that is held; the rest is the path of a file."""

STOPPED = "stopped until there is "
"""The same for one that is held with its first frame output, and does nothing more."""


class SlowModel(VoicedSineModel):
    """Takes 5 ms for a frame, so that there is time to disturb it. A text that says "die" kills the process."""

    def prepare(self, request, segment, index, before, voice):
        if "die" in segment:
            print("it was asked to die", flush=True)
            os._exit(7)
        return super().prepare(request, segment, index, before, voice)

    def frame(self, state, slots):
        time.sleep(0.005)
        super().frame(state, slots)


class HeldModel(VoicedSineModel):
    """Takes a quarter of a second for every frame after a request's fiftieth, until a file is there."""

    def __init__(self, file):
        super().__init__()
        self._file = file

    def frame(self, state, slots):
        if state.length[slots].max() >= 50 and not self._file.exists():
            time.sleep(0.25)
        super().frame(state, slots)


class StoppedModel(HeldModel):
    """Outputs no second frame until a file is there."""

    def frame(self, state, slots):
        while state.length[slots].max() >= 1 and not self._file.exists():
            time.sleep(0.01)
        super().frame(state, slots)


class SlowVoices(SlowModel):
    """Takes half a second to encode a reference; one whose transcript says "die" kills the process."""

    def encode_voice(self, references):
        if references[0].text == "die":
            os._exit(7)
        time.sleep(0.5)
        return super().encode_voice(references)


class SlowLiveModel(LiveSineModel):
    """Takes its text while it speaks, and 5 ms for a frame."""

    def frame(self, state, slots):
        time.sleep(0.005)
        super().frame(state, slots)


class BreakingModel(VoicedSineModel):
    """After its first frame the results of a tick cannot be copied, as when a device is lost."""

    def frame(self, state, slots):
        super().frame(state, slots)
        state.length = state.length.to("meta")


def load(model, *, device, dtype, load_format):
    if model == "missing":
        raise CheckpointNotFound("there is no folder 'missing'")
    if model == "dying":
        os.write(2, b"first line\nthis is why it died\n")
        os._exit(3)
    if model == "lasting":
        time.sleep(60)
    kinds = {
        "slow": SlowModel,
        "shown": ShownSineModel,
        "slow voices": SlowVoices,
        "breaking": BreakingModel,
        "live": LiveSineModel,
        "measured": MeasuredSineModel,
        "prefixed": PrefixedSineModel,
        "slow_live": SlowLiveModel,
        "clients": partial(SlowLiveModel, voices=("nora", "miles")),
    }
    if model and model.startswith(HELD):
        made = HeldModel(Path(model.removeprefix(HELD)))
    elif model and model.startswith(STOPPED):
        made = StoppedModel(Path(model.removeprefix(STOPPED)))
    else:
        made = LiveSineModel(voices=()) if model == "cloning" else kinds.get(model, VoicedSineModel)()
    return LoadedModel(made, torch.device("cpu"), torch.float32, {})
