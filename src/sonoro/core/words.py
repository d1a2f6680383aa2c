"""Word times, as engine, server and clients exchange them. Knows no model and no attention.

Times are seconds from the first sample of the request, at the model's tempo; `at_speed` converts them for audio that is
played faster or slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word as written, `text[start:end]` without surrounding punctuation, and when it is spoken.

    In scripts without spaces, a single character. `is_estimated`: the accuracy of the model's times was not measured.
    """

    text: str
    start_s: float
    end_s: float
    start: int
    end: int
    is_estimated: bool = False


FaultKind = Literal["ending", "unreached", "dwelling", "straying"]
"""`ending`: speech went on after the last word, or to its limit; `unreached`: it ended before the last word, or a rest
that was spoken alone is not sent; `dwelling`: the attention
stayed at one position; `straying`: the attention left its path, as when words are repeated or skipped."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Characters `start` to `end` of the text were probably not spoken as written, in attempt number `attempt`, from 0;
    words that are spoken alone after the last attempt belong to it.

    `spoken_again`: its audio was not sent, and another attempt follows. `continued_at`: the next attempt continues
    from that character: it was broken off while it played, or was the last and did not reach what follows there."""

    kind: FaultKind
    start: int
    end: int
    attempt: int = 0
    spoken_again: bool = False
    continued_at: int | None = None

    @property
    def outcome(self) -> Literal["marked", "spoken_again", "continued"]:
        """How the fault was handled."""
        return "spoken_again" if self.spoken_again else "marked" if self.continued_at is None else "continued"


class CharacterTimes(NamedTuple):
    """Consecutive characters of a text, with the start and end of each in seconds."""

    characters: list[str]
    starts_s: list[float]
    ends_s: list[float]


def at_speed(words: Iterable[Word], speed: float) -> tuple[Word, ...]:
    """`words` with their times in audio played `speed` times as fast."""
    return tuple(
        msgspec.structs.replace(word, start_s=word.start_s / speed, end_s=word.end_s / speed) for word in words
    )


def last_heard(words: Sequence[Word], heard_s: float) -> Word | None:
    """The last of `words` that begins within the first `heard_s` seconds; None if there is none."""
    return next((word for word in reversed(words) if word.start_s < heard_s), None)


def character_times(
    text: str, words: Sequence[Word], *, start: int = 0, start_s: float = 0.0, end_s: float | None = None
) -> CharacterTimes:
    """Times of the characters of `text` from index `start`, spoken from `start_s` on, to the end of `words`.

    Characters within a word share its time evenly, those between two words the time between. With `end_s`, the end of
    the text, characters after the last word take the time until then. Times never decrease; in a stream each call
    continues at the end of the last word of the one before.
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
    """Append `characters`, which share the time from `start_s` to `end_s` evenly."""
    each_s = (end_s - start_s) / max(len(characters), 1)
    for number, character in enumerate(characters):
        times.characters.append(character)
        times.starts_s.append(start_s + number * each_s)
        times.ends_s.append(start_s + (number + 1) * each_s)
