"""Which reading of a heteronym a voice says: `python -m builtin_voice.heteronyms [--out FILE] [--judges FOLDER]`.

`heteronyms.txt` has a sentence a line, after the word and the reading that is meant. pocketsphinx is told the sentence
with all readings of the word, and chooses by the sound; Moonshine, if there is a folder of judges, hears whether the
word and its sentence are understood at all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pocketsphinx
import torch

from builtin_voice.hearing import JUDGE_HZ, to_judge
from builtin_voice.judges import JUDGE, Judges, to_told
from builtin_voice.word_errors import word_error_rate
from sonoro import TTS
from sonoro.bench.machine import commit_of_checkout, processor
from sonoro.text import read

SENTENCES = Path(__file__).with_name("heteronyms.txt")
PHONES = {
    "read": {"present": "R IY D", "past": "R EH D"},
    "lead": {"guide": "L IY D", "metal": "L EH D"},
    "live": {"verb": "L IH V", "adjective": "L AY V"},
    "wind": {"noun": "W IH N D", "verb": "W AY N D"},
    "tear": {"drop": "T IH R", "rip": "T EH R"},
    "bow": {"bend": "B AW", "knot": "B OW"},
    "close": {"adjective": "K L OW S", "verb": "K L OW Z"},
    "record": {"noun": "R EH K ER D", "verb": "R IH K AO R D"},
    "content": {"noun": "K AA N T EH N T", "adjective": "K AH N T EH N T"},
    "object": {"noun": "AA B JH EH K T", "verb": "AH B JH EH K T"},
    "minute": {"time": "M IH N AH T", "tiny": "M AY N UW T"},
    "desert": {"sand": "D EH Z ER T", "leave": "D IH Z ER T"},
    "polish": {"shine": "P AA L IH SH", "Poland": "P OW L IH SH"},
    "wound": {"injury": "W UW N D", "turned": "W AW N D"},
    "use": {"verb": "Y UW Z", "noun": "Y UW S"},
    "house": {"noun": "HH AW S", "verb": "HH AW Z"},
    "refuse": {"verb": "R IH F Y UW Z", "waste": "R EH F Y UW S"},
    "present": {"gift": "P R EH Z AH N T", "verb": "P R IY Z EH N T"},
    "project": {"noun": "P R AA JH EH K T", "verb": "P R AH JH EH K T"},
}


class Case(NamedTuple):
    """A sentence with `word`, and the `reading` that is meant."""

    word: str
    reading: str
    text: str


def cases() -> list[Case]:
    """The sentences of the list."""
    rows = [line.split("\t") for line in SENTENCES.read_text("utf-8").splitlines()]
    return [Case(*key.split(":"), text) for key, text in rows]


class Chooser:
    """Chooses between the readings of a word by its sound: those of `words`, as phones by reading."""

    def __init__(self, words: Mapping[str, Mapping[str, str]] = PHONES) -> None:
        self._decoder = pocketsphinx.Decoder(samprate=JUDGE_HZ, cmn="batch", lm=None, loglevel="FATAL")
        self._words = words
        for word, readings in words.items():
            for number, phones in enumerate(readings.values()):
                self._decoder.add_word(_name(word, number), phones, True)

    def choose(self, case: Case, samples: np.ndarray, rate: int) -> str | None:
        """The reading that is said in `samples` of a case's sentence, or None if nothing fits."""
        readings = list(self._words[case.word])
        choice = "( " + " | ".join(_name(case.word, number) for number in range(len(readings))) + " )"
        words = re.findall(r"[a-z']+", read(case.text, lowercase=True).text)
        row = " ".join(choice if word == case.word else word for word in words)
        self._decoder.add_jsgf_string("told", f"#JSGF V1.0; grammar told; public <s> = {row};")
        self._decoder.activate_search("told")
        self._decoder.start_utt()
        self._decoder.process_raw(to_told(to_judge(samples, rate)), no_search=False, full_utt=True)
        self._decoder.end_utt()
        heard = self._decoder.hyp()
        said = heard.hypstr.split() if heard else []
        return next((one for number, one in enumerate(readings) if _name(case.word, number) in said), None)


def _name(word: str, number: int) -> str:
    return f"{word}_{'abc'[number]}"


def spoken(tts: TTS, chosen: list[tuple[int, Case]], voices: Sequence[str] = ()) -> Iterator[tuple[Case, str, Any]]:
    """Each of the numbered cases in one of `voices` in turn; by default all of the model's."""
    voices = voices or tts.voices
    for first in range(0, len(chosen), 8):
        batch = chosen[first : first + 8]
        items: Any = [
            {"text": case.text, "voice": voices[number % len(voices)], "seed": number} for number, case in batch
        ]
        for (_, case), item, audio in zip(batch, items, tts.generate_batch(items), strict=True):
            yield case, item["voice"], audio


def write_report(path: Path, bench: str, settings: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Write what `bench` of the built-in voice found, with what it was measured on."""
    facts = {
        "bench": bench,
        "model": "builtin",
        "arm": "eager",
        "cpu": processor(),
        "torch": torch.__version__,
        "dtype": "float32",
        "commit": commit_of_checkout(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "settings": settings,
    }
    path.write_text(json.dumps({**facts, **result}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Speak and judge the sentences, and print the share of each word that is read as meant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--judges", type=Path, help="the folder that prepare_judges.sh filled")
    parser.add_argument("--words", nargs="+", help="of these words alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chooser, rows = Chooser(), list[dict[str, Any]]()
    hear = None
    if options.judges:
        hear = Judges.load(options.judges).moonshine
    numbered = [one for one in enumerate(cases()) if not options.words or one[1].word in options.words]
    with TTS(options.model, config={"slots": 8}) as tts:
        for case, voice, audio in spoken(tts, numbered):
            chosen = chooser.choose(case, audio.samples, audio.sample_rate)
            row: dict[str, Any] = {**case._asdict(), "voice": voice, "said": chosen}
            if hear is not None:
                row["heard"] = hear.hear(to_judge(audio.samples, audio.sample_rate))
            rows.append(row)
            print(json.dumps(row), flush=True)
    right = Counter(row["word"] for row in rows if row["said"] == row["reading"])
    total = Counter(row["word"] for row in rows)
    result: dict[str, Any] = {
        "sentences": len(rows),
        "right": right.total(),
        "share": round(right.total() / len(rows), 4),
        "words": {word: f"{right[word]} of {total[word]}" for word in total},
    }
    if hear is not None:
        result["wer"] = round(word_error_rate([row["text"] for row in rows], [row["heard"] for row in rows]), 4)
    print(json.dumps(result))
    if options.out:
        settings = {"texts": SENTENCES.name, "chooser": "pocketsphinx", "judge": JUDGE if hear else None}
        write_report(options.out, "heteronyms", settings, {**result, "rows": rows})


if __name__ == "__main__":
    main()
