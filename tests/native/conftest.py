"""The compiled code in every instruction set that this processor has."""

import pytest

from sonoro.native import build
from sonoro.native.library import CompiledCode, load


@pytest.fixture(scope="module", params=build.levels())
def library(request: pytest.FixtureRequest) -> CompiledCode:
    """Each in turn. `make test` compiles them, if there is a compiler."""
    if build.compiler() is None:
        pytest.skip("there is no C compiler")
    fastest = load()
    assert fastest is not None
    levels = [*build.levels()]
    if levels.index(request.param) < levels.index(fastest.level):
        pytest.skip(f"this processor has no {request.param}")
    return CompiledCode(build.library(request.param), request.param)
