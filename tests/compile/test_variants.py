"""Kernel variants as data: noted where they would be launched, and compiled under the keys that a launch looks for."""

import os
import sys
from pathlib import Path

import pytest
from processes import run_command

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]


def run(code: str, *arguments: str, cache: Path | None = None) -> str:
    """What `code` prints, in a process without threads and where kernels are compiled."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS / "support")]),
        "TRITON_CACHE_DIR": str(cache),
    }
    imports = ("small_kernels", "torch._dynamo", "sonoro.compile.kernels")
    done = run_command([sys.executable, "-c", PREPARED + code, *arguments], imports, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PREPARED = """
import sys
import msgspec
from small_kernels import double, launch, wrong
from sonoro.compile.variants import Variant, card_named, compile_variant, compilers, recording

card = card_named("NVIDIA H200")

def listed(kernel, *blocks):
    variants = []
    with recording(card, variants.append):
        launch(kernel, blocks)
    return variants
"""


def test_a_variant_is_noted_once_and_is_data() -> None:
    code = """
variants = listed(double, 64, 128, 64)
assert [dict(variant.constants)[(3,)] for variant in variants] == [64, 128]
assert {variant.options for variant in variants} == {(("num_warps", 1),)}
assert msgspec.json.decode(msgspec.json.encode(variants), type=list[Variant]) is not None
print(variants[0].kernel, dict(variants[0].signature))
"""
    kinds = {"x": "*fp32", "out": "*fp32", "count": "i32", "BLOCK": "constexpr"}
    assert run(code) == f"small_kernels:double {kinds}"


@pytest.mark.parametrize(
    ("name", "limit"), [("NVIDIA GeForce RTX 3060", 101_376), ("NVIDIA B200", 232_448), ("AMD Instinct MI300X", 65_536)]
)
def test_what_a_program_takes_is_said_for_cards_that_are_not_there(name: str, limit: int, tmp_path: Path) -> None:
    code = """
card = card_named(sys.argv[1])
(variant,) = listed(double, 64)
compiled = compile_variant(variant, card, is_measured=True)
print(compiled.error or "none", compiled.registers, compiled.spilled_bytes, card.shared_bytes)
"""
    error, registers, spilled_bytes, shared_bytes = run(code, name, cache=tmp_path).split()
    assert (error, int(spilled_bytes), int(shared_bytes)) == ("none", 0, limit)
    assert 0 < int(registers) < 256


def test_a_kernel_that_cannot_be_compiled_is_an_error_and_a_cache_that_cannot_be_written_fails(tmp_path: Path) -> None:
    code = """
(variant,) = listed(wrong, 64)
with compilers(2) as pool:
    print(pool.submit(compile_variant, variant, card).result().error)
"""
    assert "there is no such block" in run(code, cache=tmp_path)
    (tmp_path / "file").write_text("")
    code = """
(variant,) = listed(double, 64)
with compilers(2) as pool:
    print(isinstance(pool.submit(compile_variant, variant, card).exception(), OSError))
"""
    assert run(code, cache=tmp_path / "file") == "True"


@pytest.mark.parametrize(
    ("model", "quantization"), [("qwen3-tts-0.6b-customvoice", "none"), ("fish-s2-pro", "int8"), ("voxcpm2", "fp8")]
)
def test_a_launch_looks_for_what_was_compiled(model: str, quantization: str) -> None:
    """Triton's own way from a launch to its cache makes the keys of the list, neither more nor fewer."""
    ours, launched, are_equal = run(KEYS, model, quantization).split()
    assert (ours, are_equal) == (launched, "True")
    assert int(ours) > 50


KEYS = """
import triton
from contextlib import contextmanager
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key
from sonoro.core.config import EngineConfig
from sonoro.compile import kernels
from sonoro.compile.variants import source_of
from sonoro.transport.messages import WorkerSettings

backend, variables = make_backend(GPUTarget(*card.target)), get_cache_invalidating_env_vars()

def key(source, options):
    return get_cache_key(source, backend, backend.parse_options(dict(options)), variables)

class Kernel:
    function = packed_metadata = None
    def launch_metadata(self, *_): return None
    def run(self, *_): pass

launched = set()

def compile(source, target, options):
    launched.add(key(source, options))
    return Kernel()

@contextmanager
def launching(card, note):
    with recording(card, note):
        noted = triton.knobs.runtime.jit_cache_hook

        def go_on(**launch):
            noted(**launch)

        triton.knobs.runtime.jit_cache_hook = go_on
        yield

config = EngineConfig(slots=2, codec_batches=(1,), prefill_buckets=(16,), quantization=sys.argv[2])
settings = WorkerSettings(model=sys.argv[1], device="cuda", config=config)
triton.compiler.compile, kernels.recording, variants = compile, launching, []
kernels.list_variants(settings, card, variants.append)
ours = {key(source_of(variant), variant.options) for variant in variants}
print(len(ours), len(launched), ours == launched)
"""
