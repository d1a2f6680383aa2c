"""What a command and a server on the same machine must know to trust each other. Quick to import.

A server leaves a socket in `run_folder()`. Whoever may write there could pose as a server, so both must be the user's
own, and closed to others."""

from __future__ import annotations

import os
import stat
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from sonoro.core.folders import run_folder

if TYPE_CHECKING:
    from collections.abc import Callable

SUFFIX = ".sock"

BUILTIN_VOICE = str(Path(__file__).parents[1] / "builtin_voice")


def is_offered() -> bool:
    """Whether this system has such sockets."""
    return sys.platform != "win32"


def own_sockets() -> list[str]:
    """The sockets of running servers, and of servers that died: the user's own, in a folder of the user's own."""
    folder = run_folder()
    if not is_offered() or not is_private(folder, stat.S_ISDIR):
        return []
    paths = (f"{folder}/{name}" for name in sorted(os.listdir(folder)) if name.endswith(SUFFIX))
    return [path for path in paths if is_private(path, stat.S_ISSOCK)]


def is_private(path: str, is_kind: Callable[[int], bool]) -> bool:
    """Whether `path` itself, not what it links to, `is_kind` (a test of `stat`), is owned by this user, and gives
    nobody else a right."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return is_kind(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


def stamp(folder: str = BUILTIN_VOICE) -> str:
    """A text that is equal for the same unchanged files in `folder` on this machine."""
    facts = [(path, os.stat(path)) for path in _files(folder)]
    return "\n".join(f"{path} {fact.st_dev} {fact.st_ino} {fact.st_size} {fact.st_mtime_ns}" for path, fact in facts)


def digest(folder: str = BUILTIN_VOICE) -> str:
    """The SHA-256 of the names and contents of the files in `folder`."""
    hashlib = import_module("hashlib")
    whole = hashlib.sha256()
    for path in _files(folder):
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{os.path.relpath(path, folder)} {content}\n".encode())
    return str(whole.hexdigest())


def _files(folder: str) -> list[str]:
    return sorted(os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
