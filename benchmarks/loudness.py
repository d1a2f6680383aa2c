"""The level of the built-in voices: as the model speaks, and as brought to -18 and -16 LUFS.

    PYTHONPATH=tests/support:tools python benchmarks/loudness.py --judges FOLDER --out results.json

Loudness and true peaks (four times the rate) are by the tests' own meter of BS.1770-4. With the judges of
tools/builtin_voice/prepare_judges.sh, word errors (Moonshine) and DNSMOS P.808 of the first sentences of each voice.
`--speech FILE` keeps what was spoken, and takes it from there if the file exists.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from loudness_meter import loudness_lufs, true_peak_dbtp

from builtin_voice.judged import read_everyday
from builtin_voice.readings import Scored, Spoken
from builtin_voice.word_errors import word_error_rate
from sonoro import TTS
from sonoro.audio.encoders import Encoder, Gains, gains_for
from sonoro.audio.pcm import from_pcm16, to_pcm16
from sonoro.bench.machine import commit_of_checkout, processor
from sonoro.core.types import ModelSpec, SpeechRequest
from sonoro.models import registry

CHUNK_S = 0.08
LEVELS: tuple[float | str, ...] = ("none", -18.0, -16.0)


def spoken(texts: list[str], voices: tuple[str, ...], file: Path | None) -> dict[str, bytes]:
    """PCM16 of each text in each voice, as the model makes it, by "VOICE-NUMBER"."""
    if file is not None and file.is_file():
        return {name: samples.tobytes() for name, samples in np.load(file).items()}
    with TTS(device="cpu") as tts:
        made = {
            f"{voice}-{seed}": to_pcm16(tts.generate(text, voice, seed=seed, loudness="none").samples)
            for voice in voices
            for seed, text in enumerate(texts)
        }
    if file is not None:
        np.savez(file, **{name: np.frombuffer(pcm, "<i2") for name, pcm in made.items()})
    return made


def at_level(pcm: bytes, gains: Gains | None, rate: int) -> bytes:
    """`pcm` in chunks as they are streamed."""
    size = 2 * round(CHUNK_S * rate)
    with Encoder("pcm", rate, gains=gains) as encoder:
        return b"".join([*(encoder.feed(pcm[at : at + size]) for at in range(0, len(pcm), size)), encoder.finish()])


def judged(audio: list[bytes], texts: list[str], rate: int, folder: Path) -> dict[str, float]:
    from builtin_voice.judges import listen  # noqa: PLC0415 - of those who judge alone

    heard = [
        listen(folder, Spoken(from_pcm16(pcm), rate, "stop"), text, Scored.P808)
        for pcm, text in zip(audio, texts, strict=False)
    ]
    words = [one.words for one in heard]
    return {
        "word_errors": round(word_error_rate(texts[: len(words)], words), 4),
        "p808": round(float(np.mean([one.p808 for one in heard])), 3),
    }


def measured(parts: list[bytes], spec: ModelSpec, voice: str, level: float | str) -> tuple[dict[str, Any], list[bytes]]:
    """The figures of the sentences `parts` of `voice` at `level`, and their audio."""
    gains = gains_for(level, spec, spec.resolve(SpeechRequest(id="", text="Hello.", voice=voice)))
    rate, began_s = spec.sample_rate, time.process_time()
    made = [at_level(pcm, gains, rate) for pcm in parts]
    took_s, whole = time.process_time() - began_s, from_pcm16(b"".join(made))
    each = [loudness_lufs(from_pcm16(pcm), rate) for pcm in made]
    row = {
        "lufs": round(loudness_lufs(whole, rate), 2),
        "lufs_of_sentences": [round(min(each), 2), round(max(each), 2)],
        "true_peak_dbtp": round(true_peak_dbtp(whole, rate), 2),
        "cpu_ms_per_audio_s": round(1000 * took_s / (len(whole) / rate), 3),
    }
    return row, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=50)
    parser.add_argument("--judges", type=Path, help="the folder of the judges")
    parser.add_argument("--judged", type=int, default=20, help="sentences of each voice that they judge")
    parser.add_argument("--speech", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec = registry.describe(None, device="cpu").spec
    texts = list(read_everyday())[: options.sentences]
    speech = spoken(texts, spec.voices, options.speech)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for voice in spec.voices:
        parts = [speech[f"{voice}-{number}"] for number in range(len(texts))]
        for level in LEVELS:
            row, made = measured(parts, spec, voice, level)
            if options.judges is not None:
                row |= judged(made[: options.judged], texts, spec.sample_rate, options.judges)
            rows.setdefault(voice, {})[str(level)] = row
            print(voice, level, row)
    settings = {"sentences": len(texts), "judged": options.judged if options.judges else 0, "chunk_s": CHUNK_S}
    result = {"settings": settings, "processor": processor(), "commit": commit_of_checkout(), "voices": rows}
    line = json.dumps(result)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(line)


if __name__ == "__main__":
    main()
