"""Which sound is to be heard: the classes of phones that the codec's codes are held to, over all teachers."""

from __future__ import annotations

__all__ = ["COUNT", "FLITE", "PAUSE", "UNHEARD", "class_of"]

PAUSE = "pau"
FLITE = (
    PAUSE, "aa", "ae", "ah", "ao", "aw", "ax", "ay", "b", "ch", "d", "dh", "eh", "er", "ey", "f", "g", "hh", "ih", "iy",
    "jh", "k", "l", "m", "n", "ng", "ow", "oy", "p", "r", "s", "sh", "t", "th", "uh", "uw", "v", "w", "y", "z", "zh",
)  # fmt: skip
_KOKORO = "AIOQTWYabdfhijklmnpstuvwzæðŋɐɑɒɔəɚɛɜɡɪɹɾʃʊʌʒʔʤʧθᵊᵻ"
_PAUSES = ("", *".!?…")
UNHEARD = 255
"""Of symbols that take time and name no sound of their own: stress marks, blanks, commas."""

_CLASSES = {symbol: number for number, symbol in enumerate(dict.fromkeys((*FLITE, *_KOKORO)))}
COUNT = len(_CLASSES)


def class_of(symbol: str) -> int:
    """The class, from 0, of what a teacher calls `symbol`, be it one of Flite's or of Kokoro's; or `UNHEARD`."""
    return _CLASSES.get(PAUSE if symbol in _PAUSES else symbol, UNHEARD)
