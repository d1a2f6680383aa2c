"""Speed of a voice on two CPU cores: load it, warm up, then read sentences one by one.

The last line of stdout is JSON: for each voice in `rows` the `rtf` over all sentences and `first_packet_ms`, the median
TTFP; the peak memory `memory_mb`, and the number of `threads`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time

import torch

from builtin_voice.judged import read_harvard
from sonoro import TTS

CORES = 2
SENTENCES = 20


def measure(speech: TTS, voice: str, sentences: list[str]) -> dict[str, str | float]:
    """The row of one voice, after one warm-up sentence."""
    list(speech.stream(sentences[-1], voice=voice))
    first_s, wall_s, audio_s = [], 0.0, 0.0
    for sentence in sentences:
        began_s = time.perf_counter()
        for index, piece in enumerate(speech.stream(sentence, voice=voice)):
            if index == 0:
                first_s.append(time.perf_counter() - began_s)
            audio_s += len(piece.samples) / piece.sample_rate
        wall_s += time.perf_counter() - began_s
    return {
        "voice": voice,
        "rtf": round(wall_s / audio_s, 3),
        "first_packet_ms": round(1000 * statistics.median(first_s), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--voices", help="names with commas between; all of the model's if left out")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    speech = TTS(model=options.model, device="cpu")
    voices = options.voices.split(",") if options.voices else speech.voices
    rows = [measure(speech, voice, read_harvard()[:SENTENCES]) for voice in voices]
    # Kilobytes on Linux.
    memory_mb = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps({"rows": rows, "memory_mb": memory_mb, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
