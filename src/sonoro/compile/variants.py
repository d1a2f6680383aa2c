"""Kernel variants as data: recorded at launches on torch's "meta" device, and compiled for a GPU that may be absent.

A variant is what Triton compiles once: a kernel with its constants, argument types, specializations and launch options.
Knows no kernel."""

import contextlib
import ctypes
import functools
import importlib
import io
import json
import logging
import multiprocessing
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from sonoro.compile.launchers import build_launcher
from sonoro.core.errors import ConfigError, border
from sonoro.ops.device import CARDS, Card, recorded
from sonoro.ops.device import card as card_of
from sonoro.ops.optional import triton

if triton is not None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MESSAGE_LENGTH = 300


class Variant(NamedTuple):
    """A compiled form of a kernel; equal variants are compiled once.
    `kernel`: "module:name". `signature`: argument types by name. `constants`: (path, value) of compile-time arguments.
    `attributes`: (path, facts) of the others, such as divisibility by 16. `options`: launch options that differ from
    the target's defaults, such as num_warps. A path is the argument's index, then the indices within a tuple."""

    kernel: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    attributes: tuple[tuple[tuple[int, ...], Any], ...]
    options: tuple[tuple[str, Any], ...]


class Compiled(NamedTuple):
    """The result of compiling a variant: its folder in Triton's cache, `entry`, or an `error`.
    `shared_bytes` per block; `registers` and `spilled_bytes` per thread, -1 if not measured."""

    entry: str
    error: str = ""
    shared_bytes: int = 0
    registers: int = -1
    spilled_bytes: int = -1


class _Elsewhere:
    """A Triton driver that launches nothing and reports `card` as the GPU."""

    def __init__(self, card: Card) -> None:
        self._target = GPUTarget(*card.target)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> Any:
        # Triton keeps compiled kernels by device: these must not mix with those of a real GPU or another recording.
        return self

    def get_current_stream(self, device: Any) -> int:
        return 0


class _Nothing:
    """A stand-in for a compiled kernel, which launches nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...


def current_card() -> Card:
    """The current GPU as a `Card`. Raises `ConfigError` if there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("device_name", None, f"there is no GPU here; it must be one of: {', '.join(CARDS)}")
    return card_of(torch.device("cuda", torch.cuda.current_device()))


def card_named(name: str) -> Card:
    """The known GPU of that driver name. Raises `ConfigError` listing the known ones."""
    if name in CARDS:
        return CARDS[name]
    raise ConfigError("device_name", name, f"it must be one of: {', '.join(CARDS)}")


@contextmanager
def recording(card: Card, note: Callable[[Variant], Any]) -> Iterator[None]:
    """A context in which launches on "meta" tensors, as on `card`, call `note` once per variant and run nothing."""
    elsewhere, kernels = _Elsewhere(card), set[Any]()

    def launched(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernels.add(fn.jit_function)
        compiled, *_ = fn.jit_function.device_caches[elsewhere]
        # Fill Triton's cache for this key, so that later launches of the variant are not described again.
        compiled[key] = _Nothing()
        note(_variant(fn.jit_function, compile["specialization_data"], card))
        return True

    driver = triton.runtime.driver
    with recorded(card), triton.knobs.runtime.scope():
        driver.set_active(elsewhere)
        triton.knobs.runtime.jit_cache_hook = launched
        try:
            yield
        finally:
            # Without a GPU there is no driver to restore.
            with contextlib.suppress(RuntimeError):
                driver.reset_active()
            for kernel in kernels:
                del kernel.device_caches[elsewhere]


def await_kernels(card: Card, wait: Callable[[Variant], None]) -> None:
    """From now on call `wait` with each variant, on `card`, before this process loads it for the first time."""

    def launched(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        # On any error the launch compiles the variant itself.
        with border(lambda error: logger.warning("event=kernel_not_awaited error=%r", error)):
            wait(_variant(fn.jit_function, compile["specialization_data"], card))
        return False

    triton.knobs.runtime.jit_cache_hook = launched


class ReadingZeros(TorchFunctionMode):
    """A context in which `cpu` of a "meta" tensor returns zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs or {})


def _variant(kernel: Any, data: str, card: Card) -> Variant:
    """The variant of `kernel` from Triton's specialization JSON `data`, without the target's default options."""
    given = json.loads(data)
    usual = _target_options(card)
    options = {name: _frozen(value) for name, value in given["options"].items()}
    return Variant(
        f"{kernel.module}:{kernel.fn.__qualname__}",
        tuple((name, _frozen(kind)) for name, kind in given["signature"].items()),
        _frozen(zip(given["constant_keys"], given["constant_vals"], strict=True)),
        _frozen(zip(given["attrs_keys"], given["attrs_vals"], strict=True)),
        tuple((name, value) for name, value in options.items() if value != usual.get(name)),
    )


@functools.cache
def _target_options(card: Card) -> dict[str, Any]:
    """The default launch options on `card`."""
    backend = triton.compiler.compiler.make_backend(GPUTarget(*card.target))
    return {name: _frozen(value) for name, value in backend.parse_options({}).__dict__.items()}


def _frozen(value: Any) -> Any:
    """`value` from JSON as nested tuples, hashable; a mapping, such as a constexpr, becomes its items."""
    if isinstance(value, dict):
        return tuple(("dict", name, _frozen(item)) for name, item in value.items())
    return value if isinstance(value, (str, int, float, type(None))) else tuple(map(_frozen, value))


def source_of(variant: Variant) -> Any:
    """The `ASTSource` of `variant`, equal to the one that Triton makes at a launch."""
    module, _, name = variant.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    constants = {path: _constant(value) for path, value in variant.constants}
    attributes = {path: [list(fact) for fact in facts] for path, facts in variant.attributes}
    return ASTSource(kernel, dict(variant.signature), constants, attributes)


def _constant(value: Any) -> Any:
    match value:
        case (("dict", "constexpr", item),):
            return triton.language.constexpr(item)
        case (("dict", "jit_function", str(name)),):
            module, _, kernel = name.partition(":")
            return getattr(importlib.import_module(module), kernel)
        case str() if triton.language.dtype.is_dtype(value):
            return triton.language.dtype(value)
    return value


def compile_variant(variant: Variant, card: Card, *, is_measured: bool = False) -> Compiled:
    """Compile `variant` for `card` into Triton's cache, if it is not there.
    `is_measured` adds the registers and spills, for which the variant must not be in the cache. Raises `OSError` if the
    cache cannot be written; any other failure is the result's `error`."""
    target, log = GPUTarget(*card.target), io.StringIO()
    try:
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = is_measured
            kernel = triton.compile(source_of(variant), target=target, options=dict(variant.options))
    except OSError:
        raise
    except Exception as error:  # a compiler's failure can be of any type
        # The reason is at the end. Cut the command to reproduce it, which names temporary files.
        message = " ".join(str(error).partition("Repro command")[0].split())
        return Compiled("", f"{type(error).__name__}: {message[-_MESSAGE_LENGTH:]}")
    if target.backend == "cuda":
        build_launcher(kernel)
    (path,) = (path for name, path in kernel.metadata_group.items() if name.endswith(".json"))
    registers, spilled_bytes = _taken(kernel.asm, log.getvalue()) if is_measured else (-1, -1)
    return Compiled(Path(path).parent.name, "", kernel.metadata.shared, registers, spilled_bytes)


def _taken(assembly: dict[str, Any], log: str) -> tuple[int, int]:
    """Registers and spilled bytes per thread, from the `log` of ptxas or the `assembly` for AMD."""
    if "amdgcn" in assembly:
        counts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly["amdgcn"]))
        return int(counts["vgpr_count"]), 4 * int(counts["vgpr_spill_count"])
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    assert spilled is not None, log
    return int(registers[1]), int(spilled[1])


def count_compiled(counts: Counter[str]) -> None:
    """From now on count in `counts`, by kernel, the variants that this process compiles at their launch.
    Logs a warning with the time of each: it is missing in the list of variants, or could not be compiled ahead of time.
    """

    def compiled(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            counts[src.name] += 1
            logger.warning("event=kernel_compiled_at_launch kernel=%s seconds=%.2f", src.name, times.total / 1e6)

    triton.knobs.compilation.listener = compiled


def read_triton_key() -> None:
    """Compute Triton's cache key, a hash of its installation, which takes .4 s once per process."""
    importlib.import_module("triton.runtime.cache").triton_key()


def compilers(processes: int) -> ProcessPoolExecutor:
    """A pool of forks of this process, which must have no other thread, for `compile_variant`. They end with it."""
    read_triton_key()
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, fork, initializer=die_with, initargs=(os.getpid(),))
    # Fork all of them now, before recording begins.
    pool.submit(int).result()
    return pool


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its `parent`, or the parent's thread that started it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
