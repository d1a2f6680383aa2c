"""Check with pocketsphinx, given the text, whether the end of a reading is there, and whether anything follows.

A free recogniser may invent or drop last words; one constrained to the text only tells whether they are there. One
`Recogniser` per process; a second of audio takes about .02 s.
"""

from __future__ import annotations

import pocketsphinx

from builtin_voice.hearing import JUDGE_HZ
from builtin_voice.word_errors import spelled_words

ENDING_WORDS = 4
"""Most words at the end of a text that `Recogniser.ending` can find missing, and syllables it may hear instead."""
_SYLLABLE = (
    "a | the | add | ed | it | id | odd | up | put | food | go | she | to | be | do | say | uh | oh | ah | er | shh "
    "| hum | nun | ring | lie | rye | wow | you | yeah | he | see | zoo | hue | vie | for | thigh | though | chew | jaw"
)


class Recogniser:
    """Constrained recognition of audio made by `judges.to_told`."""

    def __init__(self) -> None:
        # Cepstral means per utterance, so that earlier audio does not change results.
        self._decoder = pocketsphinx.Decoder(samprate=JUDGE_HZ, cmn="batch", lm=None, loglevel="FATAL")

    def ending(self, audio: bytes, text: str) -> tuple[int, bool]:
        """How many of the last words of `text` are not heard by an ear that is told it, `ENDING_WORDS` at most, and
        whether nothing is: the reading ends there. All words where nothing fits, and then nothing is known of its end.
        """
        words = [self._known(word) for word in spelled_words(text)]
        sure = max(1, len(words) - ENDING_WORDS)
        heard = self._heard(words[:sure], words[sure:], audio)
        missing = len(words) - len(heard)
        if missing in (0, len(words)):
            return missing, False
        # A word that is spoken unintelligibly is not missing.
        return missing, len(self._heard(words[: len(heard)], [_SYLLABLE] * ENDING_WORDS, audio)) == len(heard)

    def is_longer(self, audio: bytes, text: str, longer: list[str]) -> bool:
        """Whether the words `longer` fit better than the fewer words of `text`; true if neither fits."""
        told = [[self._known(word) for word in words] for words in (spelled_words(text), longer)]
        return len(self._best([_row(words) for words in told], audio)) != len(told[0])

    def _known(self, word: str) -> str:
        """`word`, or any syllable if it is not in the dictionary."""
        return word if self._decoder.lookup_word(word) is not None else _SYLLABLE

    def _heard(self, sure: list[str], rest: list[str], audio: bytes) -> list[str]:
        """The words recognised with a grammar of all of `sure`, then some of `rest` (each a word or "one |
        another")."""
        return self._best([_row(sure) + "".join(f" [ ( {choice} )" for choice in rest) + " ]" * len(rest)], audio)

    def _best(self, choices: list[str], audio: bytes) -> list[str]:
        self._decoder.add_jsgf_string("told", f"#JSGF V1.0; grammar told; public <s> = {' | '.join(choices)};")
        self._decoder.activate_search("told")
        self._decoder.start_utt()
        self._decoder.process_raw(audio, no_search=False, full_utt=True)
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return hypothesis.hypstr.split() if hypothesis else []


def _row(words: list[str]) -> str:
    return " ".join(f"( {choice} )" for choice in words)
