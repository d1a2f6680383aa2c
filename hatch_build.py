"""Compiles the C code of `sonoro.native` when a wheel is built, or for an editable installation, in place.

Without a C compiler the package is pure Python and runs everything in torch. The code is called by ctypes, so one wheel
of a platform is for every Python. On Linux its tag names the oldest glibc that has what the code calls."""

import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

OLDEST_GLIBC = (2, 17)
"""The oldest that any Python of ours runs on."""


class NativeBuild(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = runpy.run_path(str(Path(self.root) / "src/sonoro/native/build.py"))
        try:
            libraries = native["build"](wanted=native["own_levels"]() if version == "editable" else ())
        except OSError as error:
            self.app.display_warning(f"The built-in voice will be slower, without compiled code: {error}")
        else:
            tag = platform(libraries, list(platform_tags()))
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{tag}"


def platform(libraries: Sequence[Path], tags: Sequence[str]) -> str:
    """The platform tag of a wheel with `libraries`, compiled on a machine that installs wheels with any of `tags`."""
    known = [found for tag in tags if (found := re.fullmatch(r"manylinux_\d+_\d+_(\w+)", tag))]
    if not known:
        return tags[0]
    called = re.findall(rb"GLIBC_(\d+)\.(\d+)", b"".join(path.read_bytes() for path in libraries))
    major, minor = max([OLDEST_GLIBC, *((int(major), int(minor)) for major, minor in called)])
    return f"manylinux_{major}_{minor}_{known[0][1]}"
