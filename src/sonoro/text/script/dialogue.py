"""Several speakers in one text: cues to text with tags of voices, and plays to cues. Knows no model."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sonoro.core.errors import InvalidRequest

MAX_CUES, MAX_VOICES, MAX_BETWEEN_S = 256, 16, 10.0
BETWEEN_S = 0.3

_VOICE = re.compile(r"[^\[\]\n]{1,100}")
_CUE = re.compile(r"@?(?P<name>[^\s:@][^:\n]{0,99}?)\s*:\s+(?P<text>\S.*)")


class Cue(NamedTuple):
    """What one speaker says, at `rate` times the tempo; without a voice, that of the request."""

    text: str
    voice: str | None = None
    rate: float = 1.0


def dialogue(cues: Sequence[Cue], between_s: float = BETWEEN_S) -> str:
    """`cues` as one text with markup `voices`, `between_s` of silence between two. Raises `InvalidRequest`."""
    if not 1 <= len(cues) <= MAX_CUES:
        raise InvalidRequest("inputs", f"{len(cues)} given", f"1 to {MAX_CUES}")
    voices = {cue.voice for cue in cues if cue.voice is not None}
    if len(voices) > MAX_VOICES:
        raise InvalidRequest("inputs", f"{len(voices)} voices", f"at most {MAX_VOICES}")
    if not 0 <= between_s <= MAX_BETWEEN_S:
        raise InvalidRequest("pause_between", between_s, f"it must be from 0 to {MAX_BETWEEN_S:g} s")
    if voices and len({cue.voice for cue in cues}) > len(voices):
        raise InvalidRequest("inputs", "one without a voice", "give each a voice, or none")
    return _separator(between_s).join(map(_tagged, cues))


def owners(cues: Sequence[Cue], between_s: float = BETWEEN_S) -> list[int | None]:
    """For each character of `dialogue` the number of the cue that says it; None for what is between them."""
    made: list[int | None] = []
    for number, cue in enumerate(cues):
        made += [None] * (len(_tagged(cue)) - len(cue.text)) + [number] * len(cue.text)
        made += [None] * len(_separator(between_s)) * (number < len(cues) - 1)
    return made


def _separator(between_s: float) -> str:
    return f"[pause:{round(1000 * between_s)}ms]\n" if between_s else "\n"


def _tagged(cue: Cue) -> str:
    if cue.voice is not None and not _VOICE.fullmatch(cue.voice):
        raise InvalidRequest("voice", cue.voice, "no voice has such a name")
    voice = "" if cue.voice is None else f"[voice:{cue.voice}]"
    # A rate holds until the next one.
    return f"{voice}[rate:{cue.rate:g}]{cue.text}"


def read_play(text: str, cast: Mapping[str, str]) -> list[Cue]:
    """The cues of a play: a line `NAME: what is said`, which further lines continue until an empty one or a name.
    `cast` gives each name, whatever its case, a voice. Raises `InvalidRequest` for a name that it lacks."""
    voices = {name.lower(): voice for name, voice in cast.items()}
    cues: list[Cue] = []
    is_open = False
    for number, line in enumerate(text.splitlines(), start=1):
        found = _CUE.fullmatch(line.strip())
        if found is not None and (found["name"].lower() in voices or found["name"].isupper()):
            if found["name"].lower() not in voices:
                raise InvalidRequest("cast", found["name"], f"line {number}: it names no voice for this speaker")
            cues.append(Cue(found["text"], voices[found["name"].lower()]))
            is_open = True
        elif not line.strip():
            is_open = False
        elif is_open:
            cues[-1] = cues[-1]._replace(text=f"{cues[-1].text} {line.strip()}")
        else:
            raise InvalidRequest("script", line[:80], f"line {number}: it must be NAME: what is said")
    return cues
