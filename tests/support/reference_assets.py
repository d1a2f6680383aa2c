"""What the official implementation computed on the tiny checkpoints, as stored by tools/reference/qwen3_tts.py.

    for case in load("greedy"):
        write_checkpoint(folder, variant=case.facts["variant"], topology=case.facts["topology"])
        case.tensors["codes"]  # [T, K] int64

Every case but those of `tokens` names its checkpoint by `variant` and `topology` (seed 0; `snake_std` where given, else
the writer's default). Floats are float32, codes int64, audio that goes in int16 (see `audio_of`).

tokens: text; ids, instruct_ids, ref_ids of the three templates around it. No tensors.
prompts: R; ids, instruct_ids, ref_ids. prompt [P, H], trail [n, H]; Base: x_vector [H]; in context: ref_codes [R, K].
greedy: as prompts (no trail if batch > 1); batch, eos_row_scale, frames. codes [T, K]; logits [n, V] of the steps
    `logit_steps`, before any processor.
sampling: frames, settings. codes [T, K], logits [T, V] and depth_logits [T, K - 1, C] before any processor,
    probabilities and depth_probabilities of the same shapes: what was drawn from, after all of them.
clone: R; ids, ... ref_audio [S] int16, ref_codes [R, K], x_vector [H], codes [T, K], waveform [T * 1920].
codec: snake_std, batch. codes [T, K], waveform [T * 1920]. In the case float64 the official module was cast to it:
    `waveform` still holds the float32 rounding of its RMS norms and rotary tables, and so depends on the machine in the
    7th digit; `waveform_wide` [T * 1920] has both computed in float64 too. Compare exact structure with the latter.
encoder: snake_std. audio [S] int16, codes [T, K].
speaker: audio [S] int16, mel [frames, 128], embedding [H].

R is the request: mode (custom_voice, voice_design, x_vector, in_context), text, language, speaker, instruct, ref_text,
non_streaming. Cases of one group with `batch` 2 were computed in one call. `eos_row_scale` multiplies the row of
the end-of-speech id in `talker.codec_head.weight`. The official code drops the last sampled token when it hits
the limit, so a run of M tokens has M - 1 frames; one that ended by itself has all its frames.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tiny_checkpoint import digest, state_dicts

ROOT = Path(__file__).parents[1] / "assets" / "qwen3_tts"


@dataclass(frozen=True)
class Case:
    """One stored computation."""

    name: str
    facts: dict[str, Any]
    tensors: dict[str, NDArray[Any]]


def load(group: str, root: Path | None = None) -> dict[str, Case]:
    """The cases of `group` by name, in the order they were made, from `root` (default: the assets in the tree)."""
    root = root or ROOT
    path = root / f"{group}.safetensors"
    stored = load_file(path) if path.exists() else {}
    tensors: dict[str, dict[str, NDArray[Any]]] = {}
    for key, tensor in stored.items():
        name, leaf = key.split("/")
        tensors.setdefault(name, {})[leaf] = tensor
    cases = _document(root)["groups"][group]
    return {facts["name"]: Case(facts["name"], facts, tensors.get(facts["name"], {})) for facts in cases}


def audio_of(case: Case, name: str = "audio") -> NDArray[np.float32]:
    """A stored int16 recording as the official code got it, [S] float32 at 24 kHz."""
    return case.tensors[name].astype(np.float32) / np.float32(32768)


def drifted_weights(root: Path | None = None) -> list[str]:
    """The checkpoints whose weights, drawn here, are not those the official code ran with: numpy's generator has
    drifted, or the checkpoint writer was changed without a rerun of the tool. No other comparison means much then."""
    drifted = []
    for label, (main_digest, codec_digest) in _document(root or ROOT)["digests"].items():
        variant, topology, snake_std = label.split("/")
        main, codec = state_dicts(variant, topology, snake_std=float(snake_std))
        if (digest(main), digest(codec)) != (main_digest, codec_digest):
            drifted.append(label)
    return drifted


def _document(root: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((root / "scenarios.json").read_text(encoding="utf-8"))
    return document
