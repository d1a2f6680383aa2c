"""`triton` and `tl`, its language, where kernels can run; elsewhere both are None, and references run.

Importing Triton takes .3 s and 70 MB. So a process on a machine without a GPU does without it, unless it has imported
Triton before: to compile kernels for a GPU that is elsewhere, or to interpret them."""

import sys
from pathlib import Path


def may_have_gpu() -> bool:
    """Whether the machine may have a GPU, decided without using it: on Linux, whether the system has the device node of
    an NVIDIA or AMD GPU, or that of Windows' for Linux."""
    return sys.platform != "linux" or any(Path("/dev", node).exists() for node in ("nvidiactl", "kfd", "dxg"))


try:
    if "triton" not in sys.modules and not may_have_gpu():
        raise ImportError
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
