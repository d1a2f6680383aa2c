"""No test rests on the speed of a machine: a limit in seconds is a guard against hanging, of half a minute or more.

Less has only what is to run out: within `pytest.raises` or `suppress` of a timeout. Limits that the package takes as
settings (`slow_reader_timeout_s`, ...) are free, as they are what is tested.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LEAST_S = 30
POSITIONS = {"timeout": 0, "wait_for": 1, "join": 0, "communicate": 1, "wait": 0, "result": 0}
"""Where those that take a limit by position have it."""
CLOCKS = ("monotonic", "perf_counter")


def is_short(node: ast.expr) -> bool:
    """Whether it is a number below `LEAST_S`; with 0 nothing is waited for."""
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and 0 < node.value < LEAST_S


def runs_out(node: ast.With | ast.AsyncWith) -> bool:
    """Whether within it a limit is to run out."""
    heads = [ast.unparse(item.context_expr) for item in node.items]
    return any("Timeout" in head and ("raises(" in head or "suppress(" in head) for head in heads)


def reads_clock(node: ast.AST) -> bool:
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(isinstance(name, ast.Attribute) and name.attr in CLOCKS for name in calls)


def name_of(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def short_limits(node: ast.AST) -> Iterator[ast.AST]:
    """What waits for less than `LEAST_S`, or compares the clock with so little."""
    if isinstance(node, ast.With | ast.AsyncWith) and runs_out(node):
        return
    if isinstance(node, ast.Call):
        called, given = node.func, node.args
        if name_of(called) == "to_thread":
            called, *given = given
        limits = [word.value for word in node.keywords if word.arg == "timeout"]
        if (name := name_of(called)) in POSITIONS:
            limits += given[POSITIONS[name] :][:1]
        if any(map(is_short, limits)):
            yield node
    if isinstance(node, ast.Assert) and reads_clock(node) and any(map(is_short, ast.walk(node))):  # type: ignore[arg-type]
        yield node
    for child in ast.iter_child_nodes(node):
        yield from short_limits(child)


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("await asyncio.wait_for(ended, 5)", True),
        ("process.wait(timeout=1.5)", True),
        ("await asyncio.to_thread(process.wait, 20)", True),
        ("assert time.monotonic() - began_s < 10", True),
        ("async with asyncio.timeout(0.1): pass", True),
        ("await asyncio.wait_for(ended, GUARD_S)", False),
        ("process.wait(timeout=60)", False),
        ("with pytest.raises(TimeoutError): await asyncio.wait_for(ended, 0.1)", False),
        ("serving(slow_reader_timeout_s=0.5)", False),
    ],
)
def test_a_short_limit_is_found(code: str, is_found: bool) -> None:
    assert any(short_limits(ast.parse(code))) == is_found


def test_limits_in_seconds_guard_against_hanging_alone() -> None:
    words = (*POSITIONS, *CLOCKS)
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        # Parsing them all takes ten times as long.
        if path != Path(__file__) and any(word in text for word in words):
            found += [f"{path.relative_to(TESTS)}:{node.lineno}" for node in short_limits(ast.parse(text))]  # type: ignore[attr-defined]
    assert found == []
