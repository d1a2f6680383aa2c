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

__all__ = ["capability", "is_recorded", "seeded"]


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, or of the one that kernels are compiled for ahead; (0, 0) of anything else.

    Those of AMD, which torch calls "cuda" too, are numbered otherwise.
    """
    if device.type == "meta" and triton is not None:
        target = triton.runtime.driver.active.get_current_target()
        major, minor = divmod(target.arch, 10) if target.backend == "cuda" else (0, 0)
        return major, minor
    is_known = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if is_known else (0, 0)


def is_recorded() -> bool:
    """Whether launches are noted in place of being run, as on tensors without memory they must be."""
    return triton is not None and triton.knobs.runtime.jit_cache_hook is not None


def seeded(device: torch.device, seed: int = 0) -> torch.Generator | None:
    """A generator on `device` that begins at `seed`; none where there are no numbers to draw."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
