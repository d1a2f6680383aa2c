"""Compiles the C code of `sonoro.native` when a wheel is built, or for an editable installation, in place.

Without a C compiler the package is pure Python and runs everything in torch. The code is called by ctypes, so one wheel
of a platform is for every Python."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags


class NativeBuild(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = runpy.run_path(str(Path(self.root) / "src/sonoro/native/build.py"))["build"]
        try:
            build()
        except OSError as error:
            self.app.display_warning(f"The built-in voice will be slower, without compiled code: {error}")
        else:
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{next(iter(platform_tags()))}"
