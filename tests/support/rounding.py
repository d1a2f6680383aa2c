"""Products that round by their shape, as those of some processor's library do, and more so: what passes under them
compares bits of equal shapes alone, and has tolerances that do not rest on this machine's rounding.

`pytest --rounding N` turns them on, in its own process: every result is up to N steps of its dtype from what it was.
Tests of each family that ask for `rounding_by_shape` have it in every run.
"""

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

PRODUCTS = (
    *("mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out", "baddbmm_"),
    *("mv", "mv.out", "addmv", "addmv.out", "addmv_", "dot", "convolution"),
    "_scaled_dot_product_flash_attention_for_cpu",
)

HALF_FLIPS = 64
"""One result in as many is another of 16 bits: what is summed in float32 differs only near the middle of two steps."""

_library: list[torch.library.Library] = []


@functools.lru_cache(maxsize=4096)
def factors(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, out: tuple[int, ...], most: int) -> Tensor:
    """What a product of `shapes` is multiplied by: 1, or up to `most` steps of `dtype` more or less."""
    # The hash of integers is the same in every process.
    generator = torch.Generator().manual_seed(hash((shapes, out)) & 0x7FFFFFFF)
    if dtype.itemsize > 2:
        steps = torch.randint(-most, most + 1, out, generator=generator)
    else:
        steps = torch.randint(0, HALF_FLIPS, out, generator=generator).eq(0).long()
    return (1 + steps.double() * torch.finfo(dtype).eps).to(dtype)


def by_shape(kernel: Any, most: int) -> Any:
    def product(keys: Any, *given: Any, **named: Any) -> Any:
        found = kernel.call_boxed(keys, *given, **named)
        first = found[0] if isinstance(found, tuple) else found
        if first.is_floating_point() and first.numel() and first.device.type == "cpu":
            shapes = tuple(tuple(value.shape) for value in given if isinstance(value, Tensor))
            first.mul_(factors(shapes, first.dtype, tuple(first.shape), most))
        return found

    return product


def round_by_shape(most: int) -> None:
    """From now on, in this process; by up to `most` steps, or in 16 bits by one, now and then."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # That they are overridden is what is wanted.
        warnings.simplefilter("ignore")
        for name in PRODUCTS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, by_shape(kernel, most), "CPU", with_keyset=True)
    _library.append(library)


@pytest.fixture
def rounding_by_shape() -> Iterator[None]:
    """For one test, whatever the processor."""
    is_on_anyway = bool(_library)
    if not is_on_anyway:
        round_by_shape(8)
    yield
    if not is_on_anyway:
        _library.pop()._destroy()
