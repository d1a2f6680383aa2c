"""How a text says how it is to be spoken: pauses, say-as, aliases, lexicons, voices, rate and gain.

`scripted` is the one call: a request in, the request with its `Script` out where its text says more than itself."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from sonoro.core.errors import InvalidRequest
from sonoro.core.script import Script, at_speed
from sonoro.core.types import Markup, ModelSpec, SpeechRequest

from . import ssml, tags
from .dialogue import MAX_VOICES, Cue, dialogue
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
    "at_speed",
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

    Its `cast` is then that of its lines. Its audio is to be played at `speed`. `aliases` are further names of the
    model's voices, in lower case. Raises `InvalidRequest` with line and column."""
    if request.is_live or request.script is not None or not (lexicons or request.may_have_markup):
        return msgspec.structs.replace(request, cast={}) if request.cast and request.script is None else request
    names = {**spec.voice_aliases, **aliases}
    delivery = Delivery(spec, names, request.on_markup, request.language or "auto", request.cast)
    script = read_script(request.text, request.markup, delivery, lexicons)
    if script is None:
        return msgspec.structs.replace(request, cast={})
    cast = {line.voice: request.cast[line.voice] for line in script.lines if line.voice in request.cast}
    if len(cast) > MAX_VOICES:
        raise InvalidRequest("text", f"{len(cast)} voices", f"at most {MAX_VOICES} that are not the model's own")
    return msgspec.structs.replace(request, script=at_speed(script, speed), cast=cast)


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
