"""The kernel variants that an engine uses, listed from its configuration and compiled before it needs them.

The list is made by a model without memory, which takes every step of every size once on Triton's recorder; so it is
what those steps launch on a card, which need not be there. What is compiled is in Triton's cache, and a record beside
it says which variants and for what. First come those without which no engine is ready: what waits for these alone need
not wait for the others. `python -m sonoro.engine.kernels SETTINGS CARD PARENT` is the process that an engine starts
while it loads its weights, unless it has a fork of itself for that (`kernel_cache.Standby`); what goes wrong there is a
warning, as the engine compiles by itself whatever it does not find.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, as_completed
from typing import Any

import msgspec
import torch

from sonoro.core.config import is_log_json, log_level
from sonoro.core.logs import configure_logging
from sonoro.core.machine import usable_cores
from sonoro.engine.device_state import CHECKED_BATCH
from sonoro.engine.kernel_cache import KernelCache, Record
from sonoro.engine.runner import Runner
from sonoro.engine.voices import Inline, Voices
from sonoro.models import registry
from sonoro.runtime.variants import (
    Card,
    Compiled,
    Variant,
    compile_variant,
    compilers,
    die_with,
    read_triton_key,
    reading_zeros,
    recording,
)
from sonoro.transport.messages import WorkerSettings

__all__ = ["compile_kernels", "list_variants", "main", "prepare", "run"]

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 16
_MAY_PASS = re.compile(r"MemoryError|error code -\d+|raised SIG")
"""How a compiler fails that was killed, or had no memory: another time it may do its work."""


def list_variants(settings: WorkerSettings, card: Card, note: Callable[[Variant], Any]) -> None:
    """Give `note` every variant that an engine of `settings` launches on a `card`, each once, as soon as it is found.

    Those of the checks at start, of prompts beyond the graphs and of encoding voices are among them.
    """
    config = settings.config.resolve()
    config = dataclasses.replace(
        config, prefill_buckets=(*config.prefill_buckets, *config.long_prefills), codec_device="", is_eager=True
    )
    with recording(card, note):
        nowhere = torch.device("meta")
        how = {"load_format": "dummy", "quantization": config.quantization}
        loaded = registry.load(settings.model, device=nowhere, dtype=settings.dtype, **how)
        Runner(loaded.model, config).warm_up()
        with reading_zeros():
            Voices(loaded.model, config, Inline(), nowhere, ()).warm_up()


def compile_kernels(
    settings: WorkerSettings,
    card: Card,
    processes: int,
    tell: Callable[[int, int, Variant, Compiled], None] = lambda *_: None,
) -> Record | None:
    """Compile the kernels of an engine of `settings` for a `card` in forks of this process, which may have no thread.

    None if a record says that they are there. `tell` is called with the number of variants that are done, of how many
    there are, and of the one that is. What fails is tried again, alone; only what fails again for the same reason is
    recorded as what this card cannot have. Waits for any other process that does the same. Raises `OSError` where the
    cache cannot be written, and whatever the model raises.
    """
    cache = KernelCache(settings, card)
    with cache.alone():
        misfits = cache.misfits
        if not misfits:
            return None
        if any(misfits):
            logger.warning("event=kernels_made_anew differs=%s", ",".join(misfits))
        record = Record(cache.made_for)
        with compilers(processes) as pool:
            work = _Work(pool, card, cache)
            try:
                for stage in _stages(settings):
                    # The first are compiled while the others are still being found.
                    list_variants(stage, card, work.begin)
                work.wait(tell)
                for variant, failed in work.failed.items():
                    again = pool.submit(compile_variant, variant, card).result()
                    _note(record, variant, again, failed)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        record.entries.extend(work.entries)
        cache.write(record)
    return record


def _stages(settings: WorkerSettings) -> Iterator[WorkerSettings]:
    """Settings with the sizes that must be there first, and with all."""
    config = settings.config.resolve()
    if config.is_ready_early:
        # The codec is compared with float32 at a size between them.
        checked = tuple(size for size in config.codec_batches if size <= CHECKED_BATCH)
        first = config.first_sizes
        sizes = tuple(sorted({*first.codec_batches, *checked}))
        yield msgspec.structs.replace(settings, config=dataclasses.replace(first, codec_batches=sizes))
    yield settings


class _Work:
    """Variants on their way through the compilers of `pool`, each once: `entries` of the cache, and what has `failed`.

    They are compiled in the order in which they come, and noted in the `cache`.
    """

    def __init__(self, pool: Executor, card: Card, cache: KernelCache) -> None:
        self.entries: list[tuple[str, str]] = []
        self.failed: dict[Variant, Compiled] = {}
        self._pool, self._card, self._cache = pool, card, cache
        self._futures: dict[Variant, Future[Compiled]] = {}

    def begin(self, variant: Variant) -> None:
        """Have `variant` compiled, unless it is on its way."""
        if variant not in self._futures:
            self._futures[variant] = future = self._pool.submit(compile_variant, variant, self._card)
            future.add_done_callback(lambda future: self._note(variant, future))

    def _note(self, variant: Variant, future: Future[Compiled]) -> None:
        # Of what was given up the next start has no kernel either.
        if not future.cancelled() and future.exception() is None:
            self._cache.note(variant)

    def wait(self, tell: Callable[[int, int, Variant, Compiled], None]) -> None:
        """Wait for all; see `compile_kernels`."""
        variants = {future: variant for variant, future in self._futures.items()}
        for done, future in enumerate(as_completed(variants), 1):
            variant, compiled = variants[future], future.result()
            if compiled.error:
                self.failed[variant] = compiled
            else:
                self.entries.append((variant.kernel, compiled.entry))
            tell(done, len(variants), variant, compiled)


def _note(record: Record, variant: Variant, again: Compiled, failed: Compiled) -> None:
    """Keep in `record` what became of `variant`, which had `failed`, when it was compiled `again`."""
    if not again.error:
        record.entries.append((variant.kernel, again.entry))
        return
    logger.warning("event=compile_failed kernel=%s error=%r", variant.kernel, again.error)
    is_lasting = again.error == failed.error and not _MAY_PASS.search(again.error)
    (record.errors if is_lasting else record.unfinished).append((variant.kernel, again.error))


def prepare() -> None:
    """Do, before it is known what to compile, what takes seconds and all kernels need."""
    read_triton_key()
    # Shapes without memory need the compiler's.
    importlib.import_module("torch._dynamo")


def run(settings: WorkerSettings, card: Card) -> None:
    """Compile on all cores in a process that does nothing else; see `compile_kernels`."""
    configure_logging(log_level(), is_json=is_log_json())
    for number in (signal.SIGTERM, signal.SIGINT):
        # Whoever signals a whole group means the engine, which ends this when it ends.
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # an engine that is ready speaks while the rest is compiled
    compile_kernels(settings, card, min(_MOST_PROCESSES, usable_cores()))


def main() -> None:
    """Compile what an engine of SETTINGS needs on CARD, unless the process PARENT has ended."""
    settings, card, parent = sys.argv[1:]
    die_with(int(parent))
    run(msgspec.json.decode(settings, type=WorkerSettings), msgspec.json.decode(card, type=Card))


if __name__ == "__main__":
    main()
