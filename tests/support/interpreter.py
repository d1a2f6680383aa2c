"""Tests that run Triton's interpreter: one of a file, all of them in a process of their own (test_interpreter.py).

Whether a kernel is compiled or interpreted is decided by the environment when its module is imported.
"""

import functools
import os
from types import FunctionType
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets kernels."""

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py, in a process of its own")


def patch_once() -> None:
    """Let Triton's interpreter put itself in the place of its language once, not at each launch and call of a helper,
    and know the types of NumPy: a third of what it takes. Here nothing else uses that language."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, patched = interpreter._patch_lang, set[frozenset[str]]()

    @functools.cache
    def languages_of(function: FunctionType) -> frozenset[str]:
        languages = (interpreter.tl, interpreter.tl.core)
        return frozenset(
            value.__name__ for value in function.__globals__.values() if any(value is one for one in languages)
        )

    def patch_lang(function: FunctionType) -> Any:
        named = languages_of(function)
        if named not in patched:
            patched.add(named)
            patch(function)
        return interpreter._LangPatchScope()

    numpy_type, types = interpreter._get_np_dtype, dict[str, Any]()

    def get_np_dtype(type: Any) -> Any:
        # Of a block as of its elements.
        name = type.scalar.name
        if name not in types:
            types[name] = numpy_type(type)
        return types[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, get_np_dtype


if INTERPRETED:
    patch_once()
