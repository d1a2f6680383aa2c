"""Other speakers for a CPU that `sonoro bench say` times beside ours, where they are installed: none is a dependency.

- Kokoro: `pip install kokoro-onnx`, and a folder with `kokoro-v1.0.onnx` and `voices-v1.0.bin` of its releases.
- Piper: `pip install piper-tts`, and the `.onnx` file of a voice, beside its `.onnx.json`."""

import importlib
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Speak = Callable[[str], Iterable[tuple[int, int]]]
"""Speaks a text: the samples and the sample rate of each part, as it is ready."""


def kokoro(folder: Path) -> Speak:
    """Kokoro as af_heart, who taught `nora`; in one part. Raises `ImportError`."""
    model = importlib.import_module("kokoro_onnx").Kokoro(
        str(folder / "kokoro-v1.0.onnx"), str(folder / "voices-v1.0.bin")
    )

    def speak(text: str) -> Iterable[tuple[int, int]]:
        samples, rate = model.create(text, voice="af_heart", lang="en-us")
        yield len(samples), rate

    return speak


def piper(voice: Path) -> Speak:
    """The voice in a file, a sentence a part. Raises `ImportError`."""
    model = importlib.import_module("piper").PiperVoice.load(str(voice))

    def speak(text: str) -> Iterable[tuple[int, int]]:
        for part in model.synthesize(text):
            yield len(part.audio_int16_bytes) // 2, part.sample_rate

    return speak


PEERS: dict[str, Callable[[Path], Speak]] = {"kokoro": kokoro, "piper": piper}


def time_peer(name: str, place: Path | None, text: str, repeats: int) -> dict[str, Any] | str:
    """Medians of `repeats` readings by the peer `name`, whose files are at `place`, or why there are none."""
    if place is None:
        return f"no --{name}"
    try:
        speak = PEERS[name](place)
    except Exception as error:  # of another package: its figures alone are missing
        return f"{type(error).__name__}: {error}"
    readings = [_read(speak, text) for _ in range(repeats + 1)]
    # The first warms up.
    return {figure: statistics.median(one[figure] for one in readings[1:]) for figure in readings[0]}


def _read(speak: Speak, text: str) -> dict[str, float]:
    began_s, began_cpu_s, first_s, audio_s = time.perf_counter(), time.process_time(), 0.0, 0.0
    for samples, rate in speak(text):
        first_s = first_s or time.perf_counter() - began_s
        audio_s += samples / rate
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {"rtf": wall_s / audio_s, "rtf_cpu": cpu_s / audio_s, "first_packet_ms": 1000 * first_s}
