"""How a text says how it is to be spoken: pauses, say-as, aliases, lexicons, voices, rate and gain.

`scripted` is the one call: a request in, the request with its `Script` out where its text says more than itself."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from sonoro.core.script import Script, at_speed
from sonoro.core.types import Markup, ModelSpec, SpeechRequest

from . import ssml, tags
from .dialogue import Cue, dialogue
from .lexicon import MAX_LEXICONS, Lexicon, Rule
from .lexicon_files import lexicon_of, read_lexicon
from .lines import Delivery, honoured, script_of
from .marked import Marked

__all__ = [
    "MAX_LEXICONS",
    "Cue",
    "Delivery",
    "Lexicon",
    "Rule",
    "dialogue",
    "honoured",
    "lexicon_of",
    "read_lexicon",
    "read_script",
    "scripted",
]


def scripted(
    request: SpeechRequest,
    spec: ModelSpec,
    lexicons: Sequence[Lexicon] = (),
    *,
    speed: float = 1.0,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> SpeechRequest:
    """`request` for the model of `spec` with the script of its text, if that says more than itself.

    Its audio is to be played at `speed`. `aliases` are further names of the model's voices, in lower case. Raises
    `InvalidRequest` with line and column."""
    if request.is_live or request.script is not None or not (lexicons or request.may_have_markup):
        return request
    names = {**spec.voice_aliases, **aliases}
    delivery = Delivery(spec, names, request.on_markup, request.language or "auto")
    script = read_script(request.text, request.markup, delivery, lexicons)
    return request if script is None else msgspec.structs.replace(request, script=at_speed(script, speed))


def read_script(text: str, markup: Markup, delivery: Delivery, lexicons: Sequence[Lexicon] = ()) -> Script | None:
    """The script of `text`, whose aliases `lexicons` hold; None for a text that says nothing but itself."""
    marked: Marked | None = None
    is_ssml = markup == "ssml" or (markup in ("auto", "voices") and ssml.is_ssml(text))
    if is_ssml:
        marked = ssml.parse(text)
    elif markup != "none":
        marked = tags.parse(text, markup)
    if marked is None:
        if not lexicons:
            return None
        marked = Marked(text)
        marked.add(text, 0)
    return script_of(marked, lexicons, delivery, is_plain=is_ssml)
