"""What launches are told on other cards, recorded without one."""

import sys
from pathlib import Path

import pytest
from processes import run_command

pytest.importorskip("triton")

IMPORTS = ("small_kernels", "torch._dynamo", "sonoro.compile.kernels")

CODE = """
import torch
from sonoro.ops.attention import HeadNorms, PagedKV
from sonoro.ops.conv import conv
from sonoro.ops.dispatch import Operation
from sonoro.ops.linear import linear_add, norm_gate_up
from sonoro.ops.norm import rms_norm
from sonoro.ops.prompt import keep_prompt
from sonoro.ops.sample import gumbel_noise
from sonoro.compile.variants import card_named, recording

def made(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

rows = torch.zeros(3, dtype=torch.int64, device="meta")
variants = []
with recording(card_named("{card}"), variants.append), torch.no_grad():
    rms_norm(made(3, 64), made(64), 1e-6)
    norm_gate_up(made(3, 64), made(64), 1e-6, made(256, 64))
    linear_add(made(20, 2048), made(2048, 2048), made(20, 2048))
    gumbel_noise(rows, rows, rows, 2, 50)
    conv(made(1, 40, 512), made(1, 512, 512))
    cache = PagedKV(made(9, 32, 8, 128), made(9, 32, 8, 128), made(4, 8, dtype=torch.int32), rows)
    keep_prompt(made(3, 4096), HeadNorms(made(128), made(128), 1e-6), (made(64, 1, 128), made(64, 1, 128)), cache, rows)
assert len(variants) >= 6, variants
assert not any(operation.failure for operation in Operation.known), [op.failure for op in Operation.known]
print(sum(dict(variant.options).get("launch_pdl", False) for variant in variants))
"""


@pytest.mark.parametrize(
    ("card", "has_pdl"),
    [
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA H200", True),
        ("AMD Instinct MI300X", False),
        ("AMD Radeon RX 7900 XTX", False),
    ],
)
def test_dependent_launches_are_asked_for_where_there_are_any_alone(card: str, has_pdl: bool) -> None:
    """AMD's backend refuses the word, and each operation was its reference there."""
    run = run_command([sys.executable, "-c", CODE.replace("{card}", card)], IMPORTS)
    assert run.returncode == 0, run.stderr
    assert (int(run.stdout) > 0) == has_pdl


def test_vectors_of_8_bits_are_unpacked_without_spilling(tmp_path: Path) -> None:
    """Weights of a program are in registers before its rows are: packed, four in each, or there are not enough."""
    code = """
import torch
import triton
from sonoro.ops.linear import norm_linear_kernel
from sonoro.ops.plans import from_text
from sonoro.compile.variants import card_named, compile_variant, recording

triton.knobs.cache.dir = "{cache}"  # what is in a cache is not measured
on, variants = card_named("NVIDIA {card}"), {}
with recording(on, variants.setdefault), torch.inference_mode():
    x, gain, scale = (torch.empty(size, device="meta") for size in ((1, 2048), (2048,), (64,)))
    weight = torch.empty(64, 2048, device="meta").to({dtype})
    norm_linear_kernel(x.bfloat16(), gain.bfloat16(), 1e-6, weight, scale, plan=from_text("gemv 8 1024 4"))
(variant,) = variants
compiled = compile_variant(variant, on, is_measured=True)
assert not compiled.error, compiled.error
assert compiled.spilled_bytes == 0
assert compiled.registers <= 160, compiled
"""
    for card, dtype in (("GeForce RTX 3060", "torch.int8"), ("H200", "torch.float8_e4m3fn")):
        given = code.replace("{card}", card).replace("{dtype}", dtype).replace("{cache}", str(tmp_path))
        run = run_command([sys.executable, "-c", given], IMPORTS)
        assert run.returncode == 0, run.stderr
