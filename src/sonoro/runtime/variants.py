"""Kernel variants as data, noted where they would be launched, and compiled for a GPU that need not be there.

A variant is what Triton compiles once: a kernel with its constants, the types of its arguments, what is known of their
values, and its launch options. Launches on tensors of torch's device "meta" are noted while `recording`. Knows no
kernel.
"""

from __future__ import annotations

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
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from sonoro.core.errors import ConfigError, border
from sonoro.ops.device import CARDS, Card, is_recorded, recorded
from sonoro.ops.device import card as card_of
from sonoro.runtime.launchers import build_launcher

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:
    triton = None

__all__ = [
    "Card",
    "Compiled",
    "Variant",
    "await_kernels",
    "card_named",
    "compile_variant",
    "compilers",
    "count_compiled",
    "current_card",
    "die_with",
    "is_recorded",
    "read_triton_key",
    "reading_zeros",
    "recording",
    "source_of",
]

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MESSAGE_LENGTH = 300


class Variant(NamedTuple):
    """One compiled form of a kernel, as data: equal variants are compiled once.

    `kernel` is "module:name"; `signature` the type of each argument by name; `constants` (path, value) of those that
    are compiled in; `attributes` (path, facts) of the others, as that they are divisible by 16; `options` of the launch
    where they are not those of the target, as num_warps. A path is the argument's index, and further ones in a tuple.
    """

    kernel: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    attributes: tuple[tuple[tuple[int, ...], Any], ...]
    options: tuple[tuple[str, Any], ...]


class Compiled(NamedTuple):
    """What became of a variant: its folder in Triton's cache, or an `error`; what a program takes if that was asked.

    `shared_bytes` of a block; `registers` and `spilled_bytes` of a thread, -1 where they were not asked for.
    """

    entry: str
    error: str = ""
    shared_bytes: int = 0
    registers: int = -1
    spilled_bytes: int = -1


class _Elsewhere:
    """A driver for Triton that launches nothing and says that the GPU is a `card`."""

    def __init__(self, card: Card) -> None:
        self._target = GPUTarget(*card.target)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> Any:
        # What Triton keeps by device must be neither a real one's nor another card's.
        return self._target.backend, self._target.arch

    def get_current_stream(self, device: Any) -> int:
        return 0


def current_card() -> Card:
    """What the current GPU is. Raises `ConfigError` where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("device_name", None, "there is no GPU here; it must be one of: " + _known())
    return card_of(torch.device("cuda", torch.cuda.current_device()))


def card_named(name: str) -> Card:
    """The known GPU called `name`, as its driver says it. Raises `ConfigError` naming those that are known."""
    if name in CARDS:
        return CARDS[name]
    raise ConfigError("device_name", name, "it must be one of: " + _known())


def _known() -> str:
    return ", ".join(CARDS)


@contextmanager
def recording(card: Card, note: Callable[[Variant], Any]) -> Iterator[None]:
    """Within, every variant launched on tensors without memory, which stand for those on a `card`, is given to `note`
    once, and nothing is run.
    """
    noted: set[tuple[Any, str]] = set()

    def launched(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if (fn.jit_function, key) not in noted:
            noted.add((fn.jit_function, key))
            note(_variant(fn.jit_function, compile["specialization_data"], card))
        return True

    driver = triton.runtime.driver
    with recorded(card), triton.knobs.runtime.scope():
        driver.set_active(_Elsewhere(card))
        triton.knobs.runtime.jit_cache_hook = launched
        try:
            yield
        finally:
            # Where there is no GPU there is nothing to go back to.
            with contextlib.suppress(RuntimeError):
                driver.reset_active()


def await_kernels(card: Card, wait: Callable[[Variant], None]) -> None:
    """From now on call `wait` before a launch of this process, on a `card`, looks for a variant for the first time."""

    def launched(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        # Whatever goes wrong, the launch compiles by itself.
        with border(lambda error: logger.warning("event=kernel_not_awaited error=%r", error)):
            wait(_variant(fn.jit_function, compile["specialization_data"], card))
        return False

    triton.knobs.runtime.jit_cache_hook = launched


class _ReadingZeros(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs or {})


def reading_zeros() -> AbstractContextManager[Any]:
    """Within, tensors without memory are zeros once they are read back by `cpu`."""
    return _ReadingZeros()


def _variant(kernel: Any, data: str, card: Card) -> Variant:
    """The variant that Triton describes by `data`, its own JSON, without what follows from the target."""
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
    """The options of a launch on a `card` that names none."""
    backend = triton.compiler.compiler.make_backend(GPUTarget(*card.target))
    return {name: _frozen(value) for name, value in backend.parse_options({}).__dict__.items()}


def _frozen(value: Any) -> Any:
    """`value` with tuples for whatever JSON makes of them; a mapping, as of a constexpr, as its items."""
    if isinstance(value, dict):
        return tuple(("dict", name, _frozen(item)) for name, item in value.items())
    return value if isinstance(value, (str, int, float, type(None))) else tuple(map(_frozen, value))


def source_of(variant: Variant) -> Any:
    """What Triton compiles for `variant`, just as it makes it of a launch."""
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
    """Compile `variant` for a `card` into Triton's cache, if it is not there, and say what became of it.

    `is_measured` says what a program takes of the card, for which the cache must not have it. Raises `OSError` where
    the cache cannot be written; any other failure is an error of the variant.
    """
    target, log = GPUTarget(*card.target), io.StringIO()
    try:
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = is_measured
            kernel = triton.compile(source_of(variant), target=target, options=dict(variant.options))
    except OSError:
        raise
    except Exception as error:  # a compiler's failure can be of any type
        # Where it failed comes first, and why last; a command that repeats it names files of this machine.
        message = " ".join(str(error).partition("Repro command")[0].split())
        return Compiled("", f"{type(error).__name__}: {message[-_MESSAGE_LENGTH:]}")
    if target.backend == "cuda":
        build_launcher(kernel)
    (path,) = (path for name, path in kernel.metadata_group.items() if name.endswith(".json"))
    registers, spilled_bytes = _taken(kernel.asm, log.getvalue()) if is_measured else (-1, -1)
    return Compiled(Path(path).parent.name, "", kernel.metadata.shared, registers, spilled_bytes)


def _taken(assembly: dict[str, Any], log: str) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, from the `log` of ptxas or from the `assembly` for AMD."""
    if "amdgcn" in assembly:
        counts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly["amdgcn"]))
        return int(counts["vgpr_count"]), 4 * int(counts["vgpr_spill_count"])
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    assert spilled is not None, log
    return int(registers[1]), int(spilled[1])


def count_compiled(counts: Counter[str]) -> None:
    """From now on count in `counts`, by kernel, each variant that a launch of this process finds in no cache.

    Triton compiles it then and there, as always, and a warning says how long that took: it is missing in the list of
    variants, or could not be compiled ahead.
    """

    def compiled(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            counts[src.name] += 1
            logger.warning("event=kernel_compiled_at_launch kernel=%s seconds=%.2f", src.name, times.total / 1e6)

    triton.knobs.compilation.listener = compiled


def read_triton_key() -> None:
    """Do what a process does once for all its kernels, .4 s: tell one installation of Triton from another."""
    importlib.import_module("triton.runtime.cache").triton_key()


def compilers(processes: int) -> ProcessPoolExecutor:
    """Forks of this process, which may have no thread of its own, to `compile_variant` in. They end when it does."""
    read_triton_key()
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, fork, initializer=die_with, initargs=(os.getpid(),))
    # All are forked now, while nothing is recorded.
    pool.submit(int).result()
    return pool


def die_with(parent: int) -> None:
    """Let this process be killed as soon as its `parent`, or the thread of it that started this one, has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
