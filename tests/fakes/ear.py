"""An ear that hears what it is told: the text itself, unless the audio is silent; and one that dies of it."""

import os

from builtin_voice.readings import Heard, Spoken


def listen(spoken: Spoken, text: str, is_scored: bool) -> Heard:
    """As `builtin_voice.judges.listen` of a folder, within microseconds."""
    is_heard = bool(spoken.samples.any())
    words, missing = (text.lower(), 0) if is_heard else ("", 1)
    return Heard(words, missing, 0, 4.0, 3.0, 0.01) if is_scored else Heard(words, missing)


def die(spoken: Spoken, text: str, is_scored: bool) -> Heard:
    """Takes its process with it."""
    os._exit(1)
