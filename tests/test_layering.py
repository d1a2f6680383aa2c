"""The import table of docs/design.md section 2, held by reading every import in the package.

A module that is named in a string, as for `import_module` or `python -m`, counts as imported there.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "sonoro"
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"

ALLOWED = {
    "core": set(),
    "text": {"core"},
    "audio": {"core"},
    "words": {"core", "text"},
    "transport": {"core"},
    "ops": set(),
    "nn": {"core", "ops"},
    "runtime": {"core", "ops"},
    "native": set(),
    "models": {"core", "text", "audio", "words", "ops", "nn", "runtime", "native"},
    "compile": {"core", "transport", "ops", "runtime", "models", "engine"},
    "engine": {
        "core",
        "text",
        "audio",
        "words",
        "transport",
        "runtime",
        "models.base",
        "models.registry",
        "models.settings",
        "models.words",
    },
    "engine_process": {"core", "transport", "runtime", "models.base", "compile", "engine"},
    "server": {"core", "text", "audio", "transport"},
    "scale": {"core", "transport", "server", "scale_wait"},
    "scale_wait": set(),
    "bench": {"core"},
    "profile": {
        "core",
        "bench",
        "text",
        "audio",
        "transport",
        "ops",
        "runtime",
        "models",
        "compile",
        "engine",
    },
}
"""What each layer may import of ours, besides itself. `api` and `cli` may import anything."""

OF_ANOTHER_PROCESS = {
    ("transport.launch", "sonoro.engine_process"): "the process that it starts",
    (
        "transport.messages",
        "sonoro.models.registry:load",
    ): "the engine's process finds it: a client may name another",
}
"""Names of our modules in strings that are no import of the module with the string, and why."""

DYNAMIC = {
    ("audio.files", "import_module('sonoro.audio.compressed')"): "libsndfile and numpy: WAV and PCM need neither",
    ("audio.files", "import_module('sonoro.audio.pcm')"): "numpy: a file of PCM bytes does not need it",
    ("audio.player", "import_module('sounddevice')"): "an extra",
    ("compile.compiler", "find_spec('triton')"): "Triton may be missing",
    ("core.errors", "import_module('difflib')"): "only a misspelt name needs it",
    ("compile.kernels", "import_module('torch._dynamo')"): "slow, and only the process that compiles needs it",
    ("compile.launchers", "import_module('triton.backends.nvidia.driver')"): "needs the driver's library",
    ("compile.variants", "import_module('triton.runtime.cache')"): "Triton may be missing",
    ("compile.variants", "import_module(module)"): "a kernel's own module, from the name in a `Variant`",
    ("core.nearby", "import_module('hashlib')"): "only another installation's files are read",
    ("audio.encoders", "import_module('sonoro.audio.coded')"): "PyAV takes .25 s to import: not for plain PCM",
    ("engine.played", "import_module('sonoro.audio.coded')"): "PyAV takes .25 s to import: only for a rate",
    ("engine_process", "find_spec(module)"): "the factory that the settings name",
    ("engine_process", "import_module(module)"): "the factory that the settings name",
    ("models.fish_s2.official", "import_module('fish_speech.models.text2semantic.inference')"): "official code",
    ("models.qwen3_tts.official", "import_module('qwen_tts')"): "official code",
    ("models.pocket_tts.official", "import_module('pocket_tts.models.tts_model')"): "official code",
    ("models.voxcpm2.official", "import_module('transformers')"): "official code needs it first",
    ("models.voxcpm2.official", "import_module('voxcpm.model.voxcpm2')"): "official code",
    ("server.config", "import_module('sonoro.server.traces')"): "an extra",
    ("server.speech", "import_module('sonoro.server.traces')"): "an extra",
    ("server.traces", "import_module('opentelemetry.exporter.otlp.proto.http.trace_exporter')"): "an extra, not tests'",
    ("text.english.classes.__init__", "import_module(f'{__name__}.{name}')"): "the classes by their names, listed once",
    ("profile.peers", "import_module('kokoro_onnx')"): "a speaker to compare with, if it is installed",
    ("profile.peers", "import_module('piper')"): "a speaker to compare with, if it is installed",
    ("text.english.classes.units", "import_module('babel')"): "only an amount needs its names",
    ("text.english.numbers", "import_module('num2words')"): "it loads every language; only a number needs it",
    ("text.english.reader", "import_module('sonoro.text.english.classes')"): "their patterns take a tenth of a second",
    ("text.structure.markdown", "import_module('markdown_it')"): "only a text with marks needs it",
    ("text.structure.markdown", "import_module('markdown_it.rules_block')"): "only a text with marks needs it",
}
"""Imports by function call outside the faces, and why each is no statement at the top of its module."""

CORE_THIRD_PARTY = {"numpy", "msgspec", "yaml"}
WITHOUT_TORCH = {"core", "text", "audio", "words", "transport", "server", "scale", "scale_wait", "bench"}
MODEL_NAMES = re.compile(r"qwen|fish|voxcpm|pocket|talker", re.IGNORECASE)
FACES = {"api", "api_audio", "api_engine", "cli", "__init__", "__main__"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@functools.cache
def modules() -> list[tuple[str, Path]]:
    return [(module_name(path), path) for path in sorted(PACKAGE.rglob("*.py"))]


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute dotted names imported anywhere in the file, function bodies and strings included, with their lines."""
    package = ("sonoro", *path.relative_to(PACKAGE).parent.parts)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func) in IMPORTERS:
            yield from ((text.value, node.lineno) for text in node.args if isinstance(text, ast.Constant))
        elif isinstance(node, ast.Constant) and named_module(node.value) and not is_of_another_process(path, node):
            yield named_module(node.value), node.lineno


IMPORTERS = {"import_module", "find_spec", "__import__"}


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def named_module(text: object) -> str:
    """The module of ours that `text` names alone, with ":function" or without; "" if it names none."""
    match = re.fullmatch(r"(sonoro(?:\.\w+)+)(:\w+)?", text) if isinstance(text, str) else None
    return match[1] if match and match[1].removeprefix("sonoro.") in dict(modules()) else ""


def is_of_another_process(path: Path, text: ast.Constant) -> bool:
    return (module_name(path), text.value) in OF_ANOTHER_PROCESS


def dynamic_imports() -> Iterator[tuple[str, str]]:
    """Calls outside the faces that import, and other mentions of what imports, as (module, source)."""
    for name, path in modules():
        called = {id(node.func): node for node in nodes(path) if isinstance(node, ast.Call)}
        for node in nodes(path):
            if name_of(node) in IMPORTERS and layer_of(name) not in FACES:
                yield name, ast.unparse(called.get(id(node), node)).removeprefix("importlib.").removeprefix("util.")


def layer_of(dotted: str) -> str:
    return dotted.removeprefix("sonoro.").split(".")[0]


def is_allowed(layer: str, dotted: str) -> bool:
    target = dotted.removeprefix("sonoro.")
    if layer_of(dotted) == layer:
        return True
    return any(target == allowed or target.startswith(allowed + ".") for allowed in ALLOWED[layer])


def test_every_layer_imports_only_downwards() -> None:
    wrong = []
    for name, path in modules():
        layer = layer_of(name)
        if layer in FACES:
            continue
        assert layer in ALLOWED, f"{name} belongs to no layer of the table"
        found = list(imports(path))
        for dotted, line in found:
            if not dotted.startswith("sonoro."):
                continue
            # `from sonoro.models import base` yields sonoro.models, then sonoro.models.base: judge the longer.
            is_prefix = any(other.startswith(dotted + ".") for other, at in found if at == line)
            if not is_prefix and not is_allowed(layer, dotted):
                wrong.append(f"{name}:{line} imports {dotted}")
    assert not wrong, "\n".join(wrong)


def test_torch_stays_out_of_the_layers_without_it() -> None:
    wrong = [
        f"{name}:{line} imports {dotted}"
        for name, path in modules()
        if layer_of(name) in WITHOUT_TORCH
        for dotted, line in imports(path)
        if dotted.split(".")[0] in {"torch", "triton", "safetensors", "tokenizers"}
    ]
    assert not wrong, "\n".join(wrong)


def test_core_uses_only_the_libraries_of_the_table() -> None:
    allowed = CORE_THIRD_PARTY | set(sys.stdlib_module_names) | {"sonoro"}
    wrong = [
        f"{name}:{line} imports {dotted}"
        for name, path in modules()
        if layer_of(name) == "core"
        for dotted, line in imports(path)
        if dotted.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_by_a_call_are_known() -> None:
    assert set(dynamic_imports()) == set(DYNAMIC)
    texts = {(name, getattr(node, "value", None)) for name, path in modules() for node in nodes(path)}
    assert set(OF_ANOTHER_PROCESS) <= texts


def find_cycle(graph: dict[str, set[str]]) -> tuple[str, ...]:
    """Nodes of `graph` of which each leads to the next, and the last to the first; () if there are none."""
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> tuple[str, ...]:
        if name in trail:
            return (*trail[trail.index(name) :], name)
        found: tuple[str, ...] = ()
        if name not in done:
            found = next(filter(None, (visit(target, (*trail, name)) for target in sorted(graph[name]))), ())
            done.add(name)
        return found

    return next(filter(None, (visit(name, ()) for name in graph)), ())


def test_there_is_no_import_cycle() -> None:
    known = {name.removesuffix(".__init__"): path for name, path in modules()}
    graph = {
        name: {target for dotted, _ in imports(path) if (target := dotted.removeprefix("sonoro.")) in known} - {name}
        for name, path in known.items()
    }
    assert not find_cycle(graph), " > ".join(find_cycle(graph))
    folders: dict[str, set[str]] = {layer_of(name): set() for name in graph}
    for name, targets in graph.items():
        folders[layer_of(name)] |= {layer_of(target) for target in targets} - {layer_of(name)}
    assert not find_cycle(folders), " > ".join(find_cycle(folders))
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ("b", "c", "b")


def test_no_model_is_named_outside_the_models() -> None:
    wrong = [
        f"{name}:{number}: {line.strip()}"
        for name, path in modules()
        if not name.startswith("models.")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MODEL_NAMES.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_configuration_reads_the_environment() -> None:
    wrong = [
        f"{name}:{number}"
        for name, path in modules()
        if name not in ("core.config", "core.folders")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"os\.(environ|getenv)", line)
    ]
    assert not wrong, wrong


def test_function_level_imports_live_only_in_the_faces() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, path in modules()
        if layer_of(name) not in FACES
        for function in nodes(path)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "module",
    [
        "sonoro",
        "sonoro.core.types",
        "sonoro.audio.files",
        "sonoro.text.splitting",
        "sonoro.cli.main",
        "sonoro.cli.bench",
        "sonoro.cli.compile",
        "sonoro.cli.info",
        "sonoro.cli.serve",
        "sonoro.server.app",
        "sonoro.transport.client",
    ],
)
def test_light_modules_do_not_load_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_table_is_the_one_in_the_design() -> None:
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|", DESIGN.read_text(encoding="utf-8"), flags=re.MULTILINE)
    table = {layer: cell for layer, cell in rows if layer in ALLOWED}
    assert set(table) == set(ALLOWED)
    ours = set(ALLOWED) | {"models.base", "models.registry", "models.settings", "models.words"}
    for layer, cell in table.items():
        words = set(re.findall(r"[\w.]+", cell)) & ours
        assert words == ALLOWED[layer], f"{layer}: the design says {sorted(words)}"
