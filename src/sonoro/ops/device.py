"""What a device can do, and what it draws random numbers with. Knows no operation.

Tensors on torch's device "meta" have shapes and no memory; operations on them find out which kernels are launched, for
a GPU that need not be there (`sonoro.runtime.ahead`).
"""

from __future__ import annotations

import functools

import torch

try:
    import triton
except ImportError:
    triton = None

__all__ = ["capability", "seeded"]


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, or of the one that kernels are compiled for ahead; (0, 0) of anything else."""
    if device.type == "meta" and triton is not None:
        major, minor = divmod(triton.runtime.driver.active.get_current_target().arch, 10)
        return major, minor
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def seeded(device: torch.device, seed: int = 0) -> torch.Generator | None:
    """A generator on `device` that begins at `seed`; none where there are no numbers to draw."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
