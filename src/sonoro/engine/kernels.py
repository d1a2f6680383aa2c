"""The kernel variants that an engine uses, listed from its configuration and compiled before it needs them.

The list is made by a model without memory, which takes every step of every size once on Triton's recorder; so it is
what those steps launch on a card, which need not be there. What is compiled is in Triton's cache, and a record beside
it says which variants and for what. `python -m sonoro.engine.kernels SETTINGS CARD PARENT` is the process that an
engine starts while it loads its weights; what goes wrong there is a warning, as the engine compiles by itself whatever
it does not find.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from typing import Any

import msgspec
import torch

from sonoro.core.config import is_log_json, log_level
from sonoro.core.logs import configure_logging
from sonoro.core.machine import usable_cores
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
    reading_zeros,
    recording,
)
from sonoro.transport.messages import WorkerSettings

__all__ = ["compile_kernels", "list_variants", "main"]

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 16


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
    there are, and of the one that is. Waits for any other process that does the same. Raises `OSError` where the cache
    cannot be written, and whatever the model raises.
    """
    cache = KernelCache(settings, card)
    with cache.alone():
        misfits = cache.misfits
        if not misfits:
            return None
        if any(misfits):
            logger.warning("event=kernels_made_anew differs=%s", ",".join(misfits))
        record = Record(cache.made_for, [], [])
        with compilers(processes) as pool:
            futures: dict[Future[Compiled], Variant] = {}

            def begin(variant: Variant) -> None:
                futures[pool.submit(compile_variant, variant, card)] = variant

            try:
                # The first are compiled while the others are still being found.
                list_variants(settings, card, begin)
                for done, future in enumerate(as_completed(futures), 1):
                    variant, compiled = futures[future], future.result()
                    if compiled.error:
                        logger.warning("event=compile_failed kernel=%s error=%r", variant.kernel, compiled.error)
                        record.errors.append((variant.kernel, compiled.error))
                    else:
                        record.entries.append((variant.kernel, compiled.entry))
                    tell(done, len(futures), variant, compiled)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        cache.write(record)
    return record


def main() -> None:
    """Compile what an engine of SETTINGS needs on CARD, unless the process PARENT has ended."""
    settings, card, parent = sys.argv[1:]
    die_with(int(parent))
    for number in (signal.SIGTERM, signal.SIGINT):
        # Whoever signals a whole group means the engine, which ends this when it ends.
        signal.signal(number, signal.SIG_IGN)
    configure_logging(log_level(), is_json=is_log_json())
    compile_kernels(
        msgspec.json.decode(settings, type=WorkerSettings),
        msgspec.json.decode(card, type=Card),
        min(_MOST_PROCESSES, usable_cores()),
    )


if __name__ == "__main__":
    main()
