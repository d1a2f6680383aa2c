"""Compile the C code of all families: `python src/sonoro/native/build.py` leaves a library per instruction set here.

The build of a wheel does so too, and an editable installation for its own processor (`hatch_build.py`). Imports nothing
of ours, and needs a C compiler. The libraries name the sources that they were compiled from, so that stale ones are
found."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
_HEADERS = ("kernels.h", "stack.h", "window.h")
_FLAGS = ("-std=gnu11", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall")
_X86: dict[str, Sequence[str]] = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "plain": (),
}


def levels() -> dict[str, Sequence[str]]:
    """The instruction sets to compile for, the fastest first, and the compiler's flags for each."""
    return _X86 if platform.machine().lower() in ("x86_64", "amd64") else {"plain": ()}


def own_levels() -> list[str]:
    """The fastest level that this processor runs, or all if the system does not tell."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    known = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    fitting = [level for level, flags in levels().items() if {flag.removeprefix("-m") for flag in flags} <= known]
    return fitting[:1] or [*levels()]


def library(level: str, folder: Path = FOLDER) -> Path:
    """The library of `level` in `folder`."""
    return folder / f"sonoro-{level}.so"


def _code() -> list[Path]:
    """What all families share, in this folder, and what each has in its own."""
    return [FOLDER / "common.c", *sorted(FOLDER.parent.glob("models/*/*.c"))]


def _sources() -> list[Path]:
    return [*_code(), *(FOLDER / name for name in _HEADERS)]


def digest() -> str:
    """A hash of the C code and of how it is compiled."""
    sources = [path.read_bytes() for path in _sources()]
    return hashlib.sha256(b"".join([repr((_FLAGS, _X86)).encode(), *sources])).hexdigest()


def is_current(level: str, folder: Path = FOLDER) -> bool:
    """Whether the library of `level` in `folder` was compiled from the C code as it is. In a package without C code
    there is nothing that it may differ from."""
    path = library(level, folder)
    has_code = all(path.is_file() for path in _sources())
    return path.is_file() and (not has_code or digest().encode() in path.read_bytes())


def compiler() -> list[str] | None:
    """The command of the C compiler: that of the interpreter's build, or the first found; None if there is none."""
    for named in (sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        command = (named or "").split()
        if command and shutil.which(command[0]):
            return command
    return None


def build(folder: Path = FOLDER, wanted: Sequence[str] = ()) -> list[Path]:
    """Compile `wanted` levels, or all, into `folder`; returns the libraries. Raises `OSError` without a compiler, or if
    it fails."""
    command = compiler()
    if command is None:
        raise OSError("there is no C compiler: install gcc or clang")
    made = []
    for level in wanted or levels():
        part = library(level, folder).with_suffix(f".{os.getpid()}")
        defined = f'-DSONORO_SOURCES="{digest()}"'
        flags = [*_FLAGS, *levels()[level], f"-I{FOLDER}", defined]
        called = [*command, *flags, *map(str, _code()), "-o", str(part), "-lm"]
        ran = subprocess.run(called, capture_output=True, text=True, check=False)
        if ran.returncode:
            part.unlink(missing_ok=True)
            raise OSError(f"{command[0]} failed: {ran.stderr.strip()}")
        # In one step: another process may be loading it.
        made.append(part.replace(library(level, folder)))
    return made


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in build())
