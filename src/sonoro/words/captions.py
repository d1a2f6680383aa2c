"""Captions from word times: SubRip, WebVTT and JSON. Knows no model."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import NamedTuple

from sonoro.core.events import Word

MAX_LINE, MAX_LINES, MAX_S, MIN_S = 42, 2, 7.0, 0.5
"""Broadcasters' maximum characters per line, lines and seconds of a caption; and the minimum seconds it is shown."""

_SENTENCE_END = re.compile(r"[.!?。！？…][\"'”’)\]」』]*\s*$")
_CLAUSE_END = re.compile(r"[,;:—–、，；：][\"'”’)\]」』]*\s*$")
_LINK = re.compile(r"(!?\[)([^\[\]]*)(\]\([^()]*\))")
_MARKUP = str.maketrans("", "", "\0*_`~#|")


class Cue(NamedTuple):
    """One caption: from when to when it is shown, and its lines."""

    start_s: float
    end_s: float
    lines: list[str]


def cues(text: str, words: Sequence[Word]) -> list[Cue]:
    """Cut `text` into captions of whole words by the times of `words`: at sentence ends, else after a clause if the
    caption is over half full, else where it is full. Markup and what is not read are not shown."""
    made: list[Cue] = []
    group: list[int] = []
    text = _LINK.sub(lambda link: "\0" * len(link[1]) + link[2] + "\0" * len(link[3]), text)
    ends = _sentence_ends(text, words)
    for number in range(len(words)):
        if group and _is_full(text, words, group[0], number):
            made.append(_cue(text, words, group))
            group = []
        group.append(number)
        said = _said(text, words, group[0], number)
        # After a clause only if the sentence does not fit into one caption, to avoid short leftovers.
        is_part = len(said) > MAX_LINE and _is_full(text, words, group[0], ends[number])
        if number == ends[number] or (is_part and _CLAUSE_END.search(said)):
            made.append(_cue(text, words, group))
            group = []
    if group:
        made.append(_cue(text, words, group))
    # Show a short caption for at least `MIN_S`, but not beyond the start of the next one.
    for number, cue in enumerate(made):
        limit_s = made[number + 1].start_s if number + 1 < len(made) else cue.start_s + MIN_S
        made[number] = cue._replace(end_s=max(cue.end_s, min(cue.start_s + MIN_S, limit_s)))
    return made


def srt(text: str, words: Sequence[Word]) -> str:
    """`cues` as a SubRip file."""
    return "".join(f"{number}\n{_block(cue, ',', str)}" for number, cue in enumerate(cues(text, words), start=1))


def vtt(text: str, words: Sequence[Word]) -> str:
    """`cues` as a WebVTT file."""
    return "WEBVTT\n\n" + "".join(_block(cue, ".", partial(escape, quote=False)) for cue in cues(text, words))


def words_json(words: Sequence[Word]) -> str:
    """`words` with all fields as a JSON array, a line per word."""
    lines = ",\n".join(json.dumps(word.fields, ensure_ascii=False) for word in words)
    return f"[\n{lines}\n]\n" if lines else "[]\n"


Maker = Callable[[str, Sequence[Word]], str]
FORMATS: Mapping[str, Maker] = {"srt": srt, "vtt": vtt, "json": lambda _, words: words_json(words)}


def _sentence_ends(text: str, words: Sequence[Word]) -> list[int]:
    """For each word, the index of the last word of its sentence."""
    ends: list[int] = []
    for number in reversed(range(len(words))):
        is_end = not ends or _SENTENCE_END.search(_said(text, words, number, number))
        ends.append(number if is_end else ends[-1])
    return ends[::-1]


def _said(text: str, words: Sequence[Word], first: int, last: int) -> str:
    """The text of words `first` to `last` with the punctuation around them, on one line."""
    start = words[first - 1].end if first else 0
    end = words[last + 1].start if last + 1 < len(words) else len(text)
    lead = text[start : words[first].start]
    # Punctuation before a space belongs to the word before it, after a space to the next word.
    lead = "" if first and not re.search(r"\s", lead) else re.split(r"\s", lead)[-1] if first else lead
    tail = text[words[last].end : end]
    tail = re.split(r"\s", tail)[0] if last + 1 < len(words) else tail
    gaps = [text[word.end : after.start] for word, after in itertools.pairwise(words[first : last + 1])]
    spoken = [word.text + _between(gap) for word, gap in zip(words[first : last + 1], [*gaps, tail], strict=True)]
    return " ".join((_between(lead) + "".join(spoken)).split())


def _between(gap: str) -> str:
    """What is shown of the text between two words: its punctuation and spaces, without what is not read."""
    shown = ""
    for piece in re.split(r"(\s+)", gap):
        if re.search(r"\w", piece):
            marks = piece[len(piece.rstrip(".,;:!?…")) :]
            shown = shown.rstrip() + marks if marks else shown
        else:
            shown += piece.translate(_MARKUP)
    return shown


def _is_full(text: str, words: Sequence[Word], first: int, last: int) -> bool:
    """Whether a caption that begins with word `first` has no room for word `last`."""
    is_long = words[last].end_s - words[first].start_s > MAX_S
    return is_long or len(_lines(_said(text, words, first, last))) > MAX_LINES


def _cue(text: str, words: Sequence[Word], group: Sequence[int]) -> Cue:
    first, last = group[0], group[-1]
    return Cue(words[first].start_s, words[last].end_s, _lines(_said(text, words, first, last)))


def _lines(said: str) -> list[str]:
    """Wrap `said` into lines of at most `MAX_LINE` characters; longer words are broken."""
    lines = [""]
    for part in re.findall(r"\S+", said):
        pieces = [part[at : at + MAX_LINE] for at in range(0, len(part), MAX_LINE)]
        for number, piece in enumerate(pieces):
            joined = f"{lines[-1]}{'' if number or not lines[-1] else ' '}{piece}"
            if len(joined) <= MAX_LINE:
                lines[-1] = joined
            else:
                lines.append(piece)
    return lines


def _block(cue: Cue, point: str, shown: Callable[[str], str]) -> str:
    lines = "".join(f"{shown(line)}\n" for line in cue.lines)
    return f"{_clock(cue.start_s, point)} --> {_clock(cue.end_s, point)}\n{lines}\n"


def _clock(at_s: float, point: str) -> str:
    ms = round(at_s * 1000)
    return f"{ms // 3_600_000:02d}:{ms // 60_000 % 60:02d}:{ms // 1000 % 60:02d}{point}{ms % 1000:03d}"
