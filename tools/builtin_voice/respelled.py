"""Does the voice say given phones, if they are spelled as English? `python -m builtin_voice.respelled [--out FILE]`.

The words are those of which pocketsphinx's dictionary has two or three clearly different readings. Each is spoken in a
sentence; pocketsphinx, told the sentence with all readings of the word, chooses by the sound. What is meant is then
another reading. It is spelled as an English word that has no other reading, or else by a table, and is right if
pocketsphinx chooses it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pocketsphinx

from builtin_voice.heteronyms import Case, Chooser, spoken, write_report
from sonoro import TTS

SENTENCE = "Please say {} again."
MEASURED = 200
_SPARE = 1.2
_DICTIONARY = Path(pocketsphinx.get_model_path()) / "en-us" / "cmudict-en-us.dict"
_ALIKE = {**dict.fromkeys(("AE", "EH", "ER", "IH"), "AH"), "AO": "AA", "UH": "UW", "Z": "S", "ZH": "SH", "CH": "SH"}
"""Phones whose exchange makes no clearly different reading."""

_OPEN = {
    **{"AA": "ah", "AE": "a", "AH": "uh", "AO": "aw", "AW": "ow", "AY": "igh", "EH": "e", "ER": "er", "EY": "ay"},
    **{"IH": "i", "IY": "ee", "OW": "oh", "OY": "oy", "UH": "oo", "UW": "oo"},
}
_CLOSED = _OPEN | {"AA": "o", "AH": "u", "AW": "ou", "EY": "ai", "OW": "oa", "OY": "oi"}
_BEFORE_R = _OPEN | {"AA": "a", "AE": "a", "AO": "o", "EH": "ai", "IH": "ee", "IY": "ee", "UH": "oo", "AY": "i"}
_SHORT = frozenset(("AA", "AE", "AH", "EH", "IH", "UH"))
_CONSONANTS = {
    **{"B": "b", "CH": "ch", "D": "d", "DH": "th", "F": "f", "G": "g", "HH": "h", "JH": "j", "K": "k", "L": "l"},
    **{"M": "m", "N": "n", "NG": "ng", "P": "p", "R": "r", "S": "s", "SH": "sh", "T": "t", "TH": "th", "V": "v"},
    **{"W": "w", "Y": "y", "Z": "z", "ZH": "zh"},
}
_DOUBLED = frozenset("BDFGLMNPRSTVZ")


def spelled(phones: Sequence[str]) -> str:
    """`phones`, without stress, as letters that an English reader says so, as far as a table of single phones can."""
    made = ""
    for at, phone in enumerate(phones):
        before, after, then = phones[at - 1] if at else "", *[*phones[at + 1 : at + 3], "", ""][:2]
        if phone in _OPEN:
            is_closed = after in _CONSONANTS and (not then or then in _CONSONANTS or phone in _SHORT)
            table = _BEFORE_R if after == "R" else _CLOSED if is_closed else _OPEN
            if phone == "AH" and (not at or (not after and at > 1)):
                made += "a"
            elif phone == "AY" and not at:
                made += "eye"
            else:
                made += table[phone]
        elif phone == "R" and before == "AY" and (not after or after in _CONSONANTS):
            made += "re"
        elif phone in _DOUBLED and before in _SHORT - {"UH"} and (after in _OPEN or (not after and phone in "SFLZ")):
            made += _CONSONANTS[phone] * 2
        elif phone == "K" and before in _SHORT:
            made += "ck"
        elif phone == "G" and after in ("EH", "IH", "IY", "AY", "ER"):
            made += "gh"
        else:
            made += _CONSONANTS[phone] + "e" * (phone in ("V", "Z", "S") and not after and before not in _CONSONANTS)
    return made


def dictionary() -> dict[str, list[str]]:
    """The readings of each word of letters."""
    readings: dict[str, list[str]] = defaultdict(list)
    for line in _DICTIONARY.read_text("utf-8").splitlines():
        word, phones = line.split(maxsplit=1)
        readings[word.partition("(")[0]].append(phones)
    return {word: all_of for word, all_of in readings.items() if word.isalpha() and word.isascii()}


def _differ(readings: Sequence[str]) -> bool:
    """Whether each two of `readings` have vowels in the same places, and phones that are clearly different."""
    alike = {tuple(_ALIKE.get(phone, phone) for phone in phones.split()) for phones in readings}
    return len(alike) == len(readings) and len({tuple(phone in _OPEN for phone in one) for one in alike}) == 1


def chosen(readings: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    """Words with clearly different readings, in the order of a draw: as many as are measured, and spare ones."""
    able = [word for word, of in readings.items() if 4 <= len(word) <= 12 and 1 < len(of) <= 3 and _differ(of)]
    drawn = random.Random(38).sample(sorted(able), round(MEASURED * _SPARE))
    return {word: {phones: phones for phones in readings[word]} for word in drawn}


def main() -> None:
    """Speak and judge the words, and print the share that is said as meant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=MEASURED)
    parser.add_argument("--voice", default="nora", help="American, as pocketsphinx is")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    readings = dictionary()
    homophones: dict[str, list[str]] = defaultdict(list)
    for word, all_of in readings.items():
        if len(all_of) == 1 and len(word) > 2:
            homophones[all_of[0]].append(word)
    words = chosen(readings)
    chooser, meant = Chooser(words), dict[str, tuple[str, str, str]]()
    cases = [Case(word, "", SENTENCE.format(word)) for word in words]
    rows = list[dict[str, Any]]()
    with TTS(config={"slots": 8}) as tts:
        for case, _, audio in spoken(tts, [*enumerate(cases)], [options.voice]):
            said = chooser.choose(case, audio.samples, audio.sample_rate)
            if said is not None and len(meant) < options.words:
                other = next(phones for phones in words[case.word] if phones != said)
                found = homophones.get(other)
                way, letters = ("word", min(found, key=len)) if found else ("table", spelled(other.split()))
                meant[case.word] = said, other, letters
                rows.append({"word": case.word, "said": said, "meant": other, "way": way, "spelled": letters})
        respelled = [Case(word, "", SENTENCE.format(letters)) for word, (_, _, letters) in meant.items()]
        for (case, _, audio), row in zip(spoken(tts, [*enumerate(respelled)], [options.voice]), rows, strict=True):
            told = case._replace(text=SENTENCE.format(case.word))
            row |= {"heard": chooser.choose(told, audio.samples, audio.sample_rate)}
            row["is_right"] = row["heard"] == row["meant"]
            print(json.dumps(row), flush=True)
    result: dict[str, Any] = {"words": len(rows), "right": sum(row["is_right"] for row in rows)}
    result["share"] = round(result["right"] / len(rows), 4)
    for way in ("word", "table"):
        of_way = Counter(row["is_right"] for row in rows if row["way"] == way)
        result[way] = f"{of_way[True]} of {of_way.total()}"
    print(json.dumps(result))
    if options.out:
        settings = {
            "sentence": SENTENCE,
            "chooser": "pocketsphinx 5.0.4",
            "voice": options.voice,
            "words": options.words,
        }
        write_report(options.out, "respelled", settings, {**result, "rows": rows})


if __name__ == "__main__":
    main()
