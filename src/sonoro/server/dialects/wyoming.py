"""Wyoming, the protocol of Home Assistant and Rhasspy: events over TCP, without keys.

An event is a line of JSON, then `data_length` bytes of JSON to be merged into its `data`, then `payload_length` bytes
of audio. A connection is adapted to a WebSocket and its events to messages, so that it is a session like any other,
with the same limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, WebSocket
from starlette.types import Message as Received

from sonoro.core.errors import ConfigError, InvalidRequest, SonoroError
from sonoro.core.types import AudioChunk, Finished
from sonoro.core.version import VERSION, extra
from sonoro.server.dialects.shared import Message, language_of, languages_of
from sonoro.server.errors import refusal
from sonoro.server.keys import Caller
from sonoro.server.listening import listen
from sonoro.server.schemas import parse
from sonoro.server.service import Service
from sonoro.server.sessions import LiveSession
from sonoro.server.websocket import SHUTTING_DOWN
from sonoro.server.websocket_session import End
from sonoro.transport.process import cancel_tasks

try:
    from zeroconf import Error as ZeroconfError
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf
except ImportError:  # an extra: without it nothing is announced
    AsyncZeroconf = None  # type: ignore[misc, assignment]

logger = logging.getLogger(__name__)

SERVICE = "_wyoming._tcp.local."

LINGER_S = 1.0
ANNOUNCE_AGAIN_S = 10.0


def wyoming_routes(service: Service) -> APIRouter:
    """A router without paths, whose lifespan listens at the address `wyoming`. Raises `ConfigError` if that fails."""
    config = service.config
    if not config.wyoming:
        return APIRouter()
    host, port = _address(config.wyoming)
    if config.wyoming_name and AsyncZeroconf is None:
        raise ConfigError("wyoming_name", config.wyoming_name, f"it needs zeroconf: {extra('wyoming')}")
    try:
        sock = listen(dataclasses.replace(config, host=host, port=port))
    except ConfigError as error:
        raise ConfigError("wyoming", config.wyoming, error.limit) from error
    if config.wyoming_name and ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
        sock.close()
        limit = "others cannot reach a loopback address; give wyoming as HOST:PORT"
        raise ConfigError("wyoming_name", config.wyoming_name, limit)
    open_now: dict[asyncio.Task[Any], asyncio.Event] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, ending = asyncio.current_task(), asyncio.Event()
        assert task is not None
        open_now[task] = ending
        try:
            # Without a key, on a server with keys, only the model's own voices are available.
            await _converse(service, _Carrier(reader, writer, config.max_message_bytes, ending, service.keys.keyless))
        finally:
            del open_now[task]

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        server = await asyncio.start_server(connected, sock=sock, limit=config.max_message_bytes)
        where = sock.getsockname()[:2]
        logger.info("event=listening dialect=wyoming host=%s port=%d", *where)
        announcing = asyncio.create_task(_announce(config.wyoming_name, *where)) if config.wyoming_name else None
        yield
        server.close()
        if announcing is not None:
            await cancel_tasks(announcing)
        for ending in open_now.values():
            ending.set()
        if tasks := set(open_now):
            _, late = await asyncio.wait(tasks, timeout=config.shutdown_timeout_s)
            await cancel_tasks(*late)

    return APIRouter(lifespan=running)


def _address(given: str) -> tuple[str, int]:
    """Host and port of "PORT" or "HOST:PORT". Without a host only this machine can connect, as there are no keys."""
    host, _, port = given.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise ConfigError("wyoming", given, "it must be PORT, at which this machine alone may connect, or HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


async def _announce(name: str, host: str, port: int) -> None:
    """Announce this server as `name` until cancelled. Tries again while there is no network, or the name is taken."""
    while True:
        try:
            with socket.socket(type=socket.SOCK_DGRAM) as asking:
                asking.connect(("224.0.0.251", 5353))  # sends nothing; selects the outgoing address
                own = asking.getsockname()[0]
            address = own if ipaddress.ip_address(host).is_unspecified else host
            async with AsyncZeroconf() as discovery:
                about = AsyncServiceInfo(SERVICE, f"{name}.{SERVICE}", parsed_addresses=[address], port=port)
                await discovery.async_register_service(about)
                logger.info("event=announced dialect=wyoming name=%s host=%s port=%d", name, address, port)
                await asyncio.Event().wait()
        except (OSError, ZeroconfError) as error:
            logger.warning("event=not_announced dialect=wyoming name=%s reason=%r", name, repr(error))
        await asyncio.sleep(ANNOUNCE_AGAIN_S)


async def _converse(service: Service, carrier: _Carrier) -> None:
    """Serve one connection to its end."""
    connection = WebSocket(carrier.scope, carrier.receive, carrier.send)
    try:
        await WyomingSession(connection, service).run()
    except SonoroError as error:  # too many sessions, or no engine yet
        service.metrics.count_refusal(refusal(error), "wyoming", WyomingSession.dialect)
        with contextlib.suppress(OSError):
            await carrier.write(_failed(error))
    finally:
        await carrier.close()


class _Carrier:
    """Adapts a TCP connection to the application's side of an ASGI WebSocket: events arrive as text, bytes are sent.
    An event may have `most_bytes`, and its data as many again."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        most_bytes: int,
        ending: asyncio.Event,
        caller: Caller,
    ) -> None:
        self._reader, self._writer, self._most_bytes, self._is_connected = reader, writer, most_bytes, False
        state = {"facts": {}, "caller": caller, SHUTTING_DOWN: ending}
        self.scope: dict[str, Any] = {"type": "websocket", "headers": [], "subprotocols": [], "state": state}

    async def receive(self) -> Received:
        if not self._is_connected:
            self._is_connected = True
            return {"type": "websocket.connect"}
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                if (event := await self._read()) is not None:
                    return {"type": "websocket.receive", "text": event}
            except (ValueError, RecursionError) as error:
                # Disconnect: the start of the next event is unknown, and a browser's HTTP request must not be able to
                # smuggle in an event after its first line.
                await self.write(_failed(InvalidRequest("event", "bytes", f"it must be one of Wyoming ({error})")))
        return {"type": "websocket.disconnect", "code": 1006}

    async def send(self, message: Received) -> None:
        if message["type"] == "websocket.send":
            await self.write(message["bytes"])

    async def write(self, event: bytes) -> None:
        self._writer.write(event)
        await self._writer.drain()

    async def close(self) -> None:
        """Close the connection when the client has closed its side, or after `LINGER_S`. Input is drained until then:
        closing with unread input would reset the connection and lose the last output."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                self._writer.write_eof()
                while await self._reader.read(self._most_bytes):
                    pass
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self) -> str | None:
        """Read the next event as one JSON object; None at the end. Raises `ValueError`."""
        if not (line := await self._reader.readline()):
            return None
        event = json.loads(line)
        if not isinstance(event, dict):
            raise ValueError("an event is an object")
        further = json.loads(await self._part(event.pop("data_length", None)) or b"{}")
        data = event.pop("data", None)
        data = {} if data is None else data
        # The session refuses data that is not an object, and goes on.
        event["data"] = data | further if isinstance(data, dict) and isinstance(further, dict) else [data, further]
        await self._part(event.pop("payload_length", None))
        return json.dumps(event)

    async def _part(self, length: object) -> bytes:
        if length is None:
            return b""
        if not isinstance(length, int) or not 0 <= length <= self._most_bytes:
            raise ValueError(f"a length is a whole number of at most {self._most_bytes}")
        return await self._reader.readexactly(length)


def _event(kind: str, data: dict[str, Any], payload: bytes = b"") -> bytes:
    """Encode an event. Its data comes after the line, which clients limit to 64 KiB."""
    body = msgspec.json.encode(data)
    line: dict[str, Any] = {"type": kind, "version": VERSION, "data_length": len(body)}
    if payload:
        line["payload_length"] = len(payload)
    return msgspec.json.encode(line) + b"\n" + body + payload


def _failed(error: SonoroError) -> bytes:
    return _event("error", {"text": str(error), "code": refusal(error).error["code"]})


class _Voice(Message):
    name: str | None = None
    language: str | None = None


class _Data(Message):
    text: str | None = None
    voice: _Voice | None = None
    text_format: str | None = None


class _Event(Message):
    type: str
    data: _Data


class WyomingSession(LiveSession):
    """One connection, with one text after the other, whole or streamed."""

    dialect = "wyoming"
    is_newcomer = True

    def __init__(self, socket: WebSocket, service: Service) -> None:
        super().__init__(socket, service)
        self._is_stream, self._audio = False, dict[str, int]()

    async def on_open(self) -> None:
        """Send nothing: the client begins."""

    async def on_close(self, end: End, error: SonoroError | None) -> None:
        """Send no farewell: the protocol has no event for it."""
        if error is not None:
            await self.refuse(error)

    async def handle(self, message: str) -> None:
        said = parse(_Event, message.encode())
        self.settle()
        text = said.data.text or ""
        match said.type:
            case "describe":
                await self.service.voices.catch_up()
                await self.send(_event("info", self._info()))
            case "ping":
                await self.send(_event("pong", {"text": text}))
            case "synthesize" if not self._is_stream:
                await self._choose(said.data)
                await self._append(text)
                self._end_text()
            case "synthesize-start":
                await self._choose(said.data)
                self._is_stream = True
            case "synthesize-chunk" if self._is_stream:
                if self._utterance is not None or text.strip():
                    await self._append(text)
            case "synthesize-stop" if self._is_stream:
                self._end_text()
                if self._utterance is None:
                    await self._end_stream()
            case "synthesize-chunk" | "synthesize-stop":
                raise InvalidRequest("type", said.type, "synthesize-start comes first")
            case _:
                # Ignored, like unknown events. After a stream its text comes once more as a whole, for servers without
                # streaming.
                logger.debug("event=passed_over dialect=wyoming type=%.40r", said.type)

    async def _choose(self, data: _Data) -> None:
        """Set voice and language of the next text from `data`. Raises `InvalidRequest`."""
        if self._is_stream:
            raise InvalidRequest("synthesize-start", "given", "a stream is open; end it by synthesize-stop")
        if data.text_format not in (None, "text", "ssml"):
            raise InvalidRequest("text_format", data.text_format, "it must be text or ssml")
        voice = data.voice or _Voice()
        language = language_of(voice.language, self.service.speech.spec())
        markup = {"markup": "ssml" if data.text_format == "ssml" else "auto", "on_markup": "plain"}
        await self._configure({"voice": voice.name, "language": language, **markup})
        self._is_skipping = False

    async def on_done(self, task: asyncio.Task[Any]) -> None:
        await super().on_done(task)
        if self._is_stream and not self._is_skipping:
            await self._end_stream()

    async def _end_stream(self) -> None:
        self._is_stream = False
        await self.send(_event("synthesize-stopped", {}))

    def _info(self) -> dict[str, Any]:
        spec = self.service.speech.spec()
        made = {"version": VERSION, "installed": True, "attribution": {"name": "sonoro", "url": ""}}
        voices = [
            {"name": name, "description": name, "languages": languages_of(spec), "speakers": [], **made}
            for name in self.service.voices.names(self.caller, spec)
        ]
        facts = {"name": "sonoro", "description": f"sonoro with {spec.name}", "supports_synthesize_streaming": True}
        others: dict[str, Any] = {kind: [] for kind in ("asr", "handle", "intent", "wake", "mic", "snd")}
        return {"tts": [{**facts, **made, "voices": voices}], **others}

    async def send_event(self, event: str, **fields: Any) -> None:
        if event == "audio.start":
            self._audio = {"rate": fields["sample_rate"], "width": 2, "channels": 1}
            await self.send(_event("audio-start", self._audio))
        elif event == "audio.done":
            await self.send(_event("audio-stop", {}))

    async def send_audio(self, audio: bytes, source: AudioChunk | Finished) -> None:
        if audio:
            await self.send(_event("audio-chunk", self._audio, audio))

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        """Send `error`. A client that waits for the audio of a whole text ignores it, so its connection is closed. One
        that streams text waits for the end of the stream, which still comes."""
        await self.send(_failed(error))
        if not self._is_stream:
            self.end = "closed"
