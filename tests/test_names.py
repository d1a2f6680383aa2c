"""Names of the package follow docs/glossary.md: the old words are not to come back.

Read are the identifiers that the source itself makes or uses; texts are not, so keys of messages, YAML and results are
free. An entry is one or more words, found in a row and with or without a plural's s: "last words" is in `LAST_WORDS_S`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import sonoro

ROOT = Path(sonoro.__file__).parent
HOST = ("api", "api_audio", "api_engine", "cli", "engine", "scale", "server", "transport")
"""What knows requests and slots, and no tensor but those of its plans."""
DEVICE = ("models", "nn", "ops", "runtime")

BANNED = {
    "depth row": "depth state",
    "device row": "device state",
    "farewell": "linger",
    "heat": "temperature",
    "heated": "temperature",
    "inbox": "stream",
    "last word": "drain",
    "let go": "release",
    "obey": "handle",
    "overlapped": "pdl",
    "packed attention": "varlen attention",
    "packed row": "packed tokens",
    "patience": "timeout",
    "pick": "sample",
    "picked": "sampled",
    "place row": "admit",
    "prompt row": "prompt token",
    "put back": "preempted",
    "sampling row": "sampling state",
    "slot row": "backbone state",
    "stage row": "stage prompts",
    "supervisor": "engine client",
    "unheard": "undecoded",
    "unvoiced": "awaiting voice",
    "voiced": "with voice",
    "warmth": "voice history",
    "whole attention": "bidirectional attention",
    "whole stack": "bidirectional stack",
}
"""Words that no name has, and what is said in their place."""

BANNED_IN = {
    "draw": (DEVICE, "sample"),
    "drawn": (DEVICE, "sampled"),
    "draws": (DEVICE, "noise"),
    "place": (("engine", "transport", "server", "runtime", "models"), "slot, admit"),
    "row": (HOST, "request, slot, token, batch index"),
    "turn": (("engine", "nn", "ops", "runtime", "transport"), "position, batch index, tick"),
    "turned": (("engine", "nn", "ops", "runtime", "transport"), "rotated"),
}
"""Words that no name of these packages has; elsewhere they have their usual sense."""

EXACT = {
    "Again": "Resample",
    "Answer": "RequestStream",
    "Ends": "LeftContext, PatchProjections",
    "Library": "CublasPlan",
    "Parts": "say of what",
    "Place": "Allocation",
    "Tile": "TilePlan, ConvTile",
    "Turn": "BatchItem",
    "Vector": "GemvPlan",
    "is_power": "is_power_of_two",
}
"""Names that say too little, or said two things."""

EXCEPTIONS: dict[str, dict[str, str]] = {
    "cli": dict.fromkeys(("row", "rows"), "a row of a printed table"),
    "engine": {"places": "a key of word_heads.json"},
    "models": {"places": "a key of word_heads.json"},
    "server": dict.fromkeys(("row", "rows"), "a row of a printed table"),
    "transport": {"Again": "of pyzmq"},
}
"""By package, names that have such a word, and why it is right there."""

TO_GO: dict[str, set[str]] = {}
"""By package, names that are still to be changed. None may be added."""


def identifiers(tree: ast.AST) -> Iterator[str]:
    """What a module's source names or refers to by name."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.arg() | ast.keyword():
                yield node.arg or ""
            case ast.alias():
                yield node.asname or node.name.rpartition(".")[2]


@functools.cache
def words(name: str) -> list[str]:
    """The words of a name in snake or camel case, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def has(name: str, entry: str) -> bool:
    """Whether the words of `entry` stand in a row in `name`."""
    found, wanted = words(name), entry.split()
    parts = (found[at : at + len(wanted)] for at in range(len(found) - len(wanted) + 1))
    return any(part[:-1] == wanted[:-1] and part[-1] in (wanted[-1], wanted[-1] + "s") for part in parts if part)


@functools.cache
def advice(package: str, name: str) -> str | None:
    """What to say in place of `name`, if it is not to be used in `package`."""
    if name in EXACT:
        return EXACT[name]
    entries = BANNED | {entry: say for entry, (where, say) in BANNED_IN.items() if package in where}
    return next((say for entry, say in entries.items() if has(name, entry)), None)


def package_of(path: Path) -> str:
    """Its folder, or of a module in none, its name up to an underscore."""
    top = path.relative_to(ROOT).parts[0]
    return top.removesuffix(".py").partition("_")[0]


@functools.cache
def offenders() -> dict[str, dict[str, str]]:
    """By package, the names that are not to be used, and what to say in their place."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(ROOT.rglob("*.py")):
        package = package_of(path)
        for name in identifiers(ast.parse(path.read_text(encoding="utf-8"))):
            if (say := advice(package, name)) is not None:
                found[package][name] = say
    return found


def test_a_banned_word_is_found_in_any_spelling() -> None:
    assert has("LAST_WORDS_S", "last word")
    assert has("_letGo", "let go")
    assert not has("wheat", "heat")
    assert not has("outlet_goes", "let go")
    assert advice("ops", "_draw_rows") == "sample"
    assert advice("bench", "_draw_panel") is None
    assert advice("ops", "Ends") == "LeftContext, PatchProjections"
    assert advice("ops", "ends") is None


def test_no_name_has_an_old_word() -> None:
    found = offenders()
    known = {package: {*EXCEPTIONS.get(package, ()), *TO_GO.get(package, ())} for package in found}
    new = {
        f"{package}: {name}": say
        for package, names in found.items()
        for name, say in sorted(names.items())
        if name not in known[package]
    }
    assert not new, "say instead: " + repr(new)


def test_nothing_is_excepted_that_is_gone() -> None:
    found = offenders()
    for listed in (EXCEPTIONS, TO_GO):
        for package, names in listed.items():
            assert set(names) <= set(found[package]), f"no longer in {package}: {set(names) - set(found[package])}"
