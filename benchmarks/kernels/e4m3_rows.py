"""How far rows in E4M3 take a backbone from bfloat16, by which products of its layers round them; on a CPU, computed.

`PYTHONPATH=src python benchmarks/kernels/e4m3_rows.py MODEL --out FILE` runs random weights at full size in float32,
layer by layer, and prints the SNR of the last norm's output in dB: of fp8 weights alone, and with the rows of some
products rounded too. Each arm rounds all positions, where an engine rounds those of large batches alone.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from sonoro.bench.machine import commit_of_checkout
from sonoro.models import registry
from sonoro.nn.transformer import DecoderLayer, DecoderStack, causal_attention
from sonoro.ops.eight_bits import dequantized, quantize

PRODUCTS = ("qkv", "o", "gate_up", "down")
ARMS: dict[str, tuple[str, ...]] = {
    "weights alone": (),
    "all": PRODUCTS,
    "gate_up, down": ("gate_up", "down"),
    "o, gate_up, down": PRODUCTS[1:],
    "qkv, gate_up": ("qkv", "gate_up"),
}
"""The products whose rows are rounded."""

SPREAD = 0.04
"""Of the rows of an embedding with random weights."""


def rounded(rows: Tensor) -> Tensor:
    """`rows` [..., K] float32 as E4M3 holds them, with a scale a row."""
    return dequantized(*quantize(rows.flatten(0, -2), "fp8"), torch.float32).view_as(rows)


def run_layer(layer: DecoderLayer, index: int, hidden: dict[str, Tensor], stack: DecoderStack) -> None:
    """Run `layer` in each arm of `hidden` [B, T, width], in place; "plain" is without rounding."""
    attention, feed = layer.float().self_attn, layer.mlp
    parts = dict(zip(PRODUCTS, (attention.qkv_proj, attention.o_proj, feed.gate_up_proj, feed.down_proj), strict=True))
    plain = {name: part.weight.data for name, part in parts.items()}
    rotary = stack.config.rotary(torch.arange(hidden["plain"].shape[1]), torch.float32)
    hidden["plain"] = layer(hidden["plain"], index, rotary, causal_attention)
    for name, part in parts.items():
        part.weight.data = rounded(plain[name])
    for arm, names in ARMS.items():
        with ExitStack() as hooks:
            for name in names:
                hook = parts[name].register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
                hooks.callback(hook.remove)
            hidden[arm] = layer(hidden[arm], index, rotary, causal_attention)
    layer.bfloat16()


@torch.inference_mode()
def measure(model: str, batch: int, positions: int) -> dict[str, float]:
    """SNR in dB by arm."""
    stack = registry.load(model, device="cpu", dtype="bfloat16", load_format="dummy").model.backbone
    torch.manual_seed(0)
    x = SPREAD * torch.randn(batch, positions, stack.config.width)
    hidden = dict.fromkeys(("plain", *ARMS), x)
    for index, layer in enumerate(stack.layers):
        run_layer(layer, index, hidden, stack)
    out = {arm: stack.norm.float()(rows) for arm, rows in hidden.items()}
    signal = out["plain"].square().sum()
    return {arm: round(10 * math.log10(signal / (out[arm] - out["plain"]).square().sum()), 2) for arm in ARMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--positions", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(options.model, options.batch, options.positions)
    sizes = {"batch": options.batch, "positions": options.positions}
    head = {"bench": "e4m3 rows", "model": options.model, "cpu": True, "torch": torch.__version__}
    report = {**head, "commit": commit_of_checkout(), "settings": sizes, "snr_db": found}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
