"""A tensor on a GPU whose last number is the last before unmapped addresses: reading past it is a fault.

As a script: samples from such logits, all NaN. A fault ends every use of CUDA in its process, so run it in one of its
own.
"""

import ctypes
from typing import Any

import torch

from sonoro.ops.sample import Sampling, sample_kernel

_UNIT_BYTES = 2 << 20
"""What is mapped at once."""


class _Edge:
    """What `torch.as_tensor` takes for `shape` float32 at the end of mapped memory; never freed."""

    def __init__(self, *shape: int) -> None:
        cuda, base, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_ulonglong(), ctypes.c_ulonglong()
        # CUmemAllocationProp, with the type pinned and a location; CUmemAccessDesc, with the same and read and write.
        prop, access = (ctypes.c_int * 64)(1, 0, 1, 0), (ctypes.c_int * 3)(1, 0, 3)
        none, unit = ctypes.c_ulonglong(0), ctypes.c_size_t(_UNIT_BYTES)
        called = (
            cuda.cuMemAddressReserve(ctypes.byref(base), ctypes.c_size_t(2 * _UNIT_BYTES), unit, none, none),
            cuda.cuMemCreate(ctypes.byref(handle), unit, prop, none),
            cuda.cuMemMap(base, unit, ctypes.c_size_t(0), handle, none),
            cuda.cuMemSetAccess(base, unit, access, ctypes.c_size_t(1)),
        )
        assert called == (0, 0, 0, 0), called
        start = base.value + _UNIT_BYTES - 4 * torch.Size(shape).numel()
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape, "typestr": "<f4", "data": (start, False), "strides": None, "version": 3,
        }  # fmt: skip


def main() -> None:
    torch.cuda.init()
    torch.cuda.synchronize()
    ones = torch.ones(4, 1, device="cuda")
    logits = torch.as_tensor(_Edge(4, 3072), device="cuda").fill_(torch.nan)
    ids = sample_kernel(logits, torch.zeros_like(logits), Sampling(ones, (50 * ones).long(), ones, ones < 0))
    assert ((ids >= 0) & (ids < 3072)).all()


if __name__ == "__main__":
    main()
