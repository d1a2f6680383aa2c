"""What the assembly of products in 8 bits makes of each byte, computed on the CPU from what is compiled for an H200.

The blocks of assembly are taken out of the PTX of the kernels, and their few instructions, as PTX defines them, are
done on arrays of words. Loads before a block show which bytes of memory its register holds.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sonoro.compile.variants import Variant, card_named, recording, source_of
from sonoro.ops.linear import gate_up_kernel, linear_kernel
from sonoro.ops.plans import from_text

triton = pytest.importorskip("triton")

Words = Any
"""An array of registers' contents."""

BYTES = np.arange(256, dtype=np.uint32)
RANDOM = np.random.default_rng(0).integers(0, 2**32, 2**14, dtype=np.uint32)


def blocks(plan: str, folder: Path, *, is_gated: bool = False) -> Iterator[tuple[list[str], str]]:
    """The lines ahead of each block of assembly that widens, and the block, in the PTX for a product in fp8."""
    on, variants = card_named("NVIDIA H200"), dict[Variant, None]()
    with recording(on, variants.setdefault), torch.inference_mode():
        x, weight, scale = (torch.empty(shape, device="meta") for shape in ((64, 512), (512, 512), (512,)))
        rows = x[:1] if plan.startswith("gemv") else x
        product = gate_up_kernel if is_gated else linear_kernel
        product(rows.bfloat16(), weight.to(torch.float8_e4m3fn), scale, plan=from_text(plan))
    (variant,) = (one for one in variants if one.kernel.endswith(("_gemv_kernel", "tile_kernel")))
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        target = triton.backends.compiler.GPUTarget(*on.target)
        ptx = triton.compile(source_of(variant), target=target, options=dict(variant.options)).asm["ptx"]
    lines = ptx.splitlines()
    for number, line in enumerate(lines):
        if "prmt.b32" in line or "e4m3x2" in line:
            yield lines[:number], line.strip()


def halves(words: Words) -> tuple[Words, Words]:
    return words & np.uint32(0xFFFF), words >> np.uint32(16)


def joined(low: Words, high: Words) -> Words:
    return low | high << np.uint32(16)


def bfloat16(half: Words) -> Words:
    return (half << np.uint32(16)).view(np.float32).astype(np.float64)


def as_bfloat16(value: Words) -> Words:
    """The bits of numbers, each of which bfloat16 holds exactly."""
    bits = value.astype(np.float32).view(np.uint32)
    assert not np.any(bits & np.uint32(0xFFFF))
    return bits >> np.uint32(16)


def e4m3(byte: Words) -> Words:
    """float32 of the bytes by torch."""
    return torch.from_numpy(byte.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()


def permuted(words: Words, other: Words, selector: int) -> Words:
    """`prmt.b32`: each nibble of the selector names one of eight bytes, its highest bit that byte's sign alone."""
    found = np.zeros_like(words)
    for place in range(4):
        nibble = selector >> 4 * place & 0xF
        byte = (words if nibble & 7 < 4 else other) >> np.uint32(8 * (nibble & 3)) & np.uint32(0xFF)
        byte = (byte >> np.uint32(7)) * np.uint32(0xFF) if nibble & 8 else byte
        found |= byte << np.uint32(8 * place)
    return found


def fused(a: Words, b: Words, c: Words) -> Words:
    """`fma.rn.bf16x2`, of what is exact."""
    parts = zip(halves(a), halves(b), halves(c), strict=True)
    return joined(*(as_bfloat16(bfloat16(one) * bfloat16(two) + bfloat16(three)) for one, two, three in parts))


def run(block: str, source: str, words: Words) -> dict[str, Words]:
    """The registers after `block`, whose register `source` held `words`."""
    registers = {source: words}

    def read(name: str) -> Words:
        return registers[name] if name in registers else np.full_like(words, int(name, 0))

    instructions: dict[str, Callable[..., Words]] = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "mul.lo.u32": lambda a, b: a * b,
        "prmt.b32": lambda a, b, selector: permuted(a, b, int(selector[0])),
        "fma.rn.bf16x2": fused,
        "cvt.rn.f16x2.e4m3x2": lambda a: joined(
            *(e4m3(byte).astype(np.float16).view(np.uint16).astype(np.uint32) for byte in (a & 0xFF, a >> 8 & 0xFF))
        ),
        "cvt.f32.f16": lambda a: a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32),
    }
    for instruction in re.sub(r"\.reg[^;]*;", "", block).replace("mov.b32 {", "split (").split(";"):
        name, _, operands = instruction.strip(" {}").partition(" ")
        if name == "split":
            low, high, whole = (part.strip(" (}") for part in operands.split(","))
            registers[low], registers[high] = halves(read(whole))
        elif name:
            target, *given = (part.strip() for part in operands.split(","))
            registers[target] = instructions[name](*map(read, given))
    return registers


def is_number(bytes_: Words) -> Words:
    """Whether each is no NaN, which no weight is."""
    return (bytes_ & 0x7F) != 0x7F


@pytest.mark.parametrize(
    ("plan", "is_gated", "together"),
    [
        ("tile 64 64 64 1 1 3 4 swapped", False, 2),
        ("tile 64 64 64 1 1 3 4 swapped", True, 2),
        ("tile 64 64 64 1 1 3 4", False, 4),
        ("tile 16 16 64 4 1 3 4 swapped", False, 4),
        ("tile 64 32 64 1 1 3 4", True, 4),
        ("gemv 8 512 2", False, 4),
    ],
)
def test_each_byte_is_what_it_stands_for(plan: str, is_gated: bool, together: int, tmp_path: Path) -> None:
    found = list(blocks(plan, tmp_path, is_gated=is_gated))
    assert found
    # Every byte at every place, among others; of a pair whatever else the register holds.
    every = np.concatenate(
        [RANDOM[:256] & ~np.uint32(0xFF << 8 * place) | BYTES << np.uint32(8 * place) for place in range(4)]
    )
    words = np.concatenate([every, RANDOM])
    for ahead, block in found:
        targets = re.findall(r"(?:bf16x2|cvt\.f32\.f16) (%r\d+)", block)
        (source,) = set(re.findall(r"%r\d+", block)) - set(targets)
        # As memory has them: nothing is done to the register between the load and the block.
        *_, filled = (line for line in ahead if re.search(rf"{source}\b", line))
        assert re.search(r"\b(ld|ldmatrix)\.", filled), filled
        if together == 2:
            assert "shared.b16" in filled
        registers = run(block, source, words)
        values = [e4m3(words >> np.uint32(8 * place) & np.uint32(0xFF)) for place in range(together)]
        numbers = [is_number(words >> np.uint32(8 * place)) for place in range(together)]
        made = [registers[name] for name in targets]
        if len(made) == together:
            widened = [one.view(np.float32) for one in made]
        else:
            widened = [bfloat16(half) for one in made for half in halves(one)]
        assert len(widened) == together
        for one, value, numeric in zip(widened, values, numbers, strict=True):
            assert np.array_equal(one[numeric], value[numeric])
            assert np.array_equal(np.signbit(one[numeric]), np.signbit(value[numeric]))
