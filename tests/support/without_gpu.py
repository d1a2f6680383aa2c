"""What stands in for a GPU: Triton's interpreter, a watch for what a CUDA graph cannot hold, graphs that are functions.

Whether a kernel is compiled or interpreted is decided by the environment when its module is imported. Tests that need
the interpreter, one of a file, run in a process of their own (test_interpreter.py).
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sonoro.runtime.graphs import GraphPool, Recorded

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets kernels."""

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py, in a process of its own")


def patch_once() -> None:
    """Let Triton's interpreter put itself in the place of its language once, not at each launch and call of a helper,
    and know the types of NumPy: a third of what it takes. Here nothing else uses that language."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, patched = interpreter._patch_lang, set[frozenset[str]]()

    @functools.cache
    def languages_of(function: FunctionType) -> frozenset[str]:
        languages = (interpreter.tl, interpreter.tl.core)
        return frozenset(
            value.__name__ for value in function.__globals__.values() if any(value is one for one in languages)
        )

    def patch_lang(function: FunctionType) -> Any:
        named = languages_of(function)
        if named not in patched:
            patched.add(named)
            patch(function)
        return interpreter._LangPatchScope()

    numpy_type, types = interpreter._get_np_dtype, dict[str, Any]()

    def get_np_dtype(type: Any) -> Any:
        # Of a block as of its elements.
        name = type.scalar.name
        if name not in types:
            types[name] = numpy_type(type)
        return types[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, get_np_dtype
    make_types_once(interpreter.tl.core, interpreter.TritonSemantic)
    # Computes what nobody reads: Triton asserts it in its debug mode alone.
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def make_types_once(core: Any, semantic: Any) -> None:
    """Let Triton's interpreter derive the facts of a type of blocks once, not for each tensor, and compare shapes by
    their numbers: a third of its time."""
    make_type, types = core.block_type.__init__, dict[tuple[int, tuple[int, ...]], dict[str, Any]]()
    broadcast = semantic.broadcast_impl_value

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        # The facts hold the element's type, so that its id stays.
        key = id(element_ty), tuple([getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(size) for size in self.shape])
            types[key] = {**vars(self), "_of_tensor": (core.constexpr(self.numel), sizes)}
        vars(self).update(types[key])

    of_scalar = core.constexpr(1), core.tuple([])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type._of_tensor if type.is_block() else of_scalar

    def broadcast_unequal(self: Any, one: Any, other: Any) -> Any:
        are_blocks = one.type.is_block() and other.type.is_block()
        is_same = are_blocks and one.type.shape.values == other.type.shape.values
        return (one, other) if is_same else broadcast(self, one, other)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    semantic.broadcast_impl_value = broadcast_unequal


if INTERPRETED:
    patch_once()


class _NoHostNumbers(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.tensor, torch.as_tensor, torch.from_numpy), f"{function} copies from the host"
        return function(*args, **(kwargs or {}))


class _NoHostTensors(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What a Python number becomes when it is assigned by index; on CUDA it is then copied to the device.
        assert function != torch.ops.aten.scalar_tensor.default, "a number that is assigned copies from the host"
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.is_meta for tensor in given), f"{function} copies from the host"
        return function(*args, **(kwargs or {}))


@contextmanager
def device_only() -> Iterator[None]:
    """Raises `AssertionError` naming what would copy from the host. For inference on meta tensors alone."""
    with torch.inference_mode(), _NoHostTensors(), _NoHostNumbers():
        yield


class FunctionPool(GraphPool):
    def can_record(self, device):
        return True

    def record(self, function, device):
        outputs = function()

        def replay():
            for kept, made in zip(_parts(outputs), _parts(function()), strict=True):
                kept.copy_(made)

        return Recorded(replay, outputs, 0)

    def recover(self, device):
        pass


def _parts(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [part for part in outputs if isinstance(part, Tensor)]
