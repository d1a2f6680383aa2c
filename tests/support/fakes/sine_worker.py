"""Factories that engine processes are started with: the sine model, and ways for it to go wrong.

Each is called as `sonoro.models.registry.load` is; `model` says how.
"""

import os
import time
from functools import partial
from pathlib import Path

import torch
from fakes.live_sine import LiveSineModel
from fakes.prefixed_sine import PrefixedSineModel
from fakes.shown_sine import ShownSineModel
from fakes.voiced_sine import VoicedSineModel

from sonoro.core.errors import CheckpointNotFound
from sonoro.models.base import LoadedModel

HELD = "held until there is "
"""Begins the name of a model that is held; the rest is the path of a file."""


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
        "prefixed": PrefixedSineModel,
        "slow_live": SlowLiveModel,
        "clients": partial(SlowLiveModel, voices=("nora", "miles")),
    }
    if model and model.startswith(HELD):
        made = HeldModel(Path(model.removeprefix(HELD)))
    else:
        made = LiveSineModel(voices=()) if model == "cloning" else kinds.get(model, VoicedSineModel)()
    return LoadedModel(made, torch.device("cpu"), torch.float32, {})
