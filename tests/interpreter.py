"""Tests that run Triton's interpreter: one of a file, all of them in a process of their own (test_interpreter.py).

Whether a kernel is compiled or interpreted is decided by the environment when its module is imported.
"""

import os
from types import FunctionType
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets kernels."""

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py, in a process of its own")


def patch_once() -> None:
    """Let Triton's interpreter put itself in the place of its language once, not at each launch and call of a helper:
    a third of what it takes. Here nothing else uses that language."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, patched = interpreter._patch_lang, set[frozenset[str]]()

    def patch_lang(function: FunctionType) -> Any:
        languages = (interpreter.tl, interpreter.tl.core)
        named = frozenset(
            value.__name__ for value in function.__globals__.values() if any(value is one for one in languages)
        )
        if named not in patched:
            patched.add(named)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang


if INTERPRETED:
    patch_once()
