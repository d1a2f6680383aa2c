"""Numbers kept as the bits of integers: what a row needs is staged as int64 in one copy, floats and flags included.

Written by the host, and read on the device without a launch: each cast would be a kernel of its own.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

__all__ = ["pack_floats", "unpack_flags", "unpack_floats"]


def pack_floats(values: ArrayLike) -> NDArray[np.int64]:
    """The bits of `values` [..., 2 N], rounded to float32, in pairs: [..., N]."""
    return np.ascontiguousarray(values, np.float32).view(np.int64)


def unpack_floats(numbers: Tensor) -> Tensor:
    """What `pack_floats` was given, of `numbers` [..., N] int64 with dense rows: a view [..., 2 N]. Capturable."""
    return numbers.view(torch.float32)


def unpack_flags(numbers: Tensor) -> Tensor:
    """Whether each of `numbers` [..., N] int64, 0 or 1 with dense rows, is 1: a view. Capturable."""
    return numbers.view(torch.bool)[..., ::8]  # the lowest byte comes first
