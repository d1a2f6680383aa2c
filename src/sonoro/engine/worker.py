"""The engine process: `main` with the arguments ENDPOINT PARENT STARTED SETTINGS, as `transport.launch` runs it.

PARENT is a process id, STARTED a time of the monotonic clock, which all processes share, SETTINGS are JSON. One thread
runs the engine, a second encodes voices, ZMQ's I/O thread moves the bytes. An error of one request becomes its
`Failed`; an error of the engine ends the process, and its parent starts another.
"""

from __future__ import annotations

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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from importlib.machinery import ModuleSpec
from types import MappingProxyType
from typing import NoReturn

import msgspec
import torch

from sonoro.compile.cache import Compiling, Standby, compiling, may_stand_by
from sonoro.compile.variants import read_triton_key
from sonoro.core.config import is_log_json, log_level, see_gpus
from sonoro.core.errors import ConfigError, ErrorFacts, SonoroError, border
from sonoro.core.logs import configure_logging
from sonoro.core.types import Failed
from sonoro.engine.engine import Engine
from sonoro.engine.phases import Phases
from sonoro.models.base import LoadedModel
from sonoro.runtime.kernels import card, fallbacks
from sonoro.runtime.memory import device_memory, map_in_pieces
from sonoro.transport.channel import WorkerLink, remove_endpoint
from sonoro.transport.encoded_voice import EncodedVoice
from sonoro.transport.messages import (
    DEFAULT_FACTORY,
    AppendText,
    Cancel,
    EncodeVoice,
    EndText,
    Fatal,
    LoadVoice,
    Pause,
    Ping,
    Pong,
    Ready,
    Resume,
    Shutdown,
    Stats,
    StatsRequest,
    Submit,
    ToEngine,
    VoiceEncoded,
    VoiceFailed,
    VoiceLost,
    VoiceWanted,
    WorkerSettings,
)

logger = logging.getLogger(__name__)

SMALL_MODEL_PARAMETERS = 50_000_000
"""Smaller models run best on one CPU thread: a second gains little (built-in voice, two cores: RTF .33 to .27),
and on shared cores the two wait for each other (RTF .39 with one, 9 with two)."""

CANNOT_START, BROKEN = 2, 1

_IDLE_S = 1.0
_PARENT_CHECK_S = 0.5
_WINDOW = 4096
_WORTH_S = 0.002
"""The shortest wait for late messages: the link waits whole milliseconds, and a single request's ticks are as short."""

_HANDLE_S = 0.005
_ENCODING_S = 0.002
_COMPILING_S = 0.05
"""How often to check whether the kernels of the graphs to come are compiled."""

_QUIET_S = 0.1
"""Idle time before background work: a client often sends its next request at once, which would wait for a capture."""

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
    with contextlib.closing(WorkerLink(endpoint)) as link, _encoder() as executor:
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
                engine.voices.warm_up()
                phases.end("voices")
        # The engine's objects live as long as the process; keep collections from walking them.
        gc.collect()
        gc.freeze()
        worker = Worker(engine, link, loaded.device, compiled)
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


@contextlib.contextmanager
def _encoder() -> Iterator[Executor]:
    """An executor of one thread; jobs that have not begun by the end are dropped."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="encoder")
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def on_own_gpus(settings: WorkerSettings) -> WorkerSettings:
    """Restrict this process to the GPUs that `settings` name by number, and renumber these in the returned settings.

    So code that uses the current device uses the right one, and no memory is taken on another. Call it before CUDA is
    used. Numbers that do not exist, or are equal, are left for the loader to refuse.
    """
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
    spare_threads(loaded)
    return loaded


def check_memory(settings: WorkerSettings) -> None:
    """Raise `ConfigError`, naming what would fit, if `settings` do not fit the GPU's memory. Loads nothing."""
    if settings.factory != DEFAULT_FACTORY or not torch.cuda.is_available() or settings.device == "cpu":
        return
    device = torch.device("cuda" if settings.device == "auto" else settings.device)
    if device.type == "cuda" and (memory := device_memory(device)) is not None:
        # Imported here: other factories start .4 s sooner without the registry.
        footprint = importlib.import_module("sonoro.compile.footprint")
        footprint.refuse_what_does_not_fit(settings.model, settings.config, card(device), memory[0], settings.dtype)


def _load_libraries(settings: WorkerSettings) -> threading.Thread:
    """Start threads that create the CUDA context, load cuDNN and read Triton's key, while the weights are loaded.

    Returns the first of them, to be joined before memory is measured. Call it after the last fork.
    """
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


def spare_threads(loaded: LoadedModel) -> None:
    """Set torch to one CPU thread if the model is on a CPU and small."""
    if loaded.device.type == "cpu" and sum(loaded.parameters.values()) < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


class Worker:
    """The loop of an engine process: handles messages of the link, ticks while there is work, sends events."""

    def __init__(
        self, engine: Engine, link: WorkerLink, device: torch.device, compiled: Compiling | None = None
    ) -> None:
        self._engine, self._link, self._device = engine, link, device
        self._compiled, self._is_compiling = compiled or Compiling(None), compiled is not None
        self._encoding: dict[int, Future[EncodedVoice]] = {}
        self._tick_s: deque[float] = deque(maxlen=_WINDOW)
        self._frame_s: deque[float] = deque(maxlen=_WINDOW)
        self._ticked_at_s: float | None = None
        self._is_stopping = False
        self._quiet_from_s = 0.0

    def ready(self, ready_s: float, phases: Mapping[str, float] = MappingProxyType({})) -> Ready:
        """The `Ready` message of an engine that took `ready_s` and `phases` (seconds by name) to start."""
        self._ready = Ready(
            spec=self._engine.spec,
            ready_s=ready_s,
            report="",
            gpu_memory_mib=0.0,
            graph_memory_mib=0.0,
            fingerprint=self._engine.fingerprint,
            phases=dict(phases),
        )
        return self._ready_now()

    def _ready_now(self) -> Ready:
        """`ready` with the memory and graphs as of now."""
        runner = self._engine.runner
        return msgspec.structs.replace(
            self._ready,
            report=runner.report,
            gpu_memory_mib=self._gpu_memory_mib(),
            graph_memory_mib=runner.graph_memory_mib,
            graphs_to_come=runner.to_come,
        )

    def serve(self) -> None:
        """Serve until `Shutdown`. Raises what a tick raises, after which the engine is unusable."""
        waiting: deque[ToEngine] = deque()
        while not self._is_stopping:
            waiting += self._link.receive(0.0 if waiting or self._engine.has_work else self._idle_s)
            self._handle_some(waiting)
            self._tell_of_voices()
            if not self._engine.has_work:
                self._ticked_at_s = None
                if not waiting:
                    self._work_in_quiet()
                continue
            self._handle_late(waiting)
            started_at_s = time.perf_counter()
            events = self._engine.tick()
            self._note_tick(started_at_s)
            if events:
                self._link.send(events)

    @property
    def _idle_s(self) -> float:
        """How long to wait for a message while the engine is idle, given voices being encoded and background work."""
        if self._engine.is_encoding or self._encoding:
            return _ENCODING_S
        if self._engine.has_quiet_work and not self._compiled.is_done:
            return _COMPILING_S
        return max(0.0, self._quiet_from_s - time.perf_counter()) if self._engine.has_quiet_work else _IDLE_S

    def _work_in_quiet(self) -> None:
        """After a moment without requests, capture one of the graphs to come and send a new `Ready`; when all are
        captured, advance the search for word heads."""
        started_at_s = time.perf_counter()
        if self._is_compiling:  # polled in any case: `is_done` also reaps the compiler process
            self._is_compiling = not self._compiled.is_done
        if self._is_compiling or not self._engine.has_quiet_work:
            return
        if self._encoding or started_at_s < self._quiet_from_s:
            return
        if not self._engine.runner.to_come:
            self._engine.find_heads()
            return
        self._engine.runner.capture_next()
        self._link.send([self._ready_now()])

    def _note_tick(self, started_at_s: float) -> None:
        ended_at_s = time.perf_counter()
        self._quiet_from_s = ended_at_s + _QUIET_S
        self._tick_s.append(ended_at_s - started_at_s)
        if self._ticked_at_s is not None:
            self._frame_s.append(ended_at_s - self._ticked_at_s)
        self._ticked_at_s = ended_at_s

    def _handle_some(self, waiting: deque[ToEngine]) -> None:
        """Handle messages for at most `_HANDLE_S`, so that a burst of requests does not stall the running ones."""
        until_s = time.perf_counter() + _HANDLE_S
        while waiting and (time.perf_counter() < until_s or not self._engine.has_work):
            self._handle(waiting.popleft())

    def _handle_late(self, waiting: deque[ToEngine]) -> None:
        """Handle messages that arrive during `spare_s`, before the device needs the next tick."""
        until_s = 0.0 if self._ticked_at_s is None else self._ticked_at_s + self._engine.spare_s
        while not self._is_stopping and (left_s := until_s - time.perf_counter()) >= _WORTH_S:
            waiting += self._link.receive(0.0 if waiting else left_s)
            self._handle_some(waiting)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                with border(lambda error: self._link.send([Failed.of(request.id, error)])):
                    self._engine.submit(request)
            case AppendText(request_id, text):
                self._engine.append(request_id, text)
            case EndText(request_id):
                self._engine.end_text(request_id)
            case Cancel(request_id):
                self._engine.cancel(request_id)
            case Pause(request_id):
                self._engine.pause(request_id)
            case Resume(request_id):
                self._engine.resume(request_id)
            case StatsRequest(resets):
                self._link.send([self._stats()])
                if resets:
                    self._tick_s.clear()
                    self._frame_s.clear()
            case Ping():
                self._link.send([Pong()])
            case EncodeVoice(number, references):
                with self._voice_border(number):
                    self._encoding[number] = self._engine.encode_voice(references)
            case LoadVoice(digest, data):
                self._engine.voices.load(digest, data)
            case VoiceLost(digest, facts):
                self._engine.voices.lose(digest, facts.error)
            case Shutdown():
                self._is_stopping = True

    def _tell_of_voices(self) -> None:
        """Send the voices that were encoded or failed, and the digests of wanted ones."""
        for number in [number for number, future in self._encoding.items() if future.done()]:
            with self._voice_border(number):
                encoded = self._encoding.pop(number).result()
                self._link.send([VoiceEncoded(number, encoded.digest, encoded.data)])
        if wanted := self._engine.voices.take_wanted():
            self._link.send([VoiceWanted(digest) for digest in wanted])

    def _voice_border(self, number: int) -> AbstractContextManager[None]:
        """A context in which an exception is sent as `VoiceFailed` of request `number`."""
        return border(lambda error: self._link.send([VoiceFailed(number, ErrorFacts.of(error))]))

    def _stats(self) -> Stats:
        engine = self._engine
        return Stats(
            launches=engine.runner.launches,
            prefixes=engine.prefixes,
            running=engine.config.slots - engine.scheduler.free_slots,
            waiting=engine.waiting,
            paused=engine.paused,
            free_slots=engine.scheduler.free_slots,
            free_pages=engine.scheduler.pages.free,
            tick_ms=_percentiles_ms(self._tick_s),
            frame_ms=_percentiles_ms(self._frame_s),
            gpu_memory_mib=self._gpu_memory_mib(),
            broken_samples=engine.broken_samples,
            preemptions=engine.preemptions,
            fallbacks=fallbacks(),
            compiled=dict(self._compiled.counts),
        )

    def _gpu_memory_mib(self) -> float:
        """Peak memory reserved by this process on all GPUs."""
        count = torch.cuda.device_count() if self._device.type == "cuda" else 0
        return sum(torch.cuda.max_memory_reserved(index) for index in range(count)) / 2**20


def _percentiles_ms(durations_s: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 by nearest rank, in ms; zeros without data."""
    ordered = sorted(durations_s) or [0.0]
    return {f"p{percent}": 1000 * ordered[(len(ordered) - 1) * percent // 100] for percent in (50, 95, 99)}


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
