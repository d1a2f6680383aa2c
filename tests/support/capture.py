"""What a CUDA graph cannot hold, found without a GPU: what is done to meta tensors is watched as it is dispatched.

Reading a value back raises on the meta device by itself; what this adds is values that travel the other way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
