"""Engines of one model behind one server, each in a process of its own: every request goes to one of them.

Knows of an engine what its client knows. Loads no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from sonoro.core.encoded_voice import EncodedVoice
from sonoro.core.errors import ConfigError, EngineError
from sonoro.core.types import ModelSpec, Reference, SpeechRequest
from sonoro.transport.answer import RequestStream
from sonoro.transport.client import EngineClient, VoiceSource
from sonoro.transport.launch import Limits, cancel_tasks
from sonoro.transport.messages import Ready, WorkerSettings

__all__ = ["Fleet", "device_list"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_MISS_SHARE = 8
"""An engine that has to fetch a voice, which was uploaded or comes with the request, counts as if it had one request
more for so many slots, and at least one."""


class Fleet:
    """Engines with `settings`, one on each of `devices`; `async with Fleet.launch(...) as fleet`.

    A request goes to the engine with the fewest, one with a free slot before any other, and one that has spoken as the
    request's voice before one that would have to fetch it, unless that has much less to do. What is said of a request
    later goes where it went. An engine that crashes fails what it held; until it is replaced the others get its share.
    Belongs to the event loop it was started in. Raises `ConfigError` if they would share a `codec_device`.
    """

    def __init__(self, settings: WorkerSettings, devices: Sequence[str], limits: Limits | None = None) -> None:
        self.settings, config = settings, settings.config
        if len(devices) > 1 and config.codec_device:
            raise ConfigError("codec_device", config.codec_device, f"one engine can have it, not {len(devices)}")
        self.replicas = tuple(
            EngineClient(msgspec.structs.replace(settings, device=device), limits) for device in devices
        )
        self._histories = {client: _VoiceHistory(client) for client in self.replicas}

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
            await cancel_tasks(*starting)
            await self.close()
            raise

    async def close(self) -> None:
        """End every engine; what is still running fails with `EngineClosed`."""
        await asyncio.gather(*(client.close() for client in self.replicas))

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

    async def open(self, request: SpeechRequest) -> RequestStream:
        """The answer to `request`, given to an engine, as `EngineClient.open` gives it."""
        # Whoever has a request of that id knows what to do with another. An engine may be lost again before our turn.
        while (holder := self._find(request.id)) is None and not self.is_ready:
            await self._until_ready()
        return await (holder or self._choose(request)).open(request)

    def append_text(self, request_id: str, text: str) -> None:
        """More text for a live request, as `EngineClient.append_text` takes it."""
        self._client_of(request_id).append_text(request_id, text)

    def end_text(self, request_id: str) -> None:
        """Say that a live request has all of its text; one that has ended stays so."""
        self._client_of(request_id).end_text(request_id)

    def cancel(self, request_id: str) -> None:
        """End a request with the reason `cancelled`, as `EngineClient.cancel` does."""
        self._client_of(request_id).cancel(request_id)

    async def encode_voice(self, references: tuple[Reference, ...]) -> EncodedVoice:
        """The voice of `references`, as `EngineClient.encode_voice` gives it, by the engine with the least to do."""
        while not self.is_ready:
            await self._until_ready()
        ready = [client for client in self.replicas if client.is_ready]
        chosen = min(ready, key=lambda client: client.open_requests)
        encoded = await chosen.encode_voice(references)
        self._histories[chosen].note((encoded.digest, (), None))
        return encoded

    def set_voice_source(self, source: VoiceSource) -> None:
        """Give engines the encoded voices that they lack from `source`, by digest."""
        for client in self.replicas:
            client.voice_source = source

    def _find(self, request_id: str) -> EngineClient | None:
        return next((client for client in self.replicas if client.has_request(request_id)), None)

    def _client_of(self, request_id: str) -> EngineClient:
        """Where a request is; of one that has ended nobody knows, and anybody may be told."""
        return self._find(request_id) or self.replicas[0]

    def _choose(self, request: SpeechRequest) -> EngineClient:
        """Where `request` is spoken soonest, of the engines there are, of which there is one."""
        ready = [client for client in self.replicas if client.is_ready]
        slots, voice = self.settings.config.slots, _voice_of(request)
        # A model's own voices are at hand everywhere.
        cold = max(1, slots // _MISS_SHARE) if request.voice_digest or request.references else 0

        def cost(client: EngineClient) -> tuple[bool, int, bool, int]:
            history, count = self._histories[client], client.open_requests
            is_cold = not history.has(voice)
            return count >= slots, count + is_cold * cold, is_cold, history.requests

        chosen = min(ready, key=cost)
        self._histories[chosen].note(voice)
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
            await cancel_tasks(*waiting)


class _VoiceHistory:
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
    return request.voice_digest or (request.voice and request.voice.lower()), references, request.speaker_embedding
