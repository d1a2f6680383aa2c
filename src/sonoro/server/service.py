"""What the endpoints share: engines, keys, voices, speech, metrics. Starts and ends them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

from fastapi import FastAPI

from sonoro.core.errors import EngineClosed, EngineError, SonoroError
from sonoro.core.logs import log_event
from sonoro.server.config import ServerConfig
from sonoro.server.keys import ANONYMOUS, Caller, Keys
from sonoro.server.lexicons import LexiconStore
from sonoro.server.metrics import Metrics
from sonoro.server.middleware import Budget, Newcomers
from sonoro.server.quotas.usage_file import UsageFile
from sonoro.server.shared import Shared
from sonoro.server.speech import SpeechFactory
from sonoro.server.voice_directory import VoiceDirectory
from sonoro.transport.fleet import Fleet
from sonoro.transport.process import cancel_tasks

logger = logging.getLogger(__name__)

MAX_KEYLESS = 64
"""Most connections that have not sent their key yet, and most sessions without a key on a server that has keys."""

VOICES_S = 5.0
"""How often the folder of voices is scanned; a voice deleted by another server is usable for at most that long."""

REPLACED_S = 10.0
"""How long a front process that joins others reads voices and lexicons before it accepts connections in any case."""

ENGINES_S = 0.2
"""How often waiting requests are checked against the engines that are ready."""


class Service:
    """Starts the engines in the background, and holds what the endpoints share.
    `on_failure` is called with the error if the engines cannot be started or none is left."""

    def __init__(
        self,
        client: Fleet,
        config: ServerConfig,
        on_failure: Callable[[SonoroError], None] | None,
        shared: Shared | None = None,
    ) -> None:
        self.shared = shared = shared or Shared.of(config, len(client.replicas))
        self.client, self.config, self.metrics = client, config, Metrics()
        self.keys, self.voices = Keys(config), VoiceDirectory(client, config, shared)
        self.lexicons = LexiconStore(config, self.keys.owners, shared)
        self.speech = SpeechFactory(client, config, self.metrics, self.voices, self.lexicons, shared=shared)
        self._sessions = Budget(config.max_sessions, "{} sessions are open", count=shared.count("sessions"))
        guests = "{} sessions without a key are open"
        self._guests = Budget(MAX_KEYLESS, guests, count=shared.count("guests"))
        self.newcomers = Newcomers(MAX_KEYLESS)
        # Of several front processes, their parent keeps it.
        self._usage = UsageFile.of(config, shared.quotas) if shared.table.fronts == 1 else None
        self.created_s = int(time.time())
        self.is_ending = False
        self._on_failure = on_failure
        self._starting: asyncio.Task[None] | None = None
        self._watching: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """The application's lifespan: start the engines in the background, and end them with the block."""
        self._starting = asyncio.create_task(self._start())
        if self._usage is not None:
            self._usage.start()
        if self.shared.table.fronts > 1:
            self.speech.gate.listen()
            if self.client.is_ready:
                # In the place of a front that has ended: connections wait at its socket, and need not be refused.
                await asyncio.wait({self._starting}, timeout=REPLACED_S)
        try:
            yield
        finally:
            self.is_ending = True
            await cancel_tasks(self._starting)
            await cancel_tasks(*self._watching)
            self.speech.close()
            self.voices.store.close()
            self.lexicons.close()
            await self.client.close()
            if self._usage is not None:
                await self._usage.close()
            self.shared.table.close()

    async def _start(self) -> None:
        try:
            await self.client.start()
            await self.voices.open()
            await self.lexicons.open()
        except Exception as error:
            failure = error if isinstance(error, SonoroError) else EngineError(repr(error))
            self.speech.no_start = f"the engine could not be started: {failure}"
            self._fail(failure)
            return
        ready = self.client.ready
        self.metrics.model, self.speech.no_start = ready.spec.name, None
        self._watching = [asyncio.create_task(watch()) for watch in (self._watch_voices, self._watch_engines)]
        phases = {f"{name}_s": round(seconds, 1) for name, seconds in ready.phases.items()}
        facts = {"model": ready.spec.name, "ready_s": round(ready.ready_s, 1), "graphs_to_come": ready.graphs_to_come}
        log_event(logger, logging.INFO, "ready", facts | phases)

    def count_session(self, caller: Caller) -> AbstractContextManager[None]:
        """A place for a session of `caller`; keyless ones take none from those with a key. Raises `TooManyRequests`."""
        return (self._guests if caller is ANONYMOUS else self._sessions).take()

    @property
    def session_count(self) -> int:
        """How many sessions are open."""
        return self._sessions.taken + self._guests.taken

    def stored_voices(self, owner: str) -> int:
        """How many voices `owner` may register: as its quota says, or an equal share, so that no key fills the store of
        all."""
        own = self.shared.quotas.limits[owner].stored_voices if self.shared.quotas is not None else 0
        return own or max(1, self.client.settings.config.max_registered_voices // self.keys.owners)

    async def until_started(self) -> None:
        """Wait until the engines have started or failed; `speech.unready` says which."""
        if self._starting is not None:
            await asyncio.wait({self._starting})

    async def _watch_voices(self) -> None:
        while True:
            await asyncio.sleep(VOICES_S)
            await self.voices.store.refresh()
            await self.lexicons.refresh()

    async def _watch_engines(self) -> None:
        while self.client.closed_reason is None:
            await asyncio.sleep(ENGINES_S)
            self.speech.gate.wake_waiters()
        self._fail(EngineClosed(self.client.closed_reason))

    def _fail(self, error: SonoroError) -> None:
        """Log that no engine will run again, and call `on_failure`."""
        logger.error("event=no_engine reason=%r", str(error))
        if self._on_failure is not None:
            self._on_failure(error)
