"""Folders of the user that are named by environment variables. Quick to import."""

import os
from pathlib import Path


def kernel_cache_folder() -> Path:
    """Triton's cache of compiled kernels: `TRITON_CACHE_DIR`, or its default."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def tuned_folder() -> Path:
    """The folder of the user's tuned kernel plans, with a file per card."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonoro" / "tuned"


def word_heads_folder() -> Path:
    """The folder of word heads found while serving, with a file per checkpoint."""
    return tuned_folder().parent / "word_heads"


def run_folder() -> str:
    """The folder of the sockets of running servers: in the user's folder for such, if the system gives one."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    return f"{given}/sonoro" if given else str(tuned_folder().parent / "run")
