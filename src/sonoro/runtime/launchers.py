"""What launches a compiled kernel, made before it is launched: up to 3.6 Triton has a C compiler build it then.

One for each signature, .4 s each, and one after the other, as launches are. Later Tritons need none. Knows no kernel.
"""

from __future__ import annotations

import functools
import importlib
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sonoro.core.config import kernel_cache_folder

try:
    import triton
except ImportError:
    triton = None

__all__ = ["build_launcher"]

logger = logging.getLogger(__name__)

_CUDA = "libcuda.so.1"


def build_launcher(compiled: Any) -> None:
    """Let Triton's cache have what launches `compiled`, as `triton.compile` returns it for an NVIDIA GPU.

    There need be no GPU. That it cannot be built is a warning: Triton tries again at the launch.
    """
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "make_launcher"):
        return
    try:
        _link_with_cuda(driver)
        driver.CudaLauncher(compiled.src, compiled.metadata)
    except ImportError:
        # It is built, and cannot be loaded where there is no driver of a GPU.
        return
    except (AssertionError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _warn(f"{type(error).__name__}: {error}"[:300])


@functools.cache
def _link_with_cuda(driver: Any) -> None:
    """See that there is a library to link with: a GPU's own or, where there is none, one of its name alone."""
    try:
        driver.library_dirs()
    except AssertionError:
        folder = kernel_cache_folder() / "sonoro" / "linked"
        if not (folder / _CUDA).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as part:
                source, library = Path(part) / "empty.c", Path(part) / _CUDA
                source.touch()
                subprocess.run([_compiler(), "-shared", f"-Wl,-soname,{_CUDA}", "-o", library, source], check=True)
                library.replace(folder / _CUDA)
        triton.knobs.nvidia.libcuda_path = str(folder)
        # No library that was built can be loaded here, of which Triton would warn time and again.
        logging.getLogger("triton.runtime.build").disabled = True
        driver.library_dirs()


def _compiler() -> str:
    """The C compiler that Triton would take."""
    return triton.knobs.build.cc or shutil.which("clang") or shutil.which("gcc") or "cc"


@functools.cache
def _warn(reason: str) -> None:
    """Say `reason` once in a process."""
    logger.warning("event=launcher_not_built reason=%r", reason)
