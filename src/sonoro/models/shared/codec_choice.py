"""Tools to choose a codec decoder's dtype: peak activations in float32, and the SNR of half precision."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HALF_LIMIT = 65504.0
"""The largest float16."""

MARGIN = 4.0
"""Headroom that float16 must have over the largest value seen: later speech may be louder."""

SERVED_DB = 40.0
"""Least SNR against float32, in dB, of a half precision that is chosen automatically."""

LEAST_DB = {torch.float16: 40.0, torch.bfloat16: 20.0}
"""Least SNR, in dB, of a dtype that the operator chose; below it a kernel is wrong or values saturate.
With random weights float16 has at least 46 dB and bfloat16 at least 26 dB (references of the fused operations)."""


class Peak(NamedTuple):
    """The largest absolute value in a layer's inputs and outputs; `layer` is its module path in the decoder."""

    layer: str
    value: float


class CodecChoice(NamedTuple):
    """The dtype of a codec's decoder and the reason for it, one clause; `wanted` is the setting.
    `peaks`: those of all layers in float32, largest first; empty without calibration. `tried`: the half precision that
    was compared with float32; `tried_db`: its SNR in dB."""

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
    """`dtype` without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def peaks(root: nn.Module, run: Callable[[], Any]) -> tuple[Peak, ...]:
    """The peak of every module below `root` during `run()`, largest first. Synchronises."""
    largest: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def note(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for value in (*inputs, output):
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    seen = value.detach().abs().max()
                    largest[name] = torch.maximum(largest[name], seen) if name in largest else seen

        return note

    hooks = [module.register_forward_hook(watch(name)) for name, module in root.named_modules() if name]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    found = [Peak(name, float(value)) for name, value in largest.items()]
    # NaN sorts first.
    return tuple(sorted(found, key=lambda peak: (peak.value == peak.value, -peak.value)))


@contextmanager
def no_tf32() -> Iterator[None]:
    """A context without TF32: by default cuDNN's float32 convolutions round to 10 mantissa bits."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def snr_db(found: Tensor, expected: Tensor) -> float:
    """Signal-to-noise ratio of `found` against `expected`, of the same shape, in dB; inf if equal, -inf if `found` is
    not finite. Computed in float64. Synchronises."""
    found, expected = found.double(), expected.double()
    if not found.isfinite().all():
        return -torch.inf
    noise, sound = (found - expected).square().sum(), expected.square().sum()
    return float(10 * (sound / noise).log10()) if noise else torch.inf
