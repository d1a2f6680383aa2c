"""One line for each request, whatever became of it; nothing in logs and answers of what users wrote, or of memory."""

import asyncio
import base64
import contextlib
import dataclasses
import logging
import os
import re
import struct
from pathlib import Path

import httpx
import pytest
from servers import SETTINGS, Server, serving
from sessions import PATH, session
from sine_engines import nothing_left, run, until

from sonoro.core.logs import LineFormatter
from sonoro.server.speech import SpeechFactory

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

SPEECH = "/v1/audio/speech"
SECRET = "confidential"
KEYED = dataclasses.replace(SETTINGS, api_keys=("hush-hush",))
KEY = {"authorization": "Bearer hush-hush"}


def lines(caplog: pytest.LogCaptureFixture, event: str = "request") -> list[dict[str, str]]:
    """The fields of each line of that event."""
    said = (LineFormatter().format(record).split() for record in caplog.records)
    fields = [dict(word.partition("=")[::2] for word in line[2:] if "=" in word) for line in said]
    return [line for line in fields if line.get("event") == event]


def undocumented(said: list[dict[str, str]]) -> set[str]:
    """The fields that docs/server.md says nothing of."""
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8").partition("## Logs")[2]
    return {name for line in said for name in line if f"`{name}`" not in page} - {"event"}


def test_each_request_leaves_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO", logger="sonoro")

    def broken(*_: object) -> None:
        raise ZeroDivisionError(SECRET)

    async def ask() -> None:
        async with serving("live", KEYED) as server:
            http = server.http
            spoken = {"input": f"A {SECRET} text.", "response_format": "pcm"}

            async def line(asked: httpx.Response) -> dict[str, str]:
                name = asked.headers["x-request-id"]
                await until(lambda: any(line["id"] == name for line in lines(caplog)))
                (found,) = (line for line in lines(caplog) if line["id"] == name)
                assert found["status"] == str(asked.status_code)
                return found

            said = await line(await http.post(SPEECH, json=spoken, headers=KEY))
            assert (said["method"], said["path"], said["reason"], said["characters"]) == ("POST", SPEECH, "stop", "20")
            assert float(said["audio_s"]) == pytest.approx(0.2, abs=0.05)
            assert 0 <= int(said["first_packet_ms"]) <= int(said["total_ms"])
            assert re.fullmatch("[0-9a-f]{8}", key := said["key"])

            refused = await line(await http.post(SPEECH, json={**spoken, "voice": SECRET}, headers=KEY))
            assert (refused["code"], refused["param"], refused["key"]) == ("unknown_voice", "voice", key)
            assert (await line(await http.post(SPEECH, json=spoken)))["code"] == "invalid_api_key"
            nowhere = await line(await http.get(f"/v1/{SECRET}", headers=KEY))
            assert (nowhere["path"], nowhere["code"]) == ("-", "http")
            deleted = await line(await http.delete(f"/v1/audio/voices/{SECRET}", headers=KEY))
            assert (deleted["path"], deleted["status"]) == ("/v1/audio/voices/{name}", "404")
            assert (await line(await http.head("/v1/models", headers=KEY)))["method"] == "HEAD"
            foreign = await line(await http.get("/v1/models", headers={"host": f"{SECRET}.example"}))
            assert foreign["code"] == "foreign_host"
            batch = {"items": [spoken, {"input": ""}]}
            many = await line(await http.post(f"{SPEECH}/batch", json=batch, headers=KEY))
            assert (many["total"], many["succeeded"], many["failed"], many["key"]) == ("2", "1", "1", key)

            async with session(server, additional_headers=KEY) as client:
                await client.speak(f"A {SECRET} ", "text.")
                await client.speak("Again.")
            await until(lambda: any(line["method"] == "WS" for line in lines(caplog)))
            (held,) = (line for line in lines(caplog) if line["method"] == "WS")
            assert (held["path"], held["status"], held["utterances"], held["key"]) == (PATH, "101", "2", key)
            first, second = lines(caplog, "utterance")
            assert (first["key"], first["reason"], first["characters"]) == (key, "stop", "20")
            assert first["id"] != second["id"]

            monkeypatch.setattr(SpeechFactory, "model_names", broken)
            assert (await line(await http.get("/v1/models", headers=KEY)))["status"] == "500"
            count = len(lines(caplog))
            for probe in ("/health", "/ready", "/"):
                assert (await http.get(probe)).status_code == 200
            assert len(lines(caplog)) == count

    run(ask())
    assert undocumented(lines(caplog) + lines(caplog, "utterance")) == set()
    for record in caplog.records:
        text = LineFormatter().format(record)
        assert SECRET not in text
        assert "hush-hush" not in text


def test_broken_clients_leave_no_traceback_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def raw(server: Server, *parts: bytes, wait: bool = True) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        heard = b""
        for part in parts:
            writer.write(part)
            with contextlib.suppress(TimeoutError, ConnectionError):
                heard += await asyncio.wait_for(reader.read(65536), 0.3) if wait else b""
        # A reset, not an end.
        writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return heard

    def frame(opcode: int, payload: bytes, *, is_last: bool = True) -> bytes:
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
        return bytes([opcode | (0x80 if is_last else 0), 0x80 | len(payload)]) + mask + masked

    body = b'{"input": "Some words.", "response_format": "pcm", "max_new_tokens": 400, "ignore_eos": true}'
    post = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    upgrade = (
        b"GET /v1/audio/speech/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + base64.b64encode(bytes(16)) + b"\r\n\r\n"
    )

    async def ask() -> None:
        async with serving("live") as server:
            assert b" 101 " in await raw(server, upgrade, frame(1, b"\xff\xfe"))
            for parts in (
                (upgrade, frame(1, b"\xff", is_last=False) + frame(0, b"\xfe")),
                (upgrade, frame(2, b"\xff")),
                (upgrade, frame(3, b"what")),
                (upgrade, frame(1, b"[]"), frame(8, b"\x00")),
                (upgrade, b"\xff" * 64),
                (upgrade, frame(1, b'{"type": "input.text", "text": "Some words and more."}')),
                (upgrade.replace(b"13", b"99"),),
                (upgrade.replace(b"Key: ", b"Key: !"),),
                (upgrade[:90],),
                (post + b"%d\r\n\r\n" % len(body) + body,),
                (post + b"900\r\n\r\n" + body,),
                (post + b"x\r\n\r\n",),
                (b"\x16\x03\x01\x02\x00",),
                (b"GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",),
            ):
                await raw(server, *parts)
                await raw(server, *parts, wait=False)
            await until(server.is_idle)
            assert (await server.speak()).status_code == 200

    run(ask())
    for record in caplog.records:
        assert record.exc_info is None, LineFormatter().format(record)
        assert record.levelno < logging.ERROR, LineFormatter().format(record)
        assert "0x" not in LineFormatter().format(record)


def test_no_answer_tells_where_something_lies_in_memory() -> None:
    wrong = ("AAAA", base64.b64encode(b"ID3" + bytes(5000)).decode(), base64.b64encode(b"RIFF" + bytes(60)).decode())

    async def ask() -> None:
        async with serving() as server:
            for audio in wrong:
                answer = await server.speak(ref_audio=f"data:audio/wav;base64,{audio}", ref_text="A tone.")
                assert answer.status_code == 400
                assert "0x" not in answer.text
            file = {"audio": ("a.wav", b"RIFF" + bytes(60), "audio/wav")}
            answer = await server.http.post("/v1/audio/voices", data={"name": "a", "ref_text": "b"}, files=file)
            assert answer.status_code == 400
            assert "0x" not in answer.text
            exploded = await server.speak("An explosive one.")
            assert exploded.status_code == 500
            assert "Traceback" not in exploded.text

    run(ask())
