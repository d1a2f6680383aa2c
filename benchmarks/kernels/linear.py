"""Times the products of a frame as chains in CUDA graphs: the layers of a backbone and the passes of a depth model.

    python benchmarks/kernels/linear.py [--batches 1 8 64] [--repeats 20]

Each chain runs layer after layer over weights of its own, far more than a cache holds, attention left out: torch's
operations, the fused kernels one after the other, and the fused kernels that start early. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor

from sonoro.ops import linear
from sonoro.ops.plans import plan_for

EPS = 1e-6
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Stack:
    """The sizes of a stack, and how often a frame passes through it. Half the width of `qkv` are queries."""

    width: int
    intermediate: int
    layers: int
    qkv: int
    head: int
    passes: int

    @property
    def bytes_per_frame(self) -> int:
        """Of weights read by one frame."""
        per_layer = self.width * (self.qkv + self.qkv // 2 + 3 * self.intermediate)
        return self.passes * (self.layers * per_layer + self.width * self.head) * DTYPE.itemsize


STACKS = {
    "backbone": Stack(width=2048, intermediate=6144, layers=28, qkv=4096, head=3072, passes=1),
    "depth": Stack(width=1024, intermediate=3072, layers=5, qkv=4096, head=2048, passes=16),
}


def torch_operations() -> tuple[Callable[..., Tensor], ...]:
    return linear.norm_linear_reference, linear.norm_gate_up_reference, linear.linear_add_reference


def fused_operations(enable_pdl: bool) -> tuple[Callable[..., Tensor], ...]:
    def norm_linear(x: Tensor, gain: Tensor, eps: float, weight: Tensor) -> Tensor:
        plan = replace(plan_for(x.shape[0], weight, False), enable_pdl=enable_pdl)
        return linear.norm_linear_kernel(x, gain, eps, weight, plan=plan)

    def norm_gate_up(x: Tensor, gain: Tensor, eps: float, weight: Tensor) -> Tensor:
        plan = replace(plan_for(x.shape[0], weight, True), enable_pdl=enable_pdl)
        return linear.norm_gate_up_kernel(x, gain, eps, weight, plan=plan)

    def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        plan = replace(plan_for(x.shape[0], weight, False), enable_pdl=enable_pdl)
        return linear.linear_add_kernel(x, weight, residual, plan=plan)

    return norm_linear, norm_gate_up, linear_add


def make_weights(stack: Stack) -> list[tuple[Tensor, ...]]:
    def normal(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, device="cuda") / columns**0.5).to(DTYPE)

    width, inner = stack.width, stack.intermediate
    shapes = [(stack.qkv, width), (width, stack.qkv // 2), (2 * inner, width), (width, inner)]
    layers = [tuple(normal(*shape) for shape in shapes) for _ in range(stack.layers)]
    return [*layers, (normal(stack.head, width),)]


def run_frame(
    operations: tuple[Callable[..., Tensor], ...], stack: Stack, weights: list[tuple[Tensor, ...]], x: Tensor
) -> Tensor:
    norm_linear, norm_gate_up, linear_add = operations
    gain = torch.ones(stack.width, dtype=DTYPE, device="cuda")
    *layers, (head,) = weights
    for _ in range(stack.passes):
        hidden = x
        for qkv, o, gate_up, down in layers:
            heads = norm_linear(hidden, gain, EPS, qkv)[:, : stack.qkv // 2]
            hidden = linear_add(heads, o, hidden)
            hidden = linear_add(norm_gate_up(hidden, gain, EPS, gate_up), down, hidden)
        logits = norm_linear(hidden, gain, EPS, head)
    return logits


def time_graph_us(function: Callable[[], Tensor], repeats: int) -> float:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=20)
    settings = parser.parse_args()
    torch.manual_seed(0)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "repeats": settings.repeats,
        "stacks": {name: asdict(stack) for name, stack in STACKS.items()},
    }
    print(json.dumps(result, indent=1))
    print("stack     batch   torch us   fused us   early us   weights TB/s")
    rows = []
    for name, stack in STACKS.items():
        weights = make_weights(stack)
        for batch in settings.batches:
            x = torch.randn(batch, stack.width, device="cuda").to(DTYPE)
            ways = (torch_operations(), fused_operations(False), fused_operations(True))
            torch_us, fused_us, early_us = (
                time_graph_us(partial(run_frame, way, stack, weights, x), settings.repeats) for way in ways
            )
            rate = stack.bytes_per_frame / early_us / 1e6
            print(f"{name:9} {batch:5} {torch_us:10.0f} {fused_us:10.0f} {early_us:10.0f} {rate:14.2f}")
            rows.append(
                {"stack": name, "batch": batch, "torch_us": torch_us, "fused_us": fused_us, "early_us": early_us}
            )
    print(json.dumps({**result, "times": rows}))


if __name__ == "__main__":
    main()
