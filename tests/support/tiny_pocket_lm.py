"""The tiny Pocket TTS, loaded; prompts; and what the official package computed with the same weights."""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import tiny_pocket
import torch
from parity import Case, load

from sonoro.core.types import SamplingParams
from sonoro.models.pocket_tts.config import ModelConfig, read
from sonoro.models.pocket_tts.model import FAMILY, PocketTTS
from sonoro.models.pocket_tts.prompt import PocketPrompt, PromptBuilder, find_tokenizer
from sonoro.models.pocket_tts.voice import PocketVoice, read_voice
from sonoro.nn.stored import read_all
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.runtime.sampling import Controls

NEVER = 1e9
"""A threshold that no logit exceeds."""


def cases(group: str, root: Path) -> dict[str, Case]:
    """What the official package computed, as tools/reference/pocket_tts.py wrote it beside the folder `root`.

    texts: text, rules, prepared, guess (frames after the end, less 2), chunks, ids of each.
    runs: by variant: text, prepared, frames_spoken; latents [V, D'] of `tiny_pocket.sound`, its state file (| for /),
    ids, frames [60, D] normalised, logits [60], hidden [3, Z] of every twentieth, audio [S] of the first 6, not faded.
    """
    return load(group, root.parent / "pocket_tts")


def model_of(variant: str = "lsd", dtype: torch.dtype = torch.float32, **written: object) -> PocketTTS:
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False):
        tiny_pocket.write_checkpoint(Path(folder), variant, **written)
        model = FAMILY.from_folder(Path(folder), "tiny", torch.device("cpu"), dtype).model
        model._own_voice("alba")
        return model


@functools.cache
def _parts() -> tuple[ModelConfig, PromptBuilder, tuple[PocketVoice, ...]]:
    names = ("alba", "anna", "jean")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tiny_pocket.write_checkpoint(folder, voices=names)
        config = read(folder)
        given = SimpleNamespace(config=config, weight=torch.zeros(1))
        voices = tuple(read_voice(given, config.voices[name], read_all(config.voices[name])) for name in names)
        return config, PromptBuilder(config, TextTokenizer.from_file(find_tokenizer(config, folder))), voices


def controls(
    *,
    seed: int = 0,
    segment: int = 0,
    max_frames: int = 12,
    ignore_eos: bool = False,
    temperature: float = 0.3,
    threshold: float = NEVER,
    after: int = -1,
) -> Controls:
    options = {"eos_threshold": threshold, "frames_after_eos": after}
    sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, repetition_penalty=1.0)
    return Controls(sampling, seed, segment, max_frames, ignore_eos, options)


def random_prompt(key: int, wanted: Controls) -> PocketPrompt:
    """Some text in one of three voices; different for every `key`."""
    _, builder, voices = _parts()
    return builder.build(f"Number {key} is this.", wanted, voices[key % len(voices)])


def use_stored_noise(monkeypatch: object, variant: str) -> None:
    """Frames are made of the noise that the official run was given."""
    from sonoro.models.pocket_tts import frame  # noqa: PLC0415

    stored = torch.from_numpy(tiny_pocket.noise(variant)) * 0.3**0.5
    monkeypatch.setattr(frame, "_noise", lambda lm, controls, length: stored[length].to(lm.bos_emb.dtype))
