"""An ear that hears what it is told: the text itself, unless the audio is silent; and one that dies of it."""

import os

from builtin_voice.readings import Heard, Scored, Spoken


def listen(spoken: Spoken, text: str, scored: Scored) -> Heard:
    """As `builtin_voice.judges.listen` of a folder, within microseconds."""
    is_heard = bool(spoken.samples.any())
    words, missing = (text.lower(), 0) if is_heard else ("", 1)
    if scored is Scored.NOT:
        return Heard(words, missing)
    return Heard(words, missing, 0, 4.0, 3.0 if scored is Scored.ALL else None, 0.01)


def die(spoken: Spoken, text: str, scored: Scored) -> Heard:
    """Takes its process with it."""
    os._exit(1)
