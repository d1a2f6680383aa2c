"""Pocket TTS beside the official package on one CPU core, or one GPU, with equal random weights at full size, in turns.

    python benchmarks/beside_pocket.py --reference PYTHON --out benchmarks/results/beside-pocket-epyc.json
    python benchmarks/beside_pocket.py --reference PYTHON --device cuda --arms english_2026-10:none \\
        english_2026-09_24l:none --out benchmarks/results/beside-pocket-h200.json

PYTHON is an interpreter with `pocket-tts` and torch. Both read one checkpoint in the released layout and a voice that
the package has exported, and speak one text for a fixed number of frames, by turns on the same core. Time is CPU time
of all threads (on a GPU, wall time): a shared machine changes every other. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from official_pocket import FRAMES, TEXT, VOICE_S, Asked, serve  # type: ignore[import-not-found]
from sonoro.bench.machine import commit_of_checkout, processor
from sonoro.core.config import EngineConfig
from sonoro.core.types import AudioChunk, Failed, Finished, SpeechRequest
from sonoro.engine.engine import Engine
from sonoro.models import registry
from sonoro.models.pocket_tts.config import read
from sonoro.models.pocket_tts.weights import FILES
from sonoro.models.shared.model_files import MODEL_FILES

ARMS = ("english_2026-10:none", "english_2026-10:int8", "english_2m_2026-10:none")
"""Releases of six layers, or 2m, and the format of their weights. Those of 24 layers are named `..._24l`."""


def write_checkpoint(folder: Path, release: str) -> None:
    """Random weights of `release` in the released layout, bfloat16, with a small tokeniser."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    tiny = importlib.import_module("tiny_pocket")
    shapes, generator = FILES.stored_shapes(read(f"pocket-{release}"))[MODEL_FILES], torch.Generator().manual_seed(0)
    spell = FILES.spelling(shapes)
    tensors = {}
    for ours, shape in shapes.items():
        name = ours if ours.startswith("mimi.") else spell(ours)
        drawn = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            drawn *= 0.5 if "embed.weight" in name else 0.3 / math.prod(shape[1:]) ** 0.5
        elif name.endswith((".weight", "emb_std", "alpha")):
            drawn = 1 + 0.1 * drawn
        else:
            drawn *= 0.1
        tensors[name] = drawn.to(torch.bfloat16)
    # sentencepiece insists on all ids.
    pieces = tiny.pieces()
    tiny.pieces = lambda: pieces + [(f"▁unused{index}", -99.0 - index, 1) for index in range(len(pieces), 4000)]
    folder.mkdir(parents=True)
    save_file(tensors, folder / MODEL_FILES)
    tiny.write_tokenizer(folder)


def speaker(asked: Asked) -> Callable[[], Iterator[Any]]:
    """This package, by its engine: a call speaks the text, and yields the audio of each chunk."""
    loaded = registry.load(asked.folder, device=asked.device, quantization=asked.quantization)
    if asked.device == "cpu":
        torch.set_num_threads(1)
    engine = Engine(loaded.model, EngineConfig(slots=1, is_ready_early=False))

    def speak() -> Iterator[Any]:
        request = SpeechRequest(id="1", text=TEXT, ignore_eos=True, max_frames=FRAMES)
        engine.submit(engine.spec.resolve(request))
        is_done = False
        while not is_done:
            for event in engine.tick():
                if isinstance(event, AudioChunk):
                    yield torch.frombuffer(bytearray(event.pcm), dtype=torch.int16)
                elif isinstance(event, Failed):
                    raise RuntimeError(str(event.facts.error))
                is_done = is_done or isinstance(event, Finished)

    return speak


class Side:
    """A process of one side."""

    def __init__(self, command: list[str], asked: Asked) -> None:
        self._process = subprocess.Popen(
            [*command, *map(str, asked)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}")
        return json.loads(line)

    def speak(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        taken: dict[str, float] = self.read()
        return taken

    def close(self) -> None:
        self._process.communicate()


def compare(arguments: argparse.Namespace, folder: Path, quantization: str) -> dict[str, Any]:
    """Medians of both sides, by turns after a first reading each, and their ratios."""
    asked, here = Asked(folder, quantization, arguments.device), Path(__file__)
    commands = {
        "official": [arguments.reference, str(here.with_name("official_pocket.py"))],
        "ours": [sys.executable, str(here), "--side"],
    }
    sides = {}
    for name, command in commands.items():
        sides[name] = Side(command, asked)
        # The official side writes the voice first.
        assert sides[name].read() == "ready"
        sides[name].speak()
    readings: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(arguments.repeats):
        for name, side in sides.items():
            readings[name].append(side.speak())
    row: dict[str, Any] = {"release": folder.name, "quantization": quantization}
    for name, taken in readings.items():
        sides[name].close()
        row[name] = {key: round(statistics.median(one[key] for one in taken), 2) for key in taken[0]}
    row["frame_speedup"] = round(row["official"]["frame_ms"] / row["ours"]["frame_ms"], 3)
    row["first_ratio"] = round(row["ours"]["first_ms"] / row["official"]["first_ms"], 3)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", default=sys.executable)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", nargs="*", default=ARMS, help="RELEASE:QUANTIZATION each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        asked = Asked(Path(arguments.side[0]), *arguments.side[1:])
        serve(speaker(asked), asked.device)
        return
    if arguments.device == "cpu":
        # Both sides inherit it.
        os.sched_setaffinity(0, {arguments.core})
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for release, quantization in (arm.split(":") for arm in arguments.arms):
            folder = Path(scratch) / release
            if not folder.exists():
                write_checkpoint(folder, release)
            rows.append(compare(arguments, folder, quantization))
    card = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    result = {
        "bench": "beside pocket-tts", "device": arguments.device, "processor": processor(), "card": card, "text": TEXT,
        "frames": FRAMES, "voice_s": VOICE_S, "repeats": arguments.repeats,
        "time": "cpu" if arguments.device == "cpu" else "wall", "commit": commit_of_checkout(), "rows": rows,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
