"""A proxy between clients and the server that notes what passes: `make clients RECORD=FOLDER`.

What is noted is replayed by tests/server/dialects/test_replays.py, which needs no client. What a client sends is kept
as it is; of what it is answered, status and shape: the names and types of fields, and values of those alone that tell
messages apart. Of the shapes of audio and times each is kept once between two other messages.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from wire_shapes import is_flow, messages_of, shape

KEPT = {
    *("accept", "authorization", "content-type", "user-agent", "x-api-key", "xi-api-key", "cartesia-version"),
    *("origin", "sec-websocket-protocol"),
}
"""Headers of a client that may matter; what it says of its machine does not."""

OF_TRANSPORT = {
    *("host", "connection", "upgrade", "content-length", "transfer-encoding", "content-encoding", "date", "server"),
    *("sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-accept"),
}
"""Headers that are not passed on: they are of one connection."""


class Noted:
    """What passed on one connection, as a line of JSON will have it."""

    def __init__(self, **facts: Any) -> None:
        self.facts, self.steps, self._since = facts, list[dict[str, Any]](), list[Any]()

    def say(self, message: Any) -> None:
        """The client has sent `message`."""
        self.steps.append({"say": message})
        self._since = []

    def hear(self, message: Any) -> None:
        """The client is sent `message`."""
        shown = shape(message)
        if not is_flow(message):
            self._since = []
        elif shown in self._since:
            return
        else:
            self._since.append(shown)
        self.steps.append({"flow" if is_flow(message) else "hear": shown})


class Recorder:
    """Stands at `url` and `wyoming_port` while it is entered; `client` and `test` are whose connections come."""

    def __init__(self, url: str, wyoming_port: int, folder: Path) -> None:
        self._url, self._wyoming_port, self._folder = url, wyoming_port, folder
        self.client = self.test = ""
        self._noted: dict[str, list[Noted]] = {}
        self._loop = asyncio.new_event_loop()

    @contextmanager
    def running(self) -> Iterator[tuple[str, int]]:
        """Where it listens, for HTTP and for Wyoming; what was noted is written at the end."""
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        port, wyoming_port = self._do(self._start())
        try:
            yield f"http://127.0.0.1:{port}", wyoming_port
        finally:
            self._do(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._write()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> tuple[int, int]:
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._http)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await (site := web.TCPSite(self._runner, "127.0.0.1", 0)).start()
        self._wyoming = await asyncio.start_server(self._tcp, "127.0.0.1", 0)
        return site._server.sockets[0].getsockname()[1], self._wyoming.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._wyoming.close()
        await self._runner.cleanup()
        await self._session.close()

    def _note(self, **facts: Any) -> Noted:
        noted = Noted(client=self.client, test=self.test, **facts)
        self._noted.setdefault(self.client.partition(" ")[0], []).append(noted)
        return noted

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, all_noted in self._noted.items():
            lines: dict[str, str] = {}
            for noted in all_noted:
                line = json.dumps({**noted.facts, "steps": noted.steps}, ensure_ascii=False)
                # Of the same exchange in several tests one is enough.
                lines.setdefault(json.dumps({**noted.facts, "test": "", "steps": noted.steps}), line)
            text = "".join(f"{line}\n" for line in lines.values())
            (self._folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

    async def _http(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items() if name.lower() not in OF_TRANSPORT}
        kept = {name: value for name, value in headers.items() if name in KEPT}
        where = {"method": request.method, "path": request.path_qs, "headers": kept}
        if request.headers.get("upgrade", "").lower() == "websocket":
            return await self._socket(request, self._note(transport="websocket", **where), headers)
        body = await request.read()
        noted = self._note(transport="http", **where)
        if body:
            noted.say(json.loads(body))
        noted.facts["is_left"] = True
        got = b""
        asked = self._session.request(
            *(request.method, self._url + request.path_qs),
            **{"headers": headers, "data": body or None, "allow_redirects": False},
        )
        try:
            async with asked as answer:
                kind = answer.headers.get("content-type", "")
                noted.facts |= {"status": answer.status, "content_type": kind}
                passed = {name: value for name, value in answer.headers.items() if name.lower() not in OF_TRANSPORT}
                response = web.StreamResponse(status=answer.status, headers=passed)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    got += part
                    await response.write(part)
                await response.write_eof()
                del noted.facts["is_left"]
                return response
        finally:
            for message in messages_of(got, noted.facts.get("content_type", "")):
                noted.hear(message)

    async def _socket(self, request: web.Request, noted: Noted, headers: dict[str, str]) -> web.StreamResponse:
        address = self._url.replace("http", "ws", 1) + request.path_qs
        settings = {"compression": None, "proxy": None, "max_size": None, "user_agent_header": None}
        try:
            upstream = await connect(address, additional_headers=headers, **settings)
        except InvalidStatus as refused:
            answer = refused.response
            noted.facts |= {"status": answer.status_code, "content_type": answer.headers.get("content-type", "")}
            for message in messages_of(answer.body or b"", noted.facts["content_type"]):
                noted.hear(message)
            passed = {name: value for name, value in answer.headers.raw_items() if name.lower() not in OF_TRANSPORT}
            return web.Response(status=answer.status_code, body=answer.body, headers=passed)
        noted.facts["status"] = 101
        socket = web.WebSocketResponse(compress=False, max_msg_size=0)
        await socket.prepare(request)

        async def from_client() -> None:
            async for message in socket:
                if message.type == aiohttp.WSMsgType.TEXT:
                    noted.say(json.loads(message.data))
                    with suppress(ConnectionClosed):
                        await upstream.send(message.data)
            noted.facts.setdefault("end", "client")

        async def from_server() -> None:
            async for message in upstream:
                noted.hear("audio" if isinstance(message, bytes) else json.loads(message))
                with suppress(ConnectionError):
                    await (socket.send_bytes if isinstance(message, bytes) else socket.send_str)(message)
            noted.facts.setdefault("end", upstream.close_code)

        both = [asyncio.ensure_future(from_client()), asyncio.ensure_future(from_server())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            noted.facts.setdefault("end", "client")
            for each in both:
                each.cancel()
            await asyncio.shield(asyncio.gather(upstream.close(), socket.close(code=upstream.close_code or 1000)))
        return socket

    async def _tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        noted = self._note(transport="wyoming")
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._wyoming_port)

        async def passing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_client: bool) -> None:
            while line := await reader.readline():
                event = json.loads(line)
                data = await reader.readexactly(event.get("data_length", 0))
                payload = await reader.readexactly(event.get("payload_length", 0))
                if is_client:
                    noted.say((line + data).decode())
                else:
                    noted.hear({"type": event["type"], "data": json.loads(data or b"{}")})
                writer.write(line + data + payload)
                await writer.drain()

        both = [
            asyncio.ensure_future(passing(reader, inner_writer, True)),
            asyncio.ensure_future(passing(inner_reader, writer, False)),
        ]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        noted.facts["end"] = "client" if both[0].done() else "server"
        for each in both:
            each.cancel()
        for each in (writer, inner_writer):
            each.close()
