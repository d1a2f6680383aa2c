"""Lists the kernel variants that an engine launches, from its configuration, and compiles them ahead of time.

To list them, a model on the "meta" device runs every step at every size once while launches are recorded; no GPU is
needed. The compiled kernels are in Triton's cache, with a record beside it (`cache.Record`). Variants that the
start needs are compiled first. `python -m sonoro.compile.kernels SETTINGS CARD PARENT` is the process that an engine
starts while it loads its weights, unless it has a fork for that (`compiler.Standby`). A failure there is only a
warning: the engine compiles whatever it does not find."""

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

from sonoro.compile.cache import KernelCache, Record
from sonoro.compile.variants import (
    Card,
    Compiled,
    ReadingZeros,
    Variant,
    compile_variant,
    compilers,
    die_with,
    read_triton_key,
    recording,
)
from sonoro.core.config import is_log_json, log_level, usable_cores
from sonoro.core.logs import configure_logging
from sonoro.engine.device_state import CHECKED_BATCH
from sonoro.engine.runner import Runner
from sonoro.engine.voice_encoder import VoiceEncoder
from sonoro.engine.word_heads import watch_some_head
from sonoro.models import registry
from sonoro.runtime.threads import Inline
from sonoro.transport.messages import WorkerSettings

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 16
_MAY_PASS = re.compile(r"MemoryError|error code -\d+|raised SIG")
"""Errors of a compiler that was killed or ran out of memory; the next attempt may succeed."""


def list_variants(settings: WorkerSettings, card: Card, note: Callable[[Variant], Any]) -> None:
    """Call `note` with every variant that an engine of `settings` launches on a `card`, once each, as it is found.
    Includes the checks at start, prompts longer than the graphs, the encoding of voices, and the watching of heads."""
    config = settings.config.resolve()
    prefills = (*config.prefill_buckets, *config.long_prefills)
    config = dataclasses.replace(config, prefill_buckets=prefills, codec_device="", is_eager=True)
    with recording(card, note):
        nowhere = torch.device("meta")
        how = {"load_format": "dummy", "quantization": config.quantization}
        model = registry.load(settings.model, device=nowhere, dtype=settings.dtype, **how).model
        watch_some_head(model)
        runner = Runner(model, config)
        with runner.active():
            runner.graphs.run_all()
        with ReadingZeros():
            VoiceEncoder(model, Inline(), nowhere, ()).warm_up()


def compile_kernels(
    settings: WorkerSettings,
    card: Card,
    processes: int,
    tell: Callable[[int, int, Variant, Compiled], None] = lambda *_: None,
) -> Record | None:
    """Compile the kernels of an engine of `settings` for a `card`, in forks of this process, which may have no threads.

    Returns None if a valid record exists. `tell` gets the number of variants done, their total, the variant and its
    result. A variant that fails is compiled again, alone; only if it fails for the same reason it is recorded as an
    error of this card. Waits for any other process that compiles the same. Raises `OSError` if the cache cannot be
    written, and what the model raises."""
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
                    # Compilation of the first variants overlaps with the listing of the others.
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
    """Settings with the sizes that the start needs, then with all sizes."""
    config = settings.config.resolve()
    if config.is_ready_early:
        # The comparison of the codec with float32 at start uses one of these sizes.
        checked = tuple(size for size in config.codec_batches if size <= CHECKED_BATCH)
        first = config.first_sizes
        sizes = tuple(sorted({*first.codec_batches, *checked}))
        yield msgspec.structs.replace(settings, config=dataclasses.replace(first, codec_batches=sizes))
    yield settings


class _Work:
    """Compiles variants in `pool`, once each and in order, noting them in `cache`.
    `entries` are (kernel, entry of Triton's cache) pairs, `failed` maps variants to their failures."""

    def __init__(self, pool: Executor, card: Card, cache: KernelCache) -> None:
        self.entries: list[tuple[str, str]] = []
        self.failed: dict[Variant, Compiled] = {}
        self._pool, self._card, self._cache = pool, card, cache
        self._futures: dict[Variant, Future[Compiled]] = {}

    def begin(self, variant: Variant) -> None:
        """Submit `variant`, unless it was before."""
        if variant not in self._futures:
            self._futures[variant] = future = self._pool.submit(compile_variant, variant, self._card)
            future.add_done_callback(lambda future: self._note(variant, future))

    def _note(self, variant: Variant, future: Future[Compiled]) -> None:
        # A variant that was cancelled or crashed must be compiled at the next start.
        if not future.cancelled() and future.exception() is None:
            self._cache.note(variant)

    def wait(self, tell: Callable[[int, int, Variant, Compiled], None]) -> None:
        """Wait for all variants; see `compile_kernels` for `tell`."""
        variants = {future: variant for variant, future in self._futures.items()}
        for done, future in enumerate(as_completed(variants), 1):
            variant, compiled = variants[future], future.result()
            if compiled.error:
                self.failed[variant] = compiled
            else:
                self.entries.append((variant.kernel, compiled.entry))
            tell(done, len(variants), variant, compiled)


def _note(record: Record, variant: Variant, again: Compiled, failed: Compiled) -> None:
    """Record the result of compiling `variant` `again` after it had `failed`."""
    if not again.error:
        record.entries.append((variant.kernel, again.entry))
        return
    logger.warning("event=compile_failed kernel=%s error=%r", variant.kernel, again.error)
    is_lasting = again.error == failed.error and not _MAY_PASS.search(again.error)
    (record.errors if is_lasting else record.unfinished).append((variant.kernel, again.error))


def prepare() -> None:
    """Do the slow work that all kernels need, before it is known what to compile."""
    read_triton_key()
    # Meta tensors import it at first use.
    importlib.import_module("torch._dynamo")


def run(settings: WorkerSettings, card: Card) -> None:
    """Run `compile_kernels` on all cores, in a process that does nothing else."""
    configure_logging(log_level(), is_json=is_log_json())
    for number in (signal.SIGTERM, signal.SIGINT):
        # A signal to the process group is for the engine, which kills this process when it ends.
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # the engine may be serving already while the rest is compiled
    compile_kernels(settings, card, min(_MOST_PROCESSES, usable_cores()))


def main() -> None:
    """Compile the kernels of an engine of SETTINGS on CARD; end with process PARENT."""
    settings, card, parent = sys.argv[1:]
    die_with(int(parent))
    run(msgspec.json.decode(settings, type=WorkerSettings), msgspec.json.decode(card, type=Card))


if __name__ == "__main__":
    main()
