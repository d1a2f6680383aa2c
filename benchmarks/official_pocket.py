"""The official side of beside_pocket.py, for an interpreter that has `pocket-tts` and need not have sonoro."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

TEXT = "The quick brown fox jumps over the lazy dog, hello world."
FRAMES, VOICE_S, RATE = 60, 10, 24000


class Asked(NamedTuple):
    """A side's arguments: a checkpoint, named as its release, the format of its weights, and the device."""

    folder: Path
    quantization: str
    device: str


def official(asked: Asked) -> Callable[[], Iterator[Any]]:
    """The official package: a call speaks the text, and yields the audio of each chunk. Exports the voice, if there is
    none."""
    package, states = map(importlib.import_module, ("pocket_tts.models.tts_model", "pocket_tts.models.model_state"))
    folder = asked.folder
    values = yaml.safe_load((package.CONFIGS_DIR / f"{folder.name}.yaml").read_text(encoding="utf-8"))
    table = values["flow_lm"]["lookup_table"]
    table["tokenizer_path"] = str(folder / ("tokenizer." + ("json" if table["tokenizer"] == "tokenizers" else "model")))
    values["weights_path"] = str(folder / "model.safetensors")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as written:
        yaml.safe_dump(values, written)
        written.flush()
        model = package.TTSModel.load_model(
            config=written.name, quantize=asked.quantization == "int8", eos_threshold=1e9
        )
    model._estimate_max_gen_len = lambda tokens: FRAMES
    file = folder / "embeddings" / "alba.safetensors"
    if not file.exists():
        recording = 0.1 * torch.randn(1, VOICE_S * RATE, generator=torch.Generator().manual_seed(1))
        file.parent.mkdir()
        states.export_model_state(model.get_state_for_audio_prompt(recording), file)
    model = model.to(asked.device)
    state = model.get_state_for_audio_prompt(file)
    return lambda: (chunk.cpu() for chunk in model.generate_audio_stream(state, TEXT))


def serve(speak: Callable[[], Iterator[Any]], device: str) -> None:
    """Speak whenever a line comes, and tell the times."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        began_s, began_wall_s, first_s, first_wall_s, samples = clock(), time.perf_counter(), 0.0, 0.0, 0
        for chunk in speak():
            first_s, first_wall_s = first_s or clock() - began_s, first_wall_s or time.perf_counter() - began_wall_s
            samples += chunk.numel()
        taken = {"first_ms": 1000 * first_s, "first_wall_ms": 1000 * first_wall_s, "samples": samples}
        taken["frame_ms"] = 1000 * (clock() - began_s) / FRAMES
        taken["frame_wall_ms"] = 1000 * (time.perf_counter() - began_wall_s) / FRAMES
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    serve(official(Asked(Path(sys.argv[1]), *sys.argv[2:])), sys.argv[3])
