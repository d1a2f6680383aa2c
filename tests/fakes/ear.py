"""An ear that hears what it is told: the text itself, unless the audio is silent; and one that dies of it."""

import os

from builtin_voice.readings import Heard, Spoken


def listen(spoken: Spoken, text: str, is_sentence: bool) -> Heard:
    """As `builtin_voice.recogniser.listen`, within microseconds."""
    is_heard = bool(spoken.samples.any())
    if is_sentence:
        return Heard(words=text.lower() if is_heard else "", choice=0 if is_heard else None)
    return Heard(missing=0 if is_heard else 1, is_cut=not is_heard)


def die(spoken: Spoken, text: str, is_sentence: bool) -> Heard:
    """Takes its process with it."""
    os._exit(1)
