"""What an engine reports of a request's text: words with their times, and faults. Knows no model and no attention.

Times are seconds from the first sample of the request, at the model's tempo; `at_speed` converts them for audio that is
played faster or slower."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word as written, `text[start:end]` without surrounding punctuation, and when it is spoken.
    In scripts without spaces, a single character. `is_estimated`: the accuracy of the model's times was not measured.
    `voice` is the name that markup gives, None for the request's voice.
    """

    text: str
    start_s: float
    end_s: float
    start: int
    end: int
    is_estimated: bool = False
    voice: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Its fields as JSON has them: without a voice, if it has none."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields if self.voice is not None else {name: fields[name] for name in fields if name != "voice"}


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A place that the text names: when the next word behind it begins, or at the end of the audio. The time is None
    without word times."""

    name: str
    time_s: float | None


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the engine accepted the request: until it was queued with its voice and got a slot, both 0 if
    unknown; until its first audio; and until its end."""

    queued_s: float = 0.0
    slot_s: float = 0.0
    first_audio_s: float
    total_s: float


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


def marks_at_speed(marks: Iterable[Mark], speed: float) -> tuple[Mark, ...]:
    """`marks` with their times in audio played `speed` times as fast."""
    return tuple(
        mark if mark.time_s is None else msgspec.structs.replace(mark, time_s=mark.time_s / speed) for mark in marks
    )


def at_speed(words: Iterable[Word], speed: float) -> tuple[Word, ...]:
    """`words` with their times in audio played `speed` times as fast."""
    return tuple(
        msgspec.structs.replace(word, start_s=word.start_s / speed, end_s=word.end_s / speed) for word in words
    )
