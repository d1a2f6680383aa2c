"""Compare a model with its official package, which runs in an interpreter of its own.

A model folder's `official.py` runs there: `PYTHON official.py FOLDER ASKED.json MADE.npz`. ASKED: `text`, `frames` (at
most), `voice`, `language`, `instructions`, `repetition_penalty`, `device` and, if frames are patches, their `noise`
[T, P, D]. MADE, greedy in float32: `options` (JSON) of the equivalent request, `positions` of the prompt, the first
`decision` [V] (logits, or hidden states), `frames` [T, ...] and their `audio` [S]."""

import inspect
import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from sonoro.core.errors import EngineError
from sonoro.core.types import SamplingParams, SpeechRequest
from sonoro.models.base import LoadedModel
from sonoro.models.shared.codec_choice import snr_db
from sonoro.ops.sample import normal_noise
from sonoro.profile.spoken import allocate, speak

_TIMEOUT_S = 3600.0
_SAME_PATCH_DB = 40.0
_LAST_CHARACTERS = 400


@dataclass(frozen=True)
class Comparison:
    """Ours against the official run: prompt lengths (ours, official), SNR of the first decision, number of leading
    equal frames (patches: SNR of 40 dB or more) of `frames`, and SNR of the audio of the official frames."""

    positions: tuple[int, int]
    decision_db: float
    equal_frames: int
    frames: int
    audio_db: float

    @property
    def is_same(self) -> bool:
        """Whether prompt lengths and all frames are equal."""
        return self.positions[0] == self.positions[1] and self.equal_frames == self.frames


def why_not(loaded: LoadedModel) -> str:
    """Why the model cannot be compared; empty if it can."""
    if not _script(loaded).is_file():
        return "there is no recipe for this family here; tools/reference has those of its tests"
    if loaded.model.spec.voice_modes == ("cloned",):
        return "it speaks as a recording alone; tools/reference has the recipes of cloning"
    return ""


def compare(loaded: LoadedModel, folder: Path, python: str, text: str, frames: int) -> Comparison:
    """Run `text` with `loaded`, in float32, and with the official package, and compare. Synchronises.
    Call it in inference mode, with the codec settled in float32. Raises `EngineError` with the end of the official
    package's stderr if it fails."""
    spec, is_patch = loaded.model.spec, allocate(loaded, 1).frames.is_floating_point()
    asked = SpeechRequest(
        id="official",
        text=text,
        voice=spec.voices[0] if spec.voices else None,
        language="english" if "english" in spec.languages else "auto",
        instructions="A calm voice." if "described" in spec.voice_modes and spec.accepts_instructions else None,
        # Patches are not sampled.
        sampling=SamplingParams() if is_patch else SamplingParams(temperature=0.0),
        max_frames=frames,
    )
    run = _official_run(loaded, folder, python, asked)
    request = spec.resolve(msgspec.structs.replace(asked, options=json.loads(str(run["options"]))))
    ours, theirs = speak(loaded, [request], frames), torch.from_numpy(run["frames"])
    pairs = zip(ours.frames[0], theirs, strict=False)
    equal = torch.tensor([snr_db(*pair) >= (_SAME_PATCH_DB if is_patch else torch.inf) for pair in pairs])
    decoded = loaded.model.codec.decode(theirs[None].to(loaded.device))[0].cpu()
    official = torch.from_numpy(run["audio"])
    shortest = min(len(decoded), len(official))
    decision, expected = ours.decisions[0][0], torch.from_numpy(run["decision"])
    return Comparison(
        positions=(ours.positions[0], int(run["positions"])),
        # Ours lacks, or masks, ids that can never be sampled.
        decision_db=snr_db(*_decidable(decision, expected)),
        equal_frames=int(equal.long().cumprod(0).sum()),
        frames=len(theirs),
        audio_db=snr_db(decoded[:shortest], official[:shortest]),
    )


def _decidable(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    theirs = theirs[: len(ours)]
    is_open = ours.isfinite() & theirs.isfinite()
    return ours[is_open], theirs[is_open]


def _official_run(loaded: LoadedModel, folder: Path, python: str, asked: SpeechRequest) -> dict[str, Any]:
    penalty, shape = loaded.model.spec.sampling.repetition_penalty, allocate(loaded, 1).frames.shape[2:]
    facts = {name: getattr(asked, name) for name in ("text", "voice", "language", "instructions")}
    facts |= {"frames": asked.max_frames, "repetition_penalty": penalty, "device": str(loaded.device)}
    if len(shape) > 1:
        index = torch.arange(facts["frames"])
        noise = normal_noise(torch.full_like(index, asked.seed), torch.zeros_like(index), index, shape.numel())
        facts["noise"] = noise.unflatten(1, shape).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        request, result = Path(scratch) / "asked.json", Path(scratch) / "made.npz"
        request.write_text(json.dumps(facts), encoding="utf-8")
        command = [python, "-P", str(_script(loaded)), str(folder), str(request), str(result)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{python} could not be run: {error}") from error
        if ended.returncode:
            raise EngineError(f"the official package failed: {ended.stderr.strip()[-_LAST_CHARACTERS:]}")
        with np.load(result) as made:
            return dict(made)


def _script(loaded: LoadedModel) -> Path:
    return Path(inspect.getfile(type(loaded.model))).with_name("official.py")
