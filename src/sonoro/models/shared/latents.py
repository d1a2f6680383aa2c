"""What families whose frames are latents have in common, in their codec's decoder and in their decode step."""

import math

import torch
from torch import Tensor, nn

from sonoro.nn.vocoder import finalize
from sonoro.ops.sample import normal_noise


class LatentDecoder(nn.Module):
    """A decoder of `StreamingCodec` whose frames are patches: `patch` is P and D of [B, T, P, D]."""

    patch: tuple[int, int]

    @property
    def weight(self) -> Tensor:
        """A weight; its dtype and device are those the decoder runs in."""
        return next(self.parameters())

    @staticmethod
    def is_wide(name: str) -> bool:
        """Whether the tensor `name` stays in float32 in any dtype: none does."""
        return False

    def example(self, rows: int, columns: int) -> Tensor:
        count = rows * columns * math.prod(self.patch)
        return (torch.arange(count, device=self.weight.device) * 7919.0).sin().view(rows, columns, *self.patch)

    def latents(self, frames: Tensor) -> Tensor:
        """`frames` [B, T, P, D] in the decoder's dtype."""
        return frames.to(self.weight.dtype)

    def finalize(self) -> None:
        finalize(self)


def check_noise(batch: int, numbers: int, device: torch.device) -> None:
    """Compare the kernel of `numbers` of noise for each of `batch` slots with its reference. Synchronises."""
    index = torch.arange(batch, device=device)
    # Float32 Box-Muller: rounded angles up to 6.3 times radii up to 5.8.
    normal_noise.check(lambda: (index, index, index, numbers), 2e-6)


def weight_bytes(*modules: nn.Module) -> int:
    """Bytes of all parameters of `modules`."""
    return sum(weight.nbytes for module in modules for weight in module.parameters())
