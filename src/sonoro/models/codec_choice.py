"""In which dtype a codec's decoder is served: by the peaks of its layers in float32, and by how far from float32 its
audio is then. Knows no codec and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "HALF_LIMIT",
    "LEAST_DB",
    "MARGIN",
    "SERVED_DB",
    "CodecChoice",
    "Peak",
    "dtype_name",
    "has_room",
    "no_tf32",
    "peaks",
    "snr_db",
]

HALF_LIMIT = 65504.0
"""The largest float16."""

MARGIN = 4.0
"""How many times larger than the largest value seen float16 must reach: speech to come may be louder."""

SERVED_DB = 40.0
"""What must be between a sound and its rounding where nobody asked for a dtype."""

LEAST_DB = {torch.float16: 40.0, torch.bfloat16: 20.0}
"""What is expected of a dtype that was asked for; where there is less, a kernel is wrong or values saturate.

With random weights float16 is 46 dB and more from float32, bfloat16 26 and more (references of the fused operations).
"""


class Peak(NamedTuple):
    """The largest absolute value that one layer was given or made; `layer` is its path within the decoder."""

    layer: str
    value: float


class CodecChoice(NamedTuple):
    """What a codec's decoder is served in, and why. `wanted` is what was asked for, `reason` one clause.

    `peaks`, in float32, are those of all layers, the largest first; none where nothing was calibrated. `tried` is the
    half precision that was compared with float32, `tried_db` its signal-to-noise ratio.
    """

    wanted: str
    dtype: torch.dtype
    reason: str
    peaks: tuple[Peak, ...] = ()
    tried: str = ""
    tried_db: float | None = None

    def __str__(self) -> str:
        """One line for a log."""
        peak = f"; peak {self.peaks[0].value:.4g} in {self.peaks[0].layer}" if self.peaks else ""
        ratio = "" if self.tried_db is None else f"; {self.tried} is {self.tried_db:.1f} dB from float32"
        return f"codec in {dtype_name(self.dtype)} ({self.wanted}): {self.reason}{peak}{ratio}"


def dtype_name(dtype: torch.dtype) -> str:
    """`dtype` as people write it."""
    return str(dtype).removeprefix("torch.")


def has_room(found: tuple[Peak, ...]) -> bool:
    """Whether float16 holds the largest of `found` with the margin; what is not finite has none."""
    return found[0].value * MARGIN <= HALF_LIMIT


def peaks(root: nn.Module, run: Callable[[], Any]) -> tuple[Peak, ...]:
    """The peak of every module below `root` while `run` calls it, the largest first. Synchronises."""
    largest: dict[str, Tensor] = {}
    with _watching(root, largest):
        run()
    found = [Peak(name, float(value)) for name, value in largest.items()]
    # What is not a number is the worst.
    return tuple(sorted(found, key=lambda peak: (peak.value == peak.value, -peak.value)))


@contextmanager
def _watching(root: nn.Module, largest: dict[str, Tensor]) -> Iterator[None]:
    """Within, `largest` holds by the path of each module below `root` the largest absolute value it saw."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def note(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for value in (*inputs, output):
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    seen = value.detach().abs().max()
                    largest[name] = torch.maximum(largest[name], seen) if name in largest else seen

        return note

    handles = [module.register_forward_hook(watch(name)) for name, module in root.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def no_tf32() -> Iterator[None]:
    """Within, float32 is float32: the library's convolutions on a GPU round to 10 bits by default."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def snr_db(found: Tensor, expected: Tensor) -> float:
    """How much louder `expected` is than what `found` is off by, in dB: inf if nothing, -inf if not all is finite.

    Both of one shape; computed in float64. Synchronises.
    """
    found, expected = found.double(), expected.double()
    if not found.isfinite().all():
        return -torch.inf
    noise, sound = (found - expected).square().sum(), expected.square().sum()
    return float(10 * (sound / noise).log10()) if noise else torch.inf
