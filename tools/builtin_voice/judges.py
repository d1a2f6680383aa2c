"""Judge one reading: transcript (Moonshine), quality scores (DNSMOS), high-band energy, and how it ends.

`prepare_judges.sh` fetches the judges. Run by itself, prints the judgement of audio files:
`python -m builtin_voice.judges FOLDER WAV... [--texts FILE]`, a text a line for each file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import soundfile

from builtin_voice.dnsmos import Dnsmos
from builtin_voice.hearing import JUDGE_HZ, to_judge
from builtin_voice.moonshine import Moonshine
from builtin_voice.readings import Heard, Scored, Spoken
from builtin_voice.word_errors import ending_of, parted, spelled_words, word_error_rate

JUDGE = "moonshine-base 0.1.9, speechmos 0.0.1.1, pocketsphinx 5.0.4"
INVENTED_WORDS = 3
"""So many words after the end of a text, and it has invented them."""
_SURROUNDING_SILENCE_S = 0.3
_HIGHS_HZ = (8000, 11_000)


class Told(Protocol):
    """The part of `builtin_voice.recogniser.Recogniser` that is used: recognition against a known text."""

    def ending(self, audio: bytes, text: str) -> tuple[int, bool]: ...

    def is_longer(self, audio: bytes, text: str, longer: list[str]) -> bool: ...


@dataclass(frozen=True)
class Judges:
    """The judges, loaded once in a process."""

    moonshine: Moonshine
    dnsmos: Dnsmos
    told: Told

    @classmethod
    @cache
    def load(cls, folder: Path) -> Judges:
        """From the folder that `prepare_judges.sh` filled."""
        from builtin_voice.recogniser import Recogniser  # noqa: PLC0415 - of those who judge alone

        return cls(Moonshine.load(folder), Dnsmos.load(folder), Recogniser())

    def judge(self, spoken: Spoken, text: str, scored: Scored) -> Heard:
        """Transcribe the reading `spoken` of `text`, and score its quality as `scored` asks for."""
        audio = to_judge(spoken.samples, spoken.sample_rate)
        words = self.moonshine.hear(audio)
        ending, told = ending_of(text, words), to_told(audio)
        missing = extra = 0
        if ending.missing and self.told.ending(told, text)[1]:
            missing = ending.missing
        if ending.extra >= INVENTED_WORDS and self.told.is_longer(told, text, parted(spelled_words(words))):
            extra = ending.extra
        if scored is Scored.NOT:
            return Heard(words, missing, extra)
        p808, ovrl = self.dnsmos.p808(audio), self.dnsmos.ovrl(audio) if scored is Scored.ALL else None
        return Heard(words, missing, extra, p808, ovrl, highs_of(spoken.samples, spoken.sample_rate))


def listen(folder: Path, spoken: Spoken, text: str, scored: Scored) -> Heard:
    """`Judges.judge` of the judges in `folder`, which each process loads once."""
    return Judges.load(folder).judge(spoken, text, scored)


def to_told(samples: np.ndarray) -> bytes:
    """`samples` [S] float32 in [-1, 1] at 16 kHz as PCM16 between silences, for the recogniser that knows the text."""
    # Out of silence pocketsphinx picks 100 of 100 sentences for every voice of Flite; without, 98 to 100.
    padded = np.pad(np.clip(samples, -1, 1), round(_SURROUNDING_SILENCE_S * JUDGE_HZ))
    return (padded * 32767).astype("<i2").tobytes()


def highs_of(samples: np.ndarray, sample_rate: int) -> float:
    """Share of the energy of `samples` [S] between 8 and 11 kHz."""
    power = np.abs(np.fft.rfft(samples)) ** 2
    hz = np.fft.rfftfreq(len(samples), 1 / sample_rate)
    low, high = _HIGHS_HZ
    return float(power[(hz >= low) & (hz < high)].sum() / max(power.sum(), 1e-12))


def high_band_db(shares: list[float]) -> float:
    """Mean of shares by `highs_of`, in decibels below full-band energy."""
    return float(10 * np.log10(max(float(np.mean(shares)), 1e-12)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("judges", type=Path, help="the folder that prepare_judges.sh filled")
    parser.add_argument("files", type=Path, nargs="+", metavar="WAV")
    parser.add_argument("--texts", type=Path, help="what they say, a text a line")
    options = parser.parse_args()
    texts = options.texts.read_text("utf-8").splitlines() if options.texts else [""] * len(options.files)
    if len(texts) < len(options.files):
        parser.error(f"--texts: {len(texts)} lines, {len(options.files)} files")
    found = []
    for path, text in zip(options.files, texts, strict=False):
        samples, sample_rate = soundfile.read(path, dtype="float32")
        heard = listen(options.judges, Spoken(samples, sample_rate, "stop"), text, Scored.ALL)
        found.append(heard)
        row = {"file": path.name, "heard": heard.words, "p808": heard.p808, "ovrl": heard.ovrl}
        row |= {"high_band_db": round(high_band_db([heard.highs or 0.0]), 1), "missing": heard.missing}
        print(json.dumps(row | {"extra": heard.extra, "text": text}), flush=True)
    mean = {
        "judge": JUDGE,
        "files": len(found),
        "wer": round(word_error_rate(texts[: len(found)], [heard.words for heard in found]), 4)
        if options.texts
        else None,
        "p808": round(float(np.mean([heard.p808 for heard in found])), 3),
        "ovrl": round(float(np.mean([heard.ovrl for heard in found])), 3),
        "high_band_db": round(high_band_db([heard.highs or 0.0 for heard in found]), 1),
    }
    print(json.dumps(mean))


if __name__ == "__main__":
    main()
