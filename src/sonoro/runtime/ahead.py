"""Kernels compiled ahead of their first launch, in several processes at once, into Triton's cache on disk.

What is launched while `recording`, on tensors of torch's device "meta", is noted in place of being run: a program for a
GPU can be followed in seconds without one. Knows no kernel; a launch is told apart as Triton does, by its constants and
by what it knows of its arguments.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, NamedTuple

try:
    import triton
    from triton.backends.compiler import GPUTarget
except ImportError:
    triton = None

__all__ = ["Target", "Variant", "compile_all", "current_target", "recording"]

logger = logging.getLogger(__name__)

_CHECK_S = 0.5
_INDEX_BYTES = 4
_PIPE_BYTES = 1 << 16
"""What a pipe holds at least before its writer has to wait (pipe(7))."""


class Target(NamedTuple):
    """A kind of GPU, as Triton tells them apart."""

    backend: str
    arch: int | str
    warp_size: int


class Variant(NamedTuple):
    """A kernel with all that one compiled form of it is made for; `data` are Triton's own words for that."""

    kernel: Any
    data: str


class _Elsewhere:
    """A driver for Triton that launches nothing and says that the GPU is `target`."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return GPUTarget(*self._target)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def current_target() -> Target:
    """What the current GPU is; Triton must be there, and know it."""
    target = triton.runtime.driver.active.get_current_target()
    return Target(target.backend, target.arch, target.warp_size)


@contextmanager
def recording(target: Target) -> Iterator[list[Variant]]:
    """Within, kernels that are launched are added to what is yielded, each variant once, and nothing is run.

    From then on this process takes its GPU for a `target`, and can launch nothing.
    """
    triton.runtime.driver.set_active(_Elsewhere(target))
    variants: dict[tuple[Any, str], Variant] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        variants.setdefault((fn.jit_function, str(key)), Variant(fn.jit_function, compile["specialization_data"]))
        return True

    noted: list[Variant] = []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        yield noted
    noted.extend(variants.values())


def compile_all(
    variants: Sequence[Variant], processes: int, is_wanted: Callable[[], bool] = lambda: True
) -> list[int | None]:
    """Compile `variants` in forks of this process, which must have no thread of its own; their exit codes.

    A kernel that cannot be compiled is a warning; where the cache cannot be written, a fork fails. They are killed
    once this is not `is_wanted` any more, which is asked twice a second.
    """
    # The longest sources first, as they take longest: the last to be finished should be a small one.
    order = sorted(range(len(variants)), key=lambda index: -len(variants[index].kernel.src))
    reader, writer = os.pipe()
    # All forks read from one pipe, each the index of what it compiles next, until there are no more.
    assert len(order) * _INDEX_BYTES <= _PIPE_BYTES
    for index in order:
        os.write(writer, index.to_bytes(_INDEX_BYTES, "little"))
    os.close(writer)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_compile, args=(variants, reader), daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    os.close(reader)
    while running := [worker for worker in workers if worker.exitcode is None]:
        wait([worker.sentinel for worker in running], _CHECK_S)
        if not is_wanted():
            for worker in running:
                worker.kill()
    return [worker.exitcode for worker in workers]


def _compile(variants: Sequence[Variant], reader: int) -> None:
    while index := os.read(reader, _INDEX_BYTES):
        kernel, data = variants[int.from_bytes(index, "little")]
        try:
            kernel.preload(data)
        except OSError as error:  # it may be well another time, so this must not count as done
            sys.exit(f"kernel {kernel.__name__}: {error!r}")
        except Exception as error:  # a compiler's failure can be of any type; whoever launches it meets it again
            logger.warning("event=compile_failed kernel=%s error=%r", kernel.__name__, error)
