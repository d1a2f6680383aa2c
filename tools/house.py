"""Figures about the package: `python tools/house.py [--json] [--root CHECKOUT] [BEFORE.json...]`.

Reads the source of a checkout (default: this one), and traces a request to the built-in voice through both processes.
Prints JSON, each figure with the places it counts, or the table of docs/design.md with a column for each older JSON.
"""

import argparse
import ast
import asyncio
import json
import os
import re
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Any

from httpx import ASGITransport, AsyncClient

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
Figures = dict[str, tuple[int, str]]


def static(package: Path) -> Figures:
    """The figures that the source of `package` gives."""
    paths = {path: ".".join(path.relative_to(package).with_suffix("").parts) for path in sorted(package.rglob("*.py"))}
    files = [(len(path.read_text(encoding="utf-8").splitlines()), name) for path, name in paths.items()]
    rooms = sum((Counter({name.rpartition(".")[0].split(".")[0]: lines}) for lines, name in files), Counter[str]())
    nodes = [(node, name) for path, name in paths.items() for node in ast.walk(ast.parse(path.read_bytes()))]
    classes = [(node, f"{name}.{node.name}") for node, name in nodes if isinstance(node, ast.ClassDef)]
    fields = {at: {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)} for node, at in classes}
    functions = [(node, f"{name}.{node.name}") for node, name in nodes if isinstance(node, FUNCTION)]
    kernels = [(node, at) for node, at in functions if any("jit" in ast.unparse(one) for one in node.decorator_list)]
    lengths = _sizes(function for function in functions if function not in kernels)
    imported = {name.removesuffix(".__init__"): imports(path, package) for path, name in paths.items()}
    of_words = [name for name, found in imported.items() if any("words" in one.split(".") for one in (name, *found))]
    circle: list[str] = []
    try:
        TopologicalSorter({name: found & imported.keys() - {name} for name, found in imported.items()}).prepare()
    except CycleError as error:
        circle = error.args[1]
    return {
        "lines of src": (sum(rooms.values()), ", ".join(f"{room} {lines:,}" for room, lines in sorted(rooms.items()))),
        **{f"lines of {room}": (rooms[room], "") for room in ("core", "engine")},
        "lines of a file": max(files),
        "lines of a class": _sizes(classes)[-1],
        "methods of a class": max((sum(isinstance(one, FUNCTION) for one in node.body), at) for node, at in classes),
        "lines of a function": lengths[-1],
        "lines of a function, p90": (lengths[(len(lengths) - 1) * 9 // 10][0], ""),
        "lines of a kernel": _sizes(kernels)[-1],
        "modules in an import circle": _counted(circle),
        "folders that know word times": _counted(name.split(".")[0] for name in of_words if "." in name),
        "holders of temperature": _counted(at for at in fields if "temperature" in fields[at] and "models" not in at),
        "fields of EngineConfig": next(_counted(names) for at, names in fields.items() if at.endswith(".EngineConfig")),
    }


def _sizes(places: Iterable[tuple[Any, str]]) -> list[tuple[int, str]]:
    return sorted((node.end_lineno - node.lineno + 1, at) for node, at in places)


def _counted(names: Any) -> tuple[int, str]:
    return len(found := sorted(set(names))), ", ".join(found)


def imports(path: Path, package: Path) -> set[str]:
    """Names that a module imports of the package, literals of `import_module` included: `core.types` and the like."""
    above, found = ".".join(["sonoro", *path.relative_to(package).parent.parts]), list[Any]()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [above if node.level else "", node.module]))
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
    return {str(name).removeprefix("sonoro.") for name in found if str(name).startswith("sonoro.")}


def trace(place: str, *, is_on: bool) -> None:
    """List the modules entered from `Engine.submit` (or now) to a graph's launch, and the calls from loop to launch."""
    package, launch = f"{Path(sys.modules['sonoro'].__file__ or '').parent}/", None

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal is_on, launch
        launch = None if frame is launch and event == "return" else launch
        name, path = frame.f_code.co_qualname, frame.f_code.co_filename
        if event == "call" and path.startswith(package) and name != "<module>" and not path.endswith("/logs.py"):
            is_on = is_on or name == "Engine.submit"
            if is_on and launch is None:
                launch = frame if name == "GraphSet.run" else None
                calls = [one.f_code.co_qualname for one, _ in traceback.walk_stack(launch)] if launch else []
                # The reader of texts, with a file for each class of words, counts as one module.
                path = re.sub(r"(text/(?:english|structure))/.*", r"\1", path)
                with open(os.environ["HOUSE"] + place, "a", encoding="utf-8") as file:
                    file.write(path.removeprefix(package).removesuffix(".py").replace("/", ".") + "\n")
                    file.write(f"{calls.index('Worker.serve') + 1}\n" if "Worker.serve" in calls else "")

    threading.setprofile(note)
    sys.setprofile(note)


def load_traced(*arguments: Any, **settings: Any) -> Any:
    """The registry's `load`; the engine process that calls it is traced from then on."""
    loaded = import_module("sonoro.models.registry").load(*arguments, **settings)
    trace("engine", is_on=False)
    return loaded


async def traced(root: Path, folder: str) -> Figures:
    """The modules that a request enters in each process; imports `sonoro` from `root`, writes to `folder`."""
    os.environ |= {"HOUSE": f"{folder}/", "PYTHONPATH": f"{Path(__file__).parent}:{root}/src"}
    sys.path.insert(0, f"{root}/src")
    app, config, service = (import_module(f"sonoro.server.{name}") for name in ("app", "config", "service"))
    service.VOICES_S = service.ENGINES_S = 3600.0  # the server's periodic work is not the request's
    settings = import_module("sonoro.transport.messages").WorkerSettings(factory="house:load_traced")
    fleet = import_module("sonoro.transport.fleet").Fleet(settings, ("cpu",))
    served = app.create_app(fleet, config.ServerConfig().resolve(4))
    async with served.router.lifespan_context(served), AsyncClient(transport=ASGITransport(served)) as client:
        while (await client.get("http://localhost/ready")).status_code == 503:
            await asyncio.sleep(0.2)
        # The periodic tasks begin in the loop's next turn.
        await served.state.service.until_started()
        await asyncio.sleep(0)
        trace("server", is_on=True)
        speech = {"input": "Hello there.", "response_format": "pcm"}
        (await client.post("http://localhost/v1/audio/speech", json=speech)).raise_for_status()
        sys.setprofile(None)
    seen = {place: set(Path(folder, place).read_text().split()) for place in ("server", "engine")}
    calls = {word for word in seen["engine"] if word.isdigit()}
    modules = {f"modules of a request, {place}": _counted(names - calls) for place, names in seen.items()}
    return modules | {"calls from the loop to a launch": (max(map(int, calls)), "")}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("before", nargs="*", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        now = static(options.root / "src/sonoro") | asyncio.run(traced(options.root.resolve(), folder))
    columns = {path.stem: json.loads(path.read_text()) for path in options.before} | {"now": now}
    rows = [[name, *(f"{column[name][0]:,}" for column in columns.values())] for name in now]
    table = [["", *columns], ["---"] * (len(columns) + 1), *rows]
    print(json.dumps(now, indent=2) if options.json else "\n".join(f"| {' | '.join(row)} |" for row in table))


if __name__ == "__main__":
    main()
