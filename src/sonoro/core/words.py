"""Words and when they are spoken: what engine, server and clients say of them. Knows no model and no attention.

Times are seconds of audio from the first sample of the request, as the model made it; `at_speed` gives those of audio
that is played faster or slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

__all__ = ["CharacterTimes", "Fault", "FaultKind", "Word", "at_speed", "character_times", "last_heard"]


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word of the text as its writer wrote it, `text[start:end]`, without the marks around it, and when it is spoken.

    In scripts without spaces a character by itself. `is_estimated` says that the model's times were never measured.
    """

    text: str
    start_s: float
    end_s: float
    start: int
    end: int
    is_estimated: bool = False


FaultKind = Literal["ending", "unreached", "dwelling", "straying"]
"""`ending`: the speech went on after the last word; `unreached`: it ended before that; `dwelling`: it stood still at
one place; `straying`: the attention left its way through the text, as where words are repeated or left out."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the text, `start` to `end` in characters, that was probably not spoken as it is written, in `attempt`
    number so many, from 0. Where it is `spoken_again` nobody has heard it; where it was broken off while it was heard,
    the speech goes on from character `continued_at` in the next attempt."""

    kind: FaultKind
    start: int
    end: int
    attempt: int = 0
    spoken_again: bool = False
    continued_at: int | None = None

    @property
    def outcome(self) -> Literal["marked", "spoken_again", "continued"]:
        """What was done about it."""
        return "spoken_again" if self.spoken_again else "marked" if self.continued_at is None else "continued"


class CharacterTimes(NamedTuple):
    """Characters of a text that follow one another, and from when to when each is spoken, in seconds."""

    characters: list[str]
    starts_s: list[float]
    ends_s: list[float]


def at_speed(words: Iterable[Word], speed: float) -> tuple[Word, ...]:
    """`words` in audio that is played `speed` times as fast."""
    return tuple(
        msgspec.structs.replace(word, start_s=word.start_s / speed, end_s=word.end_s / speed) for word in words
    )


def last_heard(words: Sequence[Word], heard_s: float) -> Word | None:
    """The last of `words` that had begun when `heard_s` seconds of the audio had been heard."""
    return next((word for word in reversed(words) if word.start_s < heard_s), None)


def character_times(
    text: str, words: Sequence[Word], *, start: int = 0, start_s: float = 0.0, end_s: float | None = None
) -> CharacterTimes:
    """When the characters of `text` are spoken from number `start` on, which is at `start_s`, to the end of `words`.

    Those within a word share its time evenly; those between two words, the time between them. At the end of the text,
    told of by `end_s`, those after the last word take the time until then. So the times never fall, and of what a
    stream tells bit by bit each call goes on where the last one ended: at the end of its last word.
    """
    times = CharacterTimes([], [], [])
    for word in words:
        _share(times, text[start : word.start], start_s, word.start_s)
        _share(times, text[word.start : word.end], word.start_s, word.end_s)
        start, start_s = word.end, word.end_s
    if end_s is not None:
        _share(times, text[start:], start_s, max(start_s, end_s))
    return times


def _share(times: CharacterTimes, characters: str, start_s: float, end_s: float) -> None:
    """Add `characters` that share the time from `start_s` to `end_s`."""
    each_s = (end_s - start_s) / max(len(characters), 1)
    for number, character in enumerate(characters):
        times.characters.append(character)
        times.starts_s.append(start_s + number * each_s)
        times.ends_s.append(start_s + (number + 1) * each_s)
