"""Loads the compiled code for this processor, and mirrors the structures that families share. Knows no model.

The C code of the families is compiled when the package is built or installed, if there is a compiler. Without it `load`
returns None, and everything runs in torch."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from ctypes import POINTER, Structure, c_bool, c_float, c_int64, c_void_p
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


class Product(Structure):
    """`Product` of kernels.h."""

    _fields_ = [("weight", c_void_p), ("packed", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
                ("rows", c_int64), ("columns", c_int64)]  # fmt: skip


class Layer(Structure):
    """`Layer` of stack.h, as are the structures below."""

    _fields_ = [
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "query_norm", "key_norm", "inner_norm", "input_bias")),
        *((name, c_void_p) for name in ("inner_bias", "keys", "values", "watched")), ("watched_count", c_int64),
    ]  # fmt: skip


class Stack(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        *((name, c_void_p) for name in ("norm", "bias", "cos", "sin", "page_table")),
        *((name, c_int64) for name in ("pages_per_slot", "page_positions")),
        *((name, c_int64) for name in ("count", "width", "inner", "heads", "kv_heads", "head_width")),
        ("eps", c_float),
    ]


class Watch(Structure):
    _fields_ = [("spans", c_void_p), ("out", c_void_p), ("heads", c_int64), ("columns", c_int64)]


class Room(Structure):
    FLOATS = ("x", "normed", "wide", "inner", "attended", "scores", "logits", "hidden")
    _fields_ = [*((name, c_void_p) for name in FLOATS), ("slots", c_void_p), ("positions", c_void_p)]


class Conv(Structure):
    """`Conv` of kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "packed", "scale", "bias", "history")),
        *((name, c_int64) for name in ("inputs", "outputs", "taps", "dilation", "kept")),
    ]


class WindowLayer(Structure):
    """`WindowLayer` of window.h."""

    _fields_ = [
        *((name, Conv) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "inner_norm", "out_scale", "down_scale")),
        *((name, c_void_p) for name in ("input_bias", "inner_bias", "ring")),
    ]


class Windows(Structure):
    """`Windows` of window.h."""

    _fields_ = [
        ("layers", POINTER(WindowLayer)), ("frequencies", c_void_p), ("seen", c_void_p),
        *((name, c_int64) for name in ("count", "width", "heads", "kv_heads", "head_width", "window")),
        ("eps", c_float),
    ]  # fmt: skip


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
