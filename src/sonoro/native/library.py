"""Loads the compiled code for this processor. Knows no model.

The C code of the families is compiled when the package is built or installed, if there is a compiler. Without it `load`
returns None, and everything runs in torch."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from ctypes import c_bool, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.native.build import is_current, levels, library

logger = logging.getLogger(__name__)

BLOCK = 64
"""As in kernels.h."""

_NEEDS = {"avx512": ("AVX512",), "avx2": ("AVX512", "AVX2")}
"""Levels that need more than any processor of the architecture has, and the capabilities in torch's words."""


PACKING = threading.Lock()
"""Held while weights change their form: engines in several threads may share a model."""


class CompiledCode:
    """The functions of the library at `path`. `level` is the instruction set that it uses."""

    def __init__(self, path: Path, level: str) -> None:
        self.level = level
        self._functions = ctypes.CDLL(str(path))
        self.prefill = self.function("sonoro_prefill", "pppppii")
        self._pack = self.function("sonoro_pack", "piipp", c_bool)

    def function(self, name: str, arguments: str, result: Any = None) -> Any:
        """The function `name`, whose `arguments` are pointers (p) and integers (i)."""
        function = getattr(self._functions, name)
        function.argtypes, function.restype = [{"p": c_void_p, "i": c_int64}[kind] for kind in arguments], result
        return function

    def size_bytes(self, structure: str) -> int:
        """The size of a family's `structure` in C."""
        return int(self.function(f"sonoro_{structure}_bytes", "", c_int64)())

    @property
    def packs(self) -> bool:
        """Whether weights are read in 8 bits: not where widening takes longer than reading floats (a frame of the
        built-in voice without AVX2: 21 ms, in place of 11)."""
        return self.level in _NEEDS

    def pack(self, weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """`weight` [N, K] as int8 [ceil(N / BLOCK), K, BLOCK] with a scale [N], where weights are read so. Without a
        `scale` it is float32, stored by input, and packed only if that is exact, as for a checkpoint in 8 bits: a
        nanosecond a number, or the first."""
        rows, columns = weight.shape
        if not self.packs:
            return None
        if scale is not None:
            padded = F.pad(weight, (0, 0, 0, -rows % BLOCK))
            return padded.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous(), scale
        assert weight.t().is_contiguous()
        packed = torch.zeros(-(-rows // BLOCK), columns, BLOCK, dtype=torch.int8)
        scale = torch.empty(rows)
        is_exact = self._pack(weight.data_ptr(), rows, columns, packed.data_ptr(), scale.data_ptr())
        return (packed, scale) if is_exact else None


@functools.cache
def load() -> CompiledCode | None:
    """The fastest library that this processor can run; None if none is compiled. The log says once which, in a warning
    if it is a slow one."""
    capability = torch.backends.cpu.get_cpu_capability()
    known = [level for level in levels() if capability in _NEEDS.get(level, (capability,))]
    found = next((level for level in known if is_current(level)), None)
    reasons = [f"{level} is {'stale' if library(level).is_file() else 'not compiled'}" for level in known]
    reason = "; ".join(reasons[: None if found is None else known.index(found)])
    if known[:1] == ["plain"] and len(levels()) > 1:
        reason = "; ".join(filter(None, ("this processor has no AVX2", reason)))
    how = logging.WARNING if reason else logging.INFO
    logger.log(how, "event=native code=%s processor=%s reason=%r", found or "torch", capability, reason)
    return None if found is None else CompiledCode(library(found), found)
