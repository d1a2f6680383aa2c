"""Loads the compiled decode step for this processor, and mirrors its structures. Knows no model.

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


class Frame(Structure):
    """`Frame` of a frame.c."""

    _fields_ = [
        ("backbone", Stack), ("depth", Stack), ("watch", Watch), ("room", Room),
        ("head", Product), ("projection", Product), ("depth_heads", POINTER(Product)),
        *((name, c_void_p) for name in ("depth_inputs", "text_table", "code_table", "code_starts")),
        *((name, c_int64) for name in ("depth_codes", "books", "codes", "end", "min_frames")),
        ("suppressed", c_void_p),
        *((name, c_void_p) for name in ("done", "seen", "length", "position", "frames", "pending")),
        *((name, c_void_p) for name in ("text_ids", "first_controls", "rest_controls")),
        ("frames_stride", c_int64), ("text_stride", c_int64),
    ]  # fmt: skip


class FlowBlock(Structure):
    """`FlowBlock` of a frame.c, as are the structures below."""

    _fields_ = [("inner", Product), ("outer", Product), ("norm", c_void_p), ("bias", c_void_p)]


class FlowHead(Structure):
    KINDS = ("lsd", "pointwise", "drifting")
    _fields_ = [
        *((name, Product) for name in ("condition", "noise", "modulations", "output")),
        ("blocks", POINTER(FlowBlock)), *((name, c_void_p) for name in ("times", "ones", "zeros")),
        *((name, c_int64) for name in ("depth", "steps", "kind", "width", "latents")), ("eps", c_float),
    ]  # fmt: skip


class FlowRoom(Structure):
    _fields_ = [(name, c_void_p) for name in ("x", "condition", "modulations", "inner", "outer", "latents")]


class Flow(Structure):
    _fields_ = [
        ("backbone", Stack), ("watch", Watch), ("room", Room), ("head", FlowHead), ("flow", FlowRoom),
        *((name, Product) for name in ("projection", "end", "input")),
        ("std", c_void_p), ("mean", c_void_p), ("earliest_end", c_int64),
        *((name, c_void_p) for name in ("done", "length", "position", "last")),
        *((name, c_void_p) for name in ("options", "controls", "pending", "frames")), ("frames_stride", c_int64),
    ]  # fmt: skip


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


class Snake(Structure):
    """`Snake` of a codec.c, as are the structures below."""

    _fields_ = [("rate", c_void_p), ("scale", c_void_p)]


class UpLayer(Structure):
    _fields_ = [
        *((name, Conv) for name in ("up", "inner", "outer")),
        *((name, c_void_p) for name in ("taps", "bias", "norm", "norm_bias", "gamma", "history")),
        ("rate", c_int64), ("kept", c_int64),
    ]  # fmt: skip


class Unit(Structure):
    _fields_ = [("first", Snake), ("second", Snake), ("conv", Conv), ("point", Conv)]


class Block(Structure):
    _fields_ = [("snake", Snake), ("up", Conv), ("units", Unit * 3), ("rate", c_int64)]


class Codec(Structure):
    ROOMS = 4
    _fields_ = [
        ("tables", c_void_p), ("books", c_int64), ("codes", c_int64),
        *((name, Conv) for name in ("before", "input", "output", "first", "last")),
        ("windows", Windows), ("norm", c_void_p),
        ("ups", POINTER(UpLayer)), ("blocks", POINTER(Block)), ("snake", Snake), ("seen", c_void_p),
        ("room", c_void_p * ROOMS),
        ("up_count", c_int64), ("block_count", c_int64), ("norm_eps", c_float),
    ]  # fmt: skip


class EluBlock(Structure):
    """`EluBlock` of a codec.c, as is the structure below."""

    _fields_ = [("up", Conv), ("conv", Conv), ("point", Conv), ("rate", c_int64)]


class LatentCodec(Structure):
    ROOMS = 4
    _fields_ = [
        *((name, Conv) for name in ("input", "first", "last")), ("taps", c_void_p), ("before", c_void_p),
        ("windows", Windows), ("blocks", POINTER(EluBlock)), ("seen", c_void_p), ("began", c_void_p),
        ("room", c_void_p * ROOMS), *((name, c_int64) for name in ("rate", "block_count", "fade")),
    ]  # fmt: skip


class CompiledCode:
    """The functions of the library at `path`. `level` is the instruction set that it uses."""

    def __init__(self, path: Path, level: str) -> None:
        self.level = level
        self._functions = ctypes.CDLL(str(path))
        self.step = self._function("sonoro_frame", "ppipp")
        self.step_flow = self._function("sonoro_flow", "ppip")
        self.prefill = self._function("sonoro_prefill", "pppppii")
        self.decode = self._function("sonoro_decode", "pppiiip")
        self.decode_latents = self._function("sonoro_decode_latents", "pppiiip")
        self._pack = self._function("sonoro_pack", "piipp", c_bool)

    def _function(self, name: str, arguments: str, result: Any = None) -> Any:
        """The function `name`, whose `arguments` are pointers (p) and integers (i)."""
        function = getattr(self._functions, name)
        function.argtypes, function.restype = [{"p": c_void_p, "i": c_int64}[kind] for kind in arguments], result
        return function

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """The sizes of a `Frame`, a `Codec`, a `Flow` and a `LatentCodec` in C."""
        names = ("frame", "codec", "flow", "latent_codec")
        return tuple(self._function(f"sonoro_{name}_bytes", "", c_int64)() for name in names)

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
