"""The tiny VoxCPM2, loaded without a checkpoint folder: the model, prompts and the codec."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import tiny_vox
import torch
from parity import Case, begin, load
from tiny_vox import TINY_CODEC, write_codec
from torch import Tensor

from sonoro.core.types import SamplingParams
from sonoro.models.base import Spoken, Voice
from sonoro.models.shared.prompts import RowPrompt
from sonoro.models.voxcpm2 import codec_weights, weights
from sonoro.models.voxcpm2.backbone import VoxLM
from sonoro.models.voxcpm2.codec import CodecConfig
from sonoro.models.voxcpm2.config import ModelConfig
from sonoro.models.voxcpm2.prompt import PromptBuilder, VoxVoice
from sonoro.models.voxcpm2.state import FrameState, admit, prefill, stage
from sonoro.nn.configs import build
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.runtime.sampling import Controls

NEVER = 10_000


def cases(group: str, root: Path) -> dict[str, Case]:
    """What the official code computed, as tools/reference/voxcpm2.py wrote it beside the folder `root`.

    prompts: text, transcript, limit, earlier; prompt, reference and earlier_{i} patches [N, P, D] where there are any,
    ids, text_mask, audio_mask [S] of the rows they make.
    modules: parts: patches [7, P, D], encoded [7, local width]; hidden [9, H], and of it quantised, stop [9, 2], base
    and residual (whole sequences). call: mu [3, 2 W], cond, noise, velocity [3, P, D], time [3]. sampler_{n}_{cfg}:
    made.
    times: {dtype}_{n}: times, sizes [n - 1], tokens [n - 1, W].
    runs: prompt (a case of `prompts`), seed, steps, cfg; hidden, residual [T, H], stop [T, 2], patches [T, P, D].
    ends: stop (of the weights), prompt, seed, steps, cfg, min_len, frames; stop [T, 2].
    """
    return load(group, root.parent / "voxcpm2")


def tiny_config() -> ModelConfig:
    return build(ModelConfig, tiny_vox.config(), "tiny")


def tiny_lm(dtype: torch.dtype = torch.float32, stop: str = "random") -> VoxLM:
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False):
        tiny_vox.write_checkpoint(folder, stop=stop)
        return weights.FILES.load(Path(folder), tiny_config(), device=torch.device("cpu"), dtype=dtype).lm


@functools.cache
def builder() -> PromptBuilder:
    with tempfile.TemporaryDirectory() as folder:
        tiny_vox.write_checkpoint(folder)
        return PromptBuilder(tiny_config(), TextTokenizer.from_folder(Path(folder)))


def controls(
    *,
    seed: int = 0,
    segment: int = 0,
    max_frames: int = 12,
    ignore_eos: bool = False,
    cfg: float = 2.0,
    steps: int = 10,
    min_len: int = 2,
) -> Controls:
    options = {"cfg_value": cfg, "solver_steps": steps, "min_len": min_len}
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0)
    return Controls(sampling, seed, segment, max_frames, ignore_eos, options)


def voice_of(case: Case) -> Voice | None:
    """The voice of a stored prompt, if it has recordings."""
    nothing = torch.zeros(0, tiny_vox.PATCH, tiny_vox.LATENTS)
    found = {name: torch.from_numpy(case.tensors[name]) for name in ("prompt", "reference") if name in case.tensors}
    if not found:
        return None
    return Voice(VoxVoice(case.facts["transcript"], found.get("prompt", nothing), found.get("reference", nothing)))


def prompt_of(case: Case, wanted: Controls) -> RowPrompt:
    """A stored prompt, as it is built here."""
    earlier = [
        Spoken(text, torch.from_numpy(case.tensors[f"earlier_{index}"]))
        for index, text in enumerate(case.facts["earlier"])
    ]
    return builder().build(case.facts["text"], wanted, earlier, voice_of(case))


def random_prompt(key: int, wanted: Controls) -> RowPrompt:
    """Some text in one of the modes; different for every `key`."""
    nothing = torch.zeros(0, tiny_vox.PATCH, tiny_vox.LATENTS)
    prompt, reference = (
        torch.from_numpy(tiny_vox.recording(key + part, 1 + key % 5)) if key & part else nothing for part in (1, 2)
    )
    voice = Voice(VoxVoice("Once." if key & 1 else "", prompt, reference)) if key & 3 else None
    return builder().build(f"Number {key} is this.", wanted, (), voice)


def begin_rows(lm: VoxLM, state: FrameState, prompts: Sequence[RowPrompt], slots: Tensor) -> None:
    """Bring rows `slots` to the first frame of `prompts`."""
    begin(SimpleNamespace(stage=stage, admit=admit, prefill=functools.partial(prefill, lm)), state, prompts, slots)


CPU = torch.device("cpu")
CONFIG = msgspec.convert(TINY_CODEC, CodecConfig)
TILED = TINY_CODEC | {"latent_dim": 16, "decoder_dim": 128}
"""Sizes that the kernels take."""


def make_codec(config=TINY_CODEC, dtype=torch.float64, snake_std=0.3):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / codec_weights.CODEC_FILE
        write_codec(file, config=config, snake_std=snake_std)
        codec = codec_weights.FILE.load(file, msgspec.convert(config, CodecConfig), device=CPU, dtype=torch.float32)
    codec = codec.to(dtype)
    codec.finalize()
    return codec
