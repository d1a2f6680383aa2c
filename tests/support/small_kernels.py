"""Small kernels to compile without a GPU: one that any card can have, and one that none can."""

import torch
import triton
import triton.language as tl
from triton.runtime.cache import triton_key

# The digest of Triton itself, a third of a second of a processor: forks of who imports this have it.
triton_key()


@triton.jit
def double(x, out, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, 2 * tl.load(x + index, mask=index < count), mask=index < count)


@triton.jit
def wrong(x, out, count, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0, "there is no such block")


def launch(kernel: triton.JITFunction, blocks: tuple[int, ...]) -> None:
    """Launch `kernel` with each of `blocks`, as it would be on tensors of 100 numbers without memory."""
    x = torch.empty(100, device="meta")
    for block in blocks:
        kernel[(1,)](x, torch.empty_like(x), 100, block, num_warps=1)
