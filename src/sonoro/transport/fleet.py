"""Replicas of one engine behind one server: routes every request to one of them. Loads no torch."""

import asyncio
import contextlib
import logging
import re
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import msgspec

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, EngineError
from sonoro.core.types import Reference, SpeechRequest
from sonoro.transport.client import EngineClient, EngineRequests, RequestStream, VoiceSource
from sonoro.transport.encoded_voice import EncodedVoice
from sonoro.transport.launch import Limits
from sonoro.transport.messages import Ready, WorkerSettings
from sonoro.transport.process import Started, cancel_tasks

logger = logging.getLogger(__name__)

_MISS_SHARE = 8
"""An engine that lacks a request's voice, uploaded or sent along, counts as busier by a request per so many slots."""


class Fleet(Started):
    """Engines with `settings`, one on each of `devices`; `async with Fleet(settings, devices) as fleet`; or `engines`
    that others keep running.

    A request goes to an engine with a free slot if there is one, then to the one with the fewest requests, where an
    engine without the voice in its cache counts as busier. While a crashed engine is replaced, the others get its
    share. Raises `ConfigError` if several engines would share a `codec_device`."""

    def __init__(
        self,
        settings: WorkerSettings,
        devices: Sequence[str],
        limits: Limits | None = None,
        engines: Sequence[EngineRequests] = (),
    ) -> None:
        self.settings, config = msgspec.structs.replace(settings, device=",".join(devices)), settings.config
        check_devices(config, devices)
        self.replicas: tuple[EngineRequests, ...] = tuple(engines) or tuple(
            EngineClient(msgspec.structs.replace(settings, device=device), limits) for device in devices
        )
        self._histories = {client: _VoiceHistory(client) for client in self.replicas}
        self._starting: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start every engine in the background, once; `start` waits for them and raises their errors."""
        self._starting = self._starting or asyncio.create_task(self._start())

    async def start(self) -> None:
        """Start every engine and wait until all are ready. Raises the error of the first to fail."""
        self.begin()
        assert self._starting is not None
        await self._starting

    async def _start(self) -> None:
        starting = [asyncio.create_task(client.start()) for client in self.replicas]
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            undo.push_async_callback(cancel_tasks, *starting)
            await asyncio.gather(*starting)
            undo.pop_all()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.replicas))

    @property
    def ready(self) -> Ready:
        return self.replicas[0].ready

    @property
    def is_ready(self) -> bool:
        """Whether any engine answers."""
        return any(client.is_ready for client in self.replicas)

    @property
    def ready_share(self) -> float:
        """The fraction of engines that are ready; 1 once all are closed, so that nothing waits for them."""
        if self.closed_reason is not None:
            return 1.0
        return sum(client.is_ready for client in self.replicas) / len(self.replicas)

    @property
    def closed_reason(self) -> str | None:
        """Why no engine will run again; None while one runs or may be replaced."""
        reasons = [client.closed_reason for client in self.replicas]
        return None if None in reasons else reasons[0]

    async def open(self, request: SpeechRequest) -> RequestStream:
        """Submit `request` to one of the engines, as `EngineClient.open` does."""
        # A duplicate id goes to the engine that holds it, which handles that. Any engine may crash before this runs.
        while (holder := self._find(request.id)) is None and not self.is_ready:
            await self._until_ready()
        return await (holder or self._choose(request)).open(request)

    async def encode_voice(self, references: tuple[Reference, ...]) -> EncodedVoice:
        """Encode `references` on the engine with the fewest requests, as `EngineClient.encode_voice` does."""
        while not self.is_ready:
            await self._until_ready()
        ready = [client for client in self.replicas if client.is_ready]
        chosen = min(ready, key=lambda client: client.open_requests)
        encoded = await chosen.encode_voice(references)
        self._histories[chosen].record((encoded.digest, (), None))
        return encoded

    def set_voice_source(self, source: VoiceSource) -> None:
        """Let engines fetch encoded voices that they lack from `source`, by digest."""
        for client in self.replicas:
            client.voice_source = source

    def _find(self, request_id: str) -> EngineRequests | None:
        return next((client for client in self.replicas if client.has_request(request_id)), None)

    def _choose(self, request: SpeechRequest) -> EngineRequests:
        """The engine with the least routing cost for `request`; at least one must be ready."""
        ready = [client for client in self.replicas if client.is_ready]
        slots, voice = self.settings.config.slots, _voice_of(request)
        # The model's own voices cost nothing: every engine has them.
        cold = max(1, slots // _MISS_SHARE) if request.voice_digest or request.references else 0

        def cost(client: EngineRequests) -> tuple[bool, int, bool, int]:
            history, count = self._histories[client], client.open_requests
            is_cold = not history.has(voice)
            return count >= slots, count + is_cold * cold, is_cold, history.requests

        chosen = min(ready, key=cost)
        self._histories[chosen].record(voice)
        return chosen

    async def _until_ready(self) -> None:
        """Wait until any engine is ready. Raises as `EngineClient.until_ready` does if none becomes ready."""
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
    """The voices that the process of `client` used last and so has cached; `requests` counts those sent to it."""

    def __init__(self, client: EngineRequests) -> None:
        self._client, self._restarts, self.requests = client, 0, 0
        self._voices: OrderedDict[Hashable, None] = OrderedDict()

    def has(self, voice: Hashable) -> bool:
        if self._restarts != self._client.restarts:
            self._restarts = self._client.restarts
            self._voices.clear()
        return voice in self._voices

    def record(self, voice: Hashable) -> None:
        """Note that a request with `voice` is sent to the engine."""
        self.requests += 1
        self._voices[voice] = None
        self._voices.move_to_end(voice)
        if len(self._voices) > self._client.settings.config.max_voices:
            self._voices.popitem(last=False)


def check_devices(config: EngineConfig, devices: Sequence[str]) -> None:
    """Raises `ConfigError` if an engine of `config` cannot run on each of `devices`."""
    if len(devices) > 1 and config.codec_device:
        raise ConfigError("codec_device", config.codec_device, f"one engine can have it, not {len(devices)}")


def device_list(text: str) -> tuple[str, ...]:
    """Parse a list of devices such as "0,1", "cuda:0,cuda:1" or "cpu,cpu". Raises `ConfigError`."""
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
    """A key of the voice of `request`: equal for equal voices."""
    references = tuple((reference.digest, reference.text, reference.use) for reference in request.references)
    return request.voice_digest or (request.voice and request.voice.lower()), references, request.speaker_embedding
