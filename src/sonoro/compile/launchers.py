"""Builds the host launchers of compiled kernels ahead of time. Knows no kernel.

Up to version 3.6, Triton compiles a C launcher for each signature at its first launch, .4 s each, one after the other.
Later versions need none."""

import functools
import importlib
import logging
import os
import shutil
import subprocess
from typing import Any

from sonoro.core.folders import kernel_cache_folder
from sonoro.ops.optional import triton

logger = logging.getLogger(__name__)

_CUDA = "libcuda.so.1"


def build_launcher(compiled: Any) -> None:
    """Build the launcher of `compiled`, a result of `triton.compile` for an NVIDIA GPU, into Triton's cache.
    Needs no GPU. Logs a warning if that fails: Triton tries again at the launch."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "make_launcher"):
        return
    try:
        _link_with_cuda(driver)
        driver.CudaLauncher(compiled.src, compiled.metadata)
    except ImportError:
        # It was built, but cannot be loaded without a GPU driver.
        return
    except (AssertionError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _warn(f"{type(error).__name__}: {error}"[:300])


@functools.cache
def _link_with_cuda(driver: Any) -> None:
    """Provide a libcuda to link with: the installed one, or else an empty library of the same name."""
    try:
        driver.library_dirs()
    except AssertionError:
        folder = kernel_cache_folder() / "sonoro" / "linked"
        if not (folder / _CUDA).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{os.getpid()}.so"
            options = ["-shared", f"-Wl,-soname,{_CUDA}", "-o", str(part), "-x", "c", os.devnull]
            subprocess.run([_compiler(), *options], check=True)
            part.replace(folder / _CUDA)
        triton.knobs.nvidia.libcuda_path = str(folder)
        # Without a driver no launcher can be loaded; Triton would warn of each.
        logging.getLogger("triton.runtime.build").disabled = True
        driver.library_dirs()


def _compiler() -> str:
    """The C compiler that Triton would use."""
    return triton.knobs.build.cc or shutil.which("clang") or shutil.which("gcc") or "cc"


@functools.cache
def _warn(reason: str) -> None:
    """Log `reason`, once per process."""
    logger.warning("event=launcher_not_built reason=%r", reason)
