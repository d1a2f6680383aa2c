"""Facts about the machine: processor, driver and commit, for results files. Imports no GPU library."""

import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def commit_of_checkout() -> str | None:
    """The commit of the checkout that holds this package, with `-dirty` if files differ; None outside a checkout."""
    package = Path(__file__).parents[1]
    try:
        for command in (
            ["ls-files", "--error-unmatch", "__init__.py"],
            ["describe", "--always", "--dirty", "--exclude=*"],
        ):
            answer = subprocess.run(["git", *command], cwd=package, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def processor() -> str:
    """The name of the processor."""
    listing = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", listing.read_text("utf-8"), re.M) if listing.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def gpu_driver() -> str | None:
    """The version of NVIDIA's kernel driver; None if it is not found."""
    listing = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", listing.read_text("utf-8")) if listing.exists() else None
    return found[1] if found else None


def rounded(value: Any) -> Any:
    """`value` with floats rounded to four significant digits, also in mappings."""
    if isinstance(value, Mapping):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
