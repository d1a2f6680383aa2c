"""Figures about the package: `python tools/figures.py [--json] [--static]`. Each function below says what it counts.

Reads the source of the imported `sonoro`, and traces one request to the built-in voice through a server, to see which
modules it enters.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import itertools
import json
import os
import socket
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import sonoro

ROOT = Path(sonoro.__file__).parent
KERNELS = "jit"
DUPLICATE_LINES = 6

_SEEN = "FIGURES_SEEN"
"""The environment variable with the file in which a traced engine process notes the modules it enters."""


class _Seen:
    """Notes the modules of the package entered since a request was submitted, and the calls from the engine's loop to a
    launch. A module entered within a launch is a `step`: a graph that is replayed enters none."""

    SUBMIT = ("engine.engine", "Engine.submit")
    LOOP = ("engine.worker", "Worker.serve")
    LAUNCH = ("runtime.graphs", "GraphSet.run")
    LAUNCHERS = ("runtime.graphs",)

    def __init__(self, note: Callable[[str], object], *, is_recording: bool) -> None:
        self._note, self._is_recording = note, is_recording
        self._known: set[str] = set()
        self._launch: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame is self._launch:
            self._launch = None
        if event != "call" or (module := _module_of(frame)) is None:
            return
        place = module, frame.f_code.co_qualname
        self._is_recording = self._is_recording or place == self.SUBMIT
        if not self._is_recording:
            return
        if place == self.LAUNCH:
            self._launch = frame
            if calls := self._calls_since_loop(frame):
                self._tell(f"calls {calls + 1}")  # and the replay itself
        is_step = self._launch is not None and module not in self.LAUNCHERS
        self._tell(f"{'step' if is_step else 'module'} {module}")

    def _tell(self, line: str) -> None:
        if line not in self._known:
            self._known.add(line)
            self._note(line)

    def _calls_since_loop(self, frame: FrameType) -> int:
        calls, caller = 0, frame
        while (_module_of(caller), caller.f_code.co_qualname) != self.LOOP:
            calls += 1
            if caller.f_back is None:
                return 0
            caller = caller.f_back
        return calls


def _module_of(frame: FrameType) -> str | None:
    """The module of a running function; None for module-level code during an import."""
    name = frame.f_code.co_filename
    if not name.startswith(str(ROOT)) or frame.f_code.co_name == "<module>":
        return None
    return str(Path(name).relative_to(ROOT).with_suffix("")).replace(os.sep, ".")


def load_traced(*arguments: Any, **settings: Any) -> Any:
    """The registry's `load`; from now on the process notes the modules that a request enters."""
    # Imported here: the starting process must not import torch.
    from sonoro.models.registry import load  # noqa: PLC0415

    def note(line: str) -> None:
        with open(os.environ[_SEEN], "a", encoding="utf-8") as file:
            file.write(line + "\n")

    loaded = load(*arguments, **settings)
    seen = _Seen(note, is_recording=False)
    threading.setprofile(seen)
    sys.setprofile(seen)
    return loaded


async def _speak() -> tuple[list[str], list[str]]:
    """Speak one request; returns the notes of the server process and of the engine process."""
    # Imported here: the engine's process, which asks for this module, has no use for them.
    import uvicorn  # noqa: PLC0415

    from sonoro.server import service  # noqa: PLC0415
    from sonoro.server.app import create_app, uvicorn_config  # noqa: PLC0415
    from sonoro.server.config import ServerConfig  # noqa: PLC0415
    from sonoro.server.listening import listen  # noqa: PLC0415
    from sonoro.transport.fleet import Fleet  # noqa: PLC0415

    # The server's periodic work must not be counted.
    service.VOICES_S = 3600.0
    config, noted = ServerConfig(port=0).resolve(4), Path(os.environ[_SEEN])
    fleet = Fleet.launch(devices=("cpu",), factory="figures:load_traced")
    sock = listen(config)
    server = uvicorn.Server(uvicorn_config(create_app(fleet, config), config))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while b" 503 " in await _ask(sock, b"GET /ready", b""):
        await asyncio.sleep(0.2)
    entered: list[str] = []
    seen = _Seen(entered.append, is_recording=True)
    threading.setprofile(seen)
    sys.setprofile(seen)
    answer = await _ask(sock, b"POST /v1/audio/speech", b'{"input": "Hello there.", "response_format": "pcm"}')
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    assert b" 200 " in answer, answer
    server.should_exit = True
    await serving
    return entered, noted.read_text(encoding="utf-8").splitlines()


async def _ask(sock: socket.socket, line: bytes, body: bytes) -> bytes:
    """Send a request and read the response to its end; returns its first line."""
    reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
    head = b"%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % (line, len(body)) + body)
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n")[0]


def traced() -> dict[str, Any]:
    """The modules that one request enters in each process, and the most calls from the engine's loop to a replay."""
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        os.environ[_SEEN] = f"{folder}/seen"
        # The engine's process finds this module, and the same package, by the path it is given.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(ROOT.parent)])
        in_server, in_engine = asyncio.run(_speak())
    return {
        "modules_in_server": _named("module", in_server),
        "modules_in_engine": _named("module", in_engine),
        "further_in_steps": sorted({*_named("step", in_engine)} - {*_named("module", in_engine)}),
        "calls_from_loop_to_replay": max(map(int, _named("calls", in_engine))),
    }


def _named(kind: str, lines: list[str]) -> list[str]:
    return sorted(name for line in lines for said, name in [line.split()] if said == kind)


def static(root: Path) -> dict[str, Any]:
    """The figures that the source in `root` gives."""
    paths = sorted(root.rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if _is_function(node)]
    lengths = [node.end_lineno - node.lineno + 1 for node in functions]
    parameters = [_parameters(node) for node in functions]
    lines = Counter[str]()
    for path in paths:
        package = path.relative_to(root).parts[0] if path.parent != root else "(top)"
        lines[package] += len(path.read_text(encoding="utf-8").splitlines())
    return {
        "lines": {"all": sum(lines.values()), **dict(sorted(lines.items()))},
        "function_lines": {"p90": _percentile(lengths, 90), "max": max(lengths)},
        "function_parameters": {"p90": _percentile(parameters, 90), "max": max(parameters)},
        "speech_model_members": _members(trees[root / "models" / "base.py"], "SpeechModel"),
        "broad_excepts": sum(_is_broad(node) for tree in trees.values() for node in ast.walk(tree)),
        "duplicate_pairs": len(list(duplicates(paths))),
    }


def _is_function(node: ast.AST) -> bool:
    """Whether `node` is a function other than a GPU kernel, whose parameters are those of a launch."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any(KERNELS in ast.unparse(decorator) for decorator in node.decorator_list)


def _parameters(node: Any) -> int:
    """Number of parameters of a function, without `self`."""
    named = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def _percentile(values: list[int], percent: int) -> int:
    return sorted(values)[(len(values) - 1) * percent // 100]


def _members(tree: ast.Module, name: str) -> int:
    """Number of attributes and methods that a class declares."""
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return sum(isinstance(node, ast.AnnAssign | ast.FunctionDef) for node in body)


def _is_broad(node: ast.AST) -> bool:
    """Whether `node` is a bare except, or catches `Exception` or `BaseException`."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    return node.type is None or bool(
        {"Exception", "BaseException"} & set(ast.unparse(node.type).strip("()").split(", "))
    )


def duplicates(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Pairs of places with six or more equal consecutive lines, ignoring empty lines, imports and comments."""
    texts = {path: _lines(path) for path in paths}
    windows: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, lines in texts.items():
        for at in range(len(lines) - DUPLICATE_LINES + 1):
            windows[tuple(text for _, text in lines[at : at + DUPLICATE_LINES])].append((path, at))
    pairs = {pair for places in windows.values() for pair in itertools.combinations(places, 2)}
    for (one, at), (other, there) in sorted(pairs):
        # A longer match counts once, at its start.
        if ((one, at - 1), (other, there - 1)) not in pairs:
            yield f"{one}:{texts[one][at][0]}", f"{other}:{texts[other][there][0]}"


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines of code in `path`, numbered."""
    text = path.read_text(encoding="utf-8")
    imports = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    stripped = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if number not in imports)
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]


def main() -> None:
    """Print the figures, as text or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--static", action="store_true", help="without speaking a request")
    parser.add_argument("--duplicates", action="store_true", help="list the pairs of places with the same lines")
    options = parser.parse_args()
    if options.duplicates:
        for one, other in duplicates(sorted(ROOT.rglob("*.py"))):
            print(one, other)
        return
    figures = static(ROOT) | ({} if options.static else traced())
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        shown = f"{len(value)}: {' '.join(value)}" if isinstance(value, list) else value
        shown = "  ".join(f"{key} {number}" for key, number in value.items()) if isinstance(value, dict) else shown
        print(f"{name:28}{shown}")


if __name__ == "__main__":
    main()
