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
"""How many words `Recogniser.missing` may find missing at the end of a text."""
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

    def missing(self, audio: bytes, text: str) -> int:
        """How many of the last words of `text`, `ENDING_WORDS` at most, are missing: told the text, it hears an end."""
        words = words_of(text).split()
        sure = max(1, len(words) - ENDING_WORDS)
        tail = "".join(f" [ {word}" for word in words[sure:]) + " ]" * len(words[sure:])
        self._told.add_jsgf_string(
            "ending", f"#JSGF V1.0; grammar ending; public <s> = {' '.join(words[:sure])}{tail};"
        )
        self._told.activate_search("ending")
        return len(words) - len(self._heard(self._told, audio).split())


@cache
def _for_harvard() -> Recogniser:
    """The recogniser of this process; its closed set is the hundred sentences, however many of them are read."""
    return Recogniser(read_harvard()[:CLOSED_SET])


def listen(spoken: Spoken, text: str, is_sentence: bool) -> Heard:
    """Hear `text` as it was `spoken`: freely and among the closed set if it is one of that, else only its end."""
    recogniser, audio = _for_harvard(), to_ear(spoken.samples, spoken.sample_rate)
    if is_sentence:
        return Heard(words=recogniser.hear(audio), choice=recogniser.choose(audio))
    return Heard(missing=recogniser.missing(audio, text))
