"""Write a page for listening: everyday sentences by a voice and by its teacher, with their spectrograms.

`python -m builtin_voice.page OUTPUT --model CHECKPOINT --teacher AUDIO` writes index.html with its sounds and pictures;
AUDIO is the folder that `evaluate --teacher --audio` filled.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

import matplotlib as mpl
import numpy as np
import soundfile

from builtin_voice import settings
from builtin_voice.evaluate import digest
from builtin_voice.judged import read_everyday
from sonoro import TTS

mpl.use("Agg")
from matplotlib import pyplot as plt

SENTENCES = 6
_FFT, _HOP, _FLOOR_DB = 1024, 240, -90


def decibels(samples: np.ndarray) -> np.ndarray:
    """[bins, frames] float: the spectrogram of `samples` [S] below its loudest point, down to 90 dB."""
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(samples, _FFT // 2), _FFT)[::_HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(_FFT))) ** 2
    return np.maximum(10 * np.log10(np.maximum(power / max(power.max(), 1e-12), 1e-12)), _FLOOR_DB).T


def draw(samples: np.ndarray, sample_rate: int, path: Path) -> None:
    """The spectrogram as a picture, 0 to half of `sample_rate`."""
    figure, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
    extent = (0.0, len(samples) / sample_rate, 0.0, sample_rate / 2000)
    axes.imshow(decibels(samples), origin="lower", aspect="auto", extent=extent, cmap="magma")
    axes.set(xlabel="s", ylabel="kHz")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def write(output: Path, spoken: dict[str, dict[str, tuple[np.ndarray, int]]]) -> None:
    """index.html in `output`: for each sentence the audio of everyone who `spoken` it, by name."""
    output.mkdir(parents=True, exist_ok=True)
    parts = ["<!doctype html><meta charset=utf-8><title>Voices</title><h1>Voices beside their teachers</h1>"]
    for number, (sentence, readings) in enumerate(spoken.items()):
        parts.append(f"<h2>{html.escape(sentence)}</h2>")
        for name, (samples, sample_rate) in readings.items():
            stem = f"{number:02}-{name}"
            soundfile.write(output / f"{stem}.flac", samples, sample_rate)
            draw(samples, sample_rate, output / f"{stem}.png")
            sound, picture = f"<audio controls src={stem}.flac></audio>", f"<img src={stem}.png alt=spectrogram>"
            parts.append(f"<p>{html.escape(name)}<br>{sound}<br>{picture}</p>")
    (output / "index.html").write_text("\n".join(parts) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--teacher", type=Path, required=True, help="folder of the teacher's audio")
    options = parser.parse_args()
    speech, taught = TTS(model=options.model, device="cpu"), settings.taught_by()
    spoken: dict[str, dict[str, tuple[np.ndarray, int]]] = {}
    for seed, sentence in enumerate(read_everyday()[:SENTENCES]):
        readings = spoken[sentence] = {}
        for voice in (voice for voice in speech.voices if voice in taught):
            audio = speech.generate(text=sentence, voice=voice, seed=seed)
            readings[voice] = audio.samples, audio.sample_rate
            path = options.teacher / f"{taught[voice]}-{digest([sentence])}.flac"
            if path.exists():
                readings[taught[voice]] = soundfile.read(path, dtype="float32")
    write(options.output, spoken)


if __name__ == "__main__":
    main()
