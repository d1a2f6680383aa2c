"""Engines of one model behind one server, each in a process of its own: every request goes to one of them.

Knows of an engine what its client knows. Loads no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from sonoro.core.errors import ConfigError, EngineCrashed, EngineError
from sonoro.core.types import ModelSpec, Reference, SpeechRequest, VoiceFacts
from sonoro.transport.answer import Answer
from sonoro.transport.client import EngineClient
from sonoro.transport.launch import Limits, drop
from sonoro.transport.messages import Ready, WorkerSettings

__all__ = ["Fleet", "device_list"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_COLD = 8
"""An engine that has to fetch a voice, which was uploaded or comes with the request, counts as if it had one request
more for so many slots, and at least one."""


class Fleet:
    """Engines with `settings`, one on each of `devices`; `async with Fleet.launch(...) as fleet`.

    A request goes to the engine with the fewest, one with a free slot before any other, and one that has spoken as the
    request's voice before one that would have to fetch it, unless that has much less to do. What is said of a request
    later goes where it went. An engine that crashes fails what it held; until it is replaced the others get its share.
    A voice is registered with one engine and read by the others from the folder; several engines without one are given
    one for as long as they live. Belongs to the event loop it was started in. Raises `ConfigError` if they would share
    a `codec_device`.
    """

    def __init__(self, settings: WorkerSettings, devices: Sequence[str], limits: Limits | None = None) -> None:
        self.settings, self._folder = settings, contextlib.ExitStack()
        config = settings.config
        if len(devices) > 1 and config.codec_device:
            raise ConfigError("codec_device", config.codec_device, f"one engine can have it, not {len(devices)}")
        if len(devices) > 1 and not config.voices_folder:
            folder = tempfile.TemporaryDirectory(prefix="sonoro-voices-", ignore_cleanup_errors=True)
            config = replace(config, voices_folder=self._folder.enter_context(folder))
        self.replicas = tuple(
            EngineClient(msgspec.structs.replace(settings, config=config, device=device), limits) for device in devices
        )
        self._warmth = {client: _Warmth(client) for client in self.replicas}
        self._changes: set[asyncio.Task[Any]] = set()
        self._last_look: asyncio.Task[None] | None = None
        self._next_look: asyncio.Task[None] | None = None

    @classmethod
    def launch(
        cls,
        model: str | Path | None = None,
        *,
        devices: Sequence[str] = ("auto",),
        limits: Limits | None = None,
        **settings: Any,
    ) -> Self:
        """Engines that speak as `model`; `settings` are the other fields of `WorkerSettings`."""
        named = None if model is None else str(model)
        return cls(WorkerSettings(model=named, device=",".join(devices), **settings), devices, limits)

    async def start(self) -> None:
        """Start every engine and wait until all are ready. Raises what was wrong with the first to fail."""
        starting = [asyncio.create_task(client.start()) for client in self.replicas]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await drop(*starting)
            await self.close()
            raise

    async def close(self) -> None:
        """End every engine; what is still running fails with `EngineClosed`."""
        try:
            await asyncio.gather(*(client.close() for client in self.replicas))
            await asyncio.gather(*self._changes, return_exceptions=True)
        finally:
            self._folder.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def ready(self) -> Ready:
        """What the first engine said when it was ready."""
        return self.replicas[0].ready

    @property
    def spec(self) -> ModelSpec:
        """What the model can do."""
        return self.ready.spec

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine now."""
        return any(client.is_ready for client in self.replicas)

    @property
    def ready_share(self) -> float:
        """How many of the engines there are now, of all; 1 if there will be none, as nobody should wait then."""
        if self.closed_reason is not None:
            return 1.0
        return sum(client.is_ready for client in self.replicas) / len(self.replicas)

    @property
    def closed_reason(self) -> str | None:
        """Why there will be no engine any more; None as long as there may be one."""
        reasons = [client.closed_reason for client in self.replicas]
        return None if None in reasons else reasons[0]

    @property
    def restarts(self) -> int:
        """How often a replacement was started."""
        return sum(client.restarts for client in self.replicas)

    @property
    def voices(self) -> tuple[VoiceFacts, ...]:
        """The registered voices by name."""
        return next((client.voices for client in self.replicas if client.is_ready), self.replicas[0].voices)

    async def open(self, request: SpeechRequest) -> Answer:
        """The answer to `request`, given to an engine, as `EngineClient.open` gives it."""
        # Whoever has a request of that id knows what to do with another. An engine may be lost again before our turn.
        while (holder := self._holding(request.id)) is None and not self.is_ready:
            await self._until_ready()
        return await (holder or self._choose(request)).open(request)

    def append(self, request_id: str, text: str) -> None:
        """More text for a live request, as `EngineClient.append` takes it."""
        self._holder(request_id).append(request_id, text)

    def end_text(self, request_id: str) -> None:
        """Say that a live request has all of its text; one that has ended stays so."""
        self._holder(request_id).end_text(request_id)

    def cancel(self, request_id: str) -> None:
        """End a request with the reason `cancelled`, as `EngineClient.cancel` does."""
        self._holder(request_id).cancel(request_id)

    async def add_voice(self, name: str, references: tuple[Reference, ...], consent: str | None = None) -> VoiceFacts:
        """Register the voice of `references` with every engine, as `EngineClient.add_voice` does with one."""
        return await self._change(lambda client: client.add_voice(name, references, consent))

    async def delete_voice(self, name: str) -> None:
        """Forget a registered voice, as `EngineClient.delete_voice` does; every engine."""
        await self._change(lambda client: client.delete_voice(name))

    async def refresh_voices(self) -> None:
        """Let the engines there are look at the folder of voices, if there is one, as others may have changed it.

        All who ask while they look wait for one look more: what has been put there before is seen, however many ask.
        """
        if not self.replicas[0].settings.config.voices_folder:
            return
        if self._next_look is None:
            self._next_look = self._begin(self._look_after(self._last_look))
        await asyncio.shield(self._next_look)

    async def _look_after(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait({previous})
        self._last_look, self._next_look = self._next_look, None
        await asyncio.gather(*(_look(client) for client in self.replicas if client.is_ready))

    def _holding(self, request_id: str) -> EngineClient | None:
        return next((client for client in self.replicas if client.holds(request_id)), None)

    def _holder(self, request_id: str) -> EngineClient:
        """Where a request is; of one that has ended nobody knows, and anybody may be told."""
        return self._holding(request_id) or self.replicas[0]

    def _choose(self, request: SpeechRequest) -> EngineClient:
        """Where `request` is spoken soonest, of the engines there are, of which there is one."""
        ready = [client for client in self.replicas if client.is_ready]
        # One that has just been replaced may not have heard of a voice yet.
        able = [client for client in ready if client.has_registered(request.voice)]
        slots, voice = self.settings.config.slots, _voice_of(request)
        # A model's own voices are at hand everywhere.
        cold = max(1, slots // _COLD) if able or request.references else 0

        def cost(client: EngineClient) -> tuple[bool, int, bool, int]:
            warmth, count = self._warmth[client], client.open_requests
            is_cold = not warmth.has(voice)
            return count >= slots, count + is_cold * cold, is_cold, warmth.requests

        chosen = min(able or ready, key=cost)
        self._warmth[chosen].note(voice)
        return chosen

    async def _until_ready(self) -> None:
        """Wait for an engine, whichever is the first. Raises as `EngineClient.until_ready` does if none comes."""
        waiting = [asyncio.create_task(client.until_ready()) for client in self.replicas]
        try:
            for first in asyncio.as_completed(waiting):
                with contextlib.suppress(EngineError):
                    await first
                    return
            await asyncio.gather(*waiting)
        finally:
            await drop(*waiting)

    async def _change(self, act: Callable[[EngineClient], Awaitable[Result]]) -> Result:
        """What `act` makes of one engine; the others look at the voices then. Goes on if its caller leaves."""
        while not self.is_ready:
            await self._until_ready()
        keeper = next(client for client in self.replicas if client.is_ready)

        async def change() -> Result:
            result = await act(keeper)
            await asyncio.gather(*(self._tell(client) for client in self.replicas if client is not keeper))
            return result

        return await asyncio.shield(self._begin(change()))

    async def _tell(self, client: EngineClient) -> None:
        """Let an engine look at the voices; one that does not run, or ends meanwhile, does so once it is back."""
        if not (client.is_ready and await _look(client)):
            self._begin(_refresh(client))

    def _begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # whoever began it may have left


class _Warmth:
    """The voices that the process of `client` spoke as last and so has at hand; `requests` counts all it was given."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self._restarts, self.requests = client, 0, 0
        self._voices: OrderedDict[Hashable, None] = OrderedDict()

    def has(self, voice: Hashable) -> bool:
        if self._restarts != self._client.restarts:
            self._restarts = self._client.restarts
            self._voices.clear()
        return voice in self._voices

    def note(self, voice: Hashable) -> None:
        """It is given a request to speak as `voice`."""
        self.requests += 1
        self._voices[voice] = None
        self._voices.move_to_end(voice)
        if len(self._voices) > self._client.settings.config.max_voices:
            self._voices.popitem(last=False)


def device_list(text: str) -> tuple[str, ...]:
    """The devices that `text` names, as "0,1", "cuda:0,cuda:1" or "cpu,cpu". Raises `ConfigError`."""
    devices = []
    for part in text.split(","):
        device = f"cuda:{part.strip()}" if part.strip().isdecimal() else part.strip()
        if not re.fullmatch(r"cpu|cuda:[0-9]{1,3}", device):
            raise ConfigError("devices", part, 'each must be cpu, or a GPU by number: "0,1" or "cuda:0,cuda:1"')
        if device != "cpu" and device in devices:
            raise ConfigError("devices", text, f"{device} is named twice; an engine takes a GPU for itself")
        devices.append(device)
    return tuple(devices)


def _voice_of(request: SpeechRequest) -> Hashable:
    """Whom `request` is spoken as, alike for those that are spoken as the same."""
    references = tuple((reference.digest, reference.text, reference.use) for reference in request.references)
    return request.voice and request.voice.lower(), references, request.speaker_embedding


async def _refresh(client: EngineClient) -> None:
    """Let an engine look at the voices, as soon as it runs; one that is started meanwhile may have missed a change."""
    while client.closed_reason is None and not await _look(client):
        pass


async def _look(client: EngineClient) -> bool:
    """Whether an engine has looked at the voices. That it could not read the folder is logged."""
    try:
        await client.refresh_voices()
    except EngineCrashed:
        return False
    except EngineError as error:
        logger.warning("event=voices_not_read reason=%r", str(error))
    return True
