"""What a machine hears: pocketsphinx with its packaged English, listening freely or for texts that it is told.

Knows nothing of voices. One `Recogniser` per process; a second of audio takes about .2 s to hear freely.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import pocketsphinx
import soxr

from builtin_voice.readings import Heard, Spoken
from builtin_voice.text import read_harvard
from builtin_voice.word_errors import words_of

CLOSED_SET = 100
RECOGNISER_HZ = 16000
ENDING_WORDS = 4
"""How many words of a text's end `Recogniser.ending` may find missing, and syllables it may hear in their place."""
_SYLLABLE = (
    "a | the | add | ed | it | id | odd | up | put | food | go | she | to | be | do | say | uh | oh | ah | er | shh "
    "| hum | nun | ring | lie | rye | wow | you | yeah | he | see | zoo | hue | vie | for | thigh | though | chew | jaw"
)
_SURROUNDING_SILENCE_S = 0.3


def to_ear(samples: np.ndarray, sample_rate: int) -> bytes:
    """`samples` [S] float32 in [-1, 1] as the recogniser takes them: 16 kHz, 16 bits, silence before and after."""
    resampled = soxr.resample(samples, sample_rate, RECOGNISER_HZ)
    # Out of silence it recognises 100 of 100 in the closed set for every teacher voice; without, 98 to 100.
    padded = np.pad(np.clip(resampled, -1, 1), round(_SURROUNDING_SILENCE_S * RECOGNISER_HZ))
    return (padded * 32767).astype("<i2").tobytes()


class Recogniser:
    """Hears audio made by `to_ear`, freely or as one of `sentences`, each of whose words it must know."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self._sentences = [words_of(sentence) for sentence in sentences]
        self._free = self._decoder()
        self._told = self._decoder()
        missing = sorted({word for text in self._sentences for word in text.split() if not self.knows(word)})
        if missing:
            raise ValueError(f"sentences: {', '.join(missing)} are not in the recogniser's dictionary")
        self._told.add_jsgf_string("closed", f"#JSGF V1.0; grammar closed; public <s> = {' | '.join(self._sentences)};")

    @staticmethod
    def _decoder() -> pocketsphinx.Decoder:
        # Cepstral means over the whole utterance: what was heard before cannot change what is heard now.
        return pocketsphinx.Decoder(samprate=RECOGNISER_HZ, cmn="batch", loglevel="FATAL")

    @staticmethod
    def _heard(decoder: pocketsphinx.Decoder, audio: bytes) -> str:
        decoder.start_utt()
        decoder.process_raw(audio, no_search=False, full_utt=True)
        decoder.end_utt()
        hypothesis = decoder.hyp()
        return hypothesis.hypstr if hypothesis else ""

    def knows(self, word: str) -> bool:
        """Whether `word` is in the dictionary."""
        return self._free.lookup_word(word) is not None

    def hear(self, audio: bytes) -> str:
        """The words heard, of any that there are."""
        return self._heard(self._free, audio)

    def choose(self, audio: bytes) -> int | None:
        """The index of the sentence that fits best out of the closed set; None: no fit."""
        self._told.activate_search("closed")
        closed = self._heard(self._told, audio)
        return self._sentences.index(closed) if closed in self._sentences else None

    def ending(self, audio: bytes, text: str) -> tuple[int, bool]:
        """How many of the last words of `text` are not heard by an ear that is told it, `ENDING_WORDS` at most, and
        whether nothing is: the reading ends there. All words where nothing fits, and then nothing is known of its end.
        """
        words = words_of(text).split()
        sure = max(1, len(words) - ENDING_WORDS)
        heard = self._told_heard(words[:sure], words[sure:], audio)
        missing = len(words) - len(heard)
        if missing in (0, len(words)):
            return missing, False
        # Read, but too badly to be known, a word is still something.
        return missing, len(self._told_heard(heard, [_SYLLABLE] * ENDING_WORDS, audio)) == len(heard)

    def _told_heard(self, sure: list[str], rest: list[str], audio: bytes) -> list[str]:
        """The words heard, told that they are `sure` and then some of `rest`, each a word or "one | another"."""
        tail = "".join(f" [ ( {choice} )" for choice in rest) + " ]" * len(rest)
        self._told.add_jsgf_string("told", f"#JSGF V1.0; grammar told; public <s> = {' '.join(sure)}{tail};")
        self._told.activate_search("told")
        return self._heard(self._told, audio).split()


@cache
def _for_harvard() -> Recogniser:
    """The recogniser of this process; its closed set is the hundred sentences, however many of them are read."""
    return Recogniser(read_harvard()[:CLOSED_SET])


def listen(spoken: Spoken, text: str, is_sentence: bool) -> Heard:
    """Hear `text` as it was `spoken`: freely and among the closed set if it is one of that, else only its end."""
    recogniser, audio = _for_harvard(), to_ear(spoken.samples, spoken.sample_rate)
    if is_sentence:
        return Heard(words=recogniser.hear(audio), choice=recogniser.choose(audio))
    missing, is_cut = recogniser.ending(audio, text)
    return Heard(missing=missing, is_cut=is_cut)
