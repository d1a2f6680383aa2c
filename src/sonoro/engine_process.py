"""The process of an engine: `main` with the arguments ENDPOINT PARENT STARTED SETTINGS, as `transport.launch` runs it.

PARENT is a process id, STARTED a time of the monotonic clock, which all processes share, SETTINGS are JSON. One thread
runs the engine, a second encodes voices, ZMQ's I/O thread moves the bytes. An error while it runs ends the process, and
its parent starts another."""

import contextlib
import dataclasses
import gc
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import ModuleSpec
from typing import NoReturn

import msgspec
import torch

from sonoro.compile.compiler import Standby, compiling, may_stand_by
from sonoro.compile.footprint import refuse_what_does_not_fit
from sonoro.compile.variants import read_triton_key
from sonoro.core.config import is_log_json, log_level, see_gpus
from sonoro.core.errors import ConfigError, ErrorFacts, SonoroError, border
from sonoro.core.logs import configure_logging
from sonoro.engine.engine import Engine
from sonoro.engine.worker import Worker
from sonoro.models.base import LoadedModel
from sonoro.runtime.kernels import card
from sonoro.runtime.memory import device_memory, map_in_pieces
from sonoro.runtime.phases import Phases
from sonoro.runtime.threads import spare_threads
from sonoro.transport.channel import WorkerLink, remove_endpoint
from sonoro.transport.messages import DEFAULT_FACTORY, Fatal, WorkerSettings
from sonoro.transport.shared_link import SharedWorkerLink

logger = logging.getLogger(__name__)

CANNOT_START, BROKEN = 2, 1

_PARENT_CHECK_S = 0.5
_SWITCH_S = 0.0005
"""The GIL switch interval, which bounds how long a tick waits for the encoding thread; Python's default is 5 ms."""


def main() -> NoReturn:
    """Load the model, send `Ready`, and serve until a `Shutdown` message or the parent's death. Ignores signals."""
    endpoint, parent, started_at_s, settings = sys.argv[1:]
    phases = Phases(float(started_at_s))
    phases.end("imports")
    # Imported objects live for ever; keep collections from walking them.
    gc.freeze()
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A signal to the process group reaches the server too, which sends `Shutdown` after its last stream.
        # A handler rather than SIG_IGN, which child processes would inherit.
        signal.signal(number, lambda *_: None)
    wanted = msgspec.json.decode(settings, type=WorkerSettings)
    # It forks: before any thread starts and before the GPU is used.
    standby = Standby() if may_stand_by(wanted) else None
    threading.Thread(target=_die_with, args=(int(parent), endpoint), daemon=True).start()
    sys.setswitchinterval(_SWITCH_S)
    executor = ThreadPoolExecutor(1, thread_name_prefix="encoder")
    link_of = SharedWorkerLink if wanted.has_fronts else WorkerLink
    with contextlib.closing(link_of(endpoint)) as link:
        with border(partial(_cannot_start, link)):
            configure_logging(log_level(), is_json=is_log_json())
            wanted = on_own_gpus(wanted)
            loading = _load_libraries(wanted)
            with compiling(wanted, standby) as compiled:
                check_memory(wanted)
                phases.end("memory")
                loaded = load(wanted)
                # The libraries' memory must not be counted as the engine's state.
                loading.join()
                phases.end("weights")
                engine = Engine(loaded.model, wanted.config, executor=executor, phases=phases)
                engine.voices.encoder.warm_up()
                phases.end("voices")
        # The engine's objects live as long as the process; keep collections from walking them.
        gc.collect()
        gc.freeze()
        worker = Worker(engine, link, loaded.device, lambda: compiled.is_done, compiled.counts)
        waited = {"kernels_awaited": compiled.waited_s} if compiled.waited_s else {}
        link.send([worker.ready(time.monotonic() - float(started_at_s), phases.seconds | waited)])
        with border(partial(_end_broken, link)):
            worker.serve()
    # Skip the interpreter's teardown, which takes a third of a second.
    os._exit(0)


def _cannot_start(link: WorkerLink, error: Exception) -> NoReturn:
    if not isinstance(error, SonoroError):
        logger.exception("event=start_failed")
    link.send([Fatal(ErrorFacts.of(error))])
    link.close()
    # Not sys.exit, which tears down modules that a thread may be loading.
    os._exit(CANNOT_START)


def _end_broken(link: WorkerLink, error: Exception) -> NoReturn:
    # Not by a logger of `sonoro`: those print error messages, which may quote a client's text.
    logging.getLogger("engine").error("event=engine_broken", exc_info=error)
    link.close()
    # Not sys.exit, which waits for the encoding thread while clients wait for their errors.
    os._exit(BROKEN)


def on_own_gpus(settings: WorkerSettings) -> WorkerSettings:
    """Restrict this process to the GPUs that `settings` name by number, and renumber these in the returned settings.
    So code that uses the current device uses the right one, and no memory is taken on another. Call it before CUDA is
    used. Numbers that do not exist, or are equal, are left for the loader to refuse."""
    config = settings.config
    named = [settings.device, config.codec_device] if config.codec_device else [settings.device]
    numbers = {int(name[5:]) for name in named if name.startswith("cuda:") and name[5:].isdecimal()}
    if len(numbers) < len(named) or max(numbers) >= torch.cuda.device_count():
        return settings
    see_gpus(*(int(name[5:]) for name in named))
    if torch.cuda.device_count() != len(named):
        # CUDA had read the environment variable before.
        return settings
    config = dataclasses.replace(config, codec_device="cuda:1" if config.codec_device else "")
    return msgspec.structs.replace(settings, device="cuda", config=config)


def load(settings: WorkerSettings) -> LoadedModel:
    """Load the model of `settings`; a small one on a CPU gets one thread. Raises as its factory does, or `ConfigError`
    if there is no such factory."""
    module, _, function = settings.factory.partition(":")
    spec = _find(module)
    factory = getattr(importlib.import_module(module), function, None) if spec else None
    if not callable(factory):
        raise ConfigError("factory", settings.factory, "it must be module:function, found in the import path")
    how = {"device": settings.device, "dtype": settings.dtype, "load_format": settings.load_format}
    if settings.config.quantization != "none":
        how["quantization"] = settings.config.quantization
    loaded: LoadedModel = factory(settings.model, **how)
    spare_threads(loaded.device, sum(loaded.parameters.values()))
    return loaded


def check_memory(settings: WorkerSettings) -> None:
    """Raise `ConfigError`, naming what would fit, if `settings` do not fit the GPU's memory. Loads nothing."""
    if settings.factory != DEFAULT_FACTORY or not torch.cuda.is_available() or settings.device == "cpu":
        return
    device = torch.device("cuda" if settings.device == "auto" else settings.device)
    if device.type == "cuda" and (memory := device_memory(device)) is not None:
        refuse_what_does_not_fit(settings.model, settings.config, card(device), memory[0], settings.dtype)


def _load_libraries(settings: WorkerSettings) -> threading.Thread:
    """Start threads that create the CUDA context, load cuDNN and read Triton's key, while the weights are loaded.
    Returns the first of them, to be joined before memory is measured. Call it after the last fork."""
    may_use_gpu = settings.factory == DEFAULT_FACTORY and settings.device != "cpu"
    if may_use_gpu:
        # The model's factory does so too, but by then the GPU is in use.
        map_in_pieces()

    def load() -> None:
        # An error here is raised again, and reported, when the model uses the GPU.
        with contextlib.suppress(RuntimeError, AssertionError):
            if may_use_gpu and torch.cuda.is_available():
                ones = torch.ones(1, 8, 8, device="cuda" if settings.device == "auto" else settings.device)
                torch.nn.functional.conv1d(ones, ones).cpu()

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    if may_stand_by(settings):
        threading.Thread(target=read_triton_key, daemon=True).start()
    return loading


def _find(module: str) -> ModuleSpec | None:
    """The import spec of `module`, None if there is none. Errors inside the module are not caught."""
    try:
        return importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        return None


def _die_with(parent: int, endpoint: str) -> None:
    """End this process, and those it started, when `parent` is no longer its parent. Never returns."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    remove_endpoint(endpoint)
    if os.getpgrp() == os.getpid():
        # As the leader of its group it takes the processes it started along.
        os.killpg(0, signal.SIGKILL)
    os._exit(BROKEN)


if __name__ == "__main__":
    main()
