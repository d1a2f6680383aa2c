"""Semiotic classes, a file each: how a class is recognised, how it is said, and a table of examples that tests run.

A class module has `STARTS` (the kinds of token that its forms begin with: "digit", "sign", "letter"), `recognise(text,
at)`, which yields candidates, and `EXAMPLES`. Two expressions say where live text is not cut: behind words that are
`NEAR` what they decide, or of it, and between a form and what decides it from afar (`FAR`). No class knows another's
result: where they compete, the costs decide.
"""

import re
from importlib import import_module
from types import ModuleType

from sonoro.text.english import signs

from .common import SENTENCE

_NAMES = (
    "abbreviation address bound cardinal chemical citation coordinate date decade digits electronic fraction function "
    "identifier initialism length math measure money ordinal period range_ rate roman scripture telephone time version"
)
CLASSES: tuple[ModuleType, ...] = tuple(import_module(f"{__name__}.{name}") for name in _NAMES.split())

WORDS = frozenset(
    form
    for module in CLASSES
    for word in getattr(module, "WORDS", ())
    for form in (word, word.lower(), word.capitalize())
)
"""Words of letters alone that a class may begin with when white space or a mark follows; all others are plain."""

NEAR, FAR = (
    "|".join(vars(module)[name] for module in (*CLASSES, signs) if name in vars(module)) for name in ("NEAR", "FAR")
)
UNSETTLED = re.compile(rf"(?i)(?:\b(?:{NEAR})[,;:]? |(?:{FAR}){SENTENCE})\Z")
"""The end of a text, of at most 80 characters, that decides how what follows is read, or is decided by it."""
