"""Each dialect asked what nobody would think of: no failure of the server, nothing that hangs, nothing left behind."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from servers import FRONTS, SETTINGS, Server, serving
from sessions import Socket, socket
from sine_engines import nothing_left, run, until
from websockets.exceptions import ConnectionClosed

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

SESSIONS = 200
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 3, 1e300, "", " ", "x", "\u2028\U0001f600", "☠" * 3, [], ["a"], {}, {"id": 7}, {"id": "low"}),
    *("pcm_8000", "raw", "mulaw", 8000, 96000, "0.0000001", "en", {"container": "raw", "encoding": "pcm_alaw"}),
)
TEXTS = ("Some words. ", "Hel", "lo, ", "world.", " ", "", "Ünïcödé 你好。", "...", "x" * 300, "a" * 5000)

SURROGATE = '{"text": "\\ud800", "transcript": "\\ud800", "type": "Speak", "context_id": "a", "flush": true}'
GARBAGE = (
    *(b"\x00\xff" * 9, b"{}", "{", "[]", "null", '"text"', "\u2028", '{"a":' * 500, "1" * 9000, SURROGATE),
    SURROGATE.replace("ud800", "u0000"),
)

ELEVENLABS = ("text", "context_id", "flush", "close_context", "voice_settings", "generation_config", "seed")
CARTESIA = (
    *("transcript", "context_id", "continue", "cancel", "flush", "voice", "output_format", "add_timestamps"),
    *("max_buffer_delay_ms", "speed", "generation_config", "language", "model_id"),
)
DEEPGRAM = ("type", "text")


def elevenlabs(chance: random.Random) -> dict[str, Any]:
    name = chance.choice("abc")
    return chance.choice(
        [
            {"text": chance.choice(TEXTS), "context_id": name},
            {"text": chance.choice(TEXTS), "context_id": name, "flush": True},
            {"context_id": name, "flush": True},
            {"context_id": name, "close_context": True},
            {"text": " ", "context_id": name, "voice_settings": {"speed": chance.choice([0.7, 1.2, 0, 1e9])}},
            {"text": ""},
            {"close_socket": chance.random() < 0.1},
        ]
    )


def cartesia(chance: random.Random) -> dict[str, Any]:
    raw = {"container": "raw", "encoding": chance.choice(["pcm_s16le", "pcm_mulaw", "pcm_f32le"]), "sample_rate": 8000}
    said = {"transcript": chance.choice(TEXTS), "context_id": chance.choice("abc"), "voice": "v", "output_format": raw}
    said |= {"continue": chance.random() < 0.7, "add_timestamps": chance.random() < 0.5}
    return chance.choice(
        [said, {**said, "flush": True}, {"context_id": said["context_id"], "cancel": True}, {**said, "transcript": ""}]
    )


def deepgram(chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(
        ["Speak", "Speak", "Speak", "Flush", "Clear", "Flush", "Close" if chance.random() < 0.1 else ""]
    )
    return {"type": kind, "text": chance.choice(TEXTS)} if kind == "Speak" else {"type": kind}


VOICE = "/v1/text-to-speech/any"
SOCKETS: tuple[tuple[str, Callable[[random.Random], dict[str, Any]], tuple[str, ...]], ...] = (
    (f"{VOICE}/multi-stream-input?output_format=pcm_8000&auto_mode=true", elevenlabs, ELEVENLABS),
    (f"{VOICE}/multi-stream-input?output_format=mp3_22050_32&sync_alignment=true", elevenlabs, ELEVENLABS),
    (f"{VOICE}/stream-input?output_format=ulaw_8000", elevenlabs, ELEVENLABS),
    ("/tts/websocket", cartesia, CARTESIA),
    ("/v1/speak?encoding=mulaw&sample_rate=8000", deepgram, DEEPGRAM),
    ("/v1/speak?speed=1.3", deepgram, DEEPGRAM),
)


def message(chance: random.Random, valid: Callable[[random.Random], dict[str, Any]], names: tuple[str, ...]) -> Any:
    """A message: by the schema, of its names with anything in them, or none at all."""
    match chance.randrange(10):
        case 0:
            return {name: chance.choice(JUNK) for name in chance.sample(names, chance.randrange(len(names)))}
        case 1:
            return {**valid(chance), chance.choice(names): chance.choice(JUNK)}
        case 2:
            return chance.choice(GARBAGE)
        case _:
            return valid(chance)


async def ramble(server: Server, seed: int) -> None:
    """One session, which ends in a way of its own."""
    chance = random.Random(seed)
    path, valid, names = SOCKETS[seed % len(SOCKETS)]
    with contextlib.suppress(ConnectionClosed):
        async with socket(server, path, close_timeout=5) as client:
            listening = asyncio.create_task(listen(client))
            try:
                for _ in range(chance.randrange(1, 25)):
                    await client.say(message(chance, valid, names))
                    await asyncio.sleep(chance.choice([0, 0, 0, 0.01, 0.05]))
                if chance.random() < 0.5:
                    client.connection.transport.abort()
            finally:
                listening.cancel()


async def listen(client: Socket) -> None:
    while await client.hear() is not None:
        pass


def failures(text: str) -> list[str]:
    """The counts of what was the server's own fault."""
    lines = [line for line in text.splitlines() if line.startswith("sonoro_requests_total")]
    return [line for line in lines if any(f'reason="{word}' in line for word in ("internal", "engine", "error"))]


def test_many_sessions_at_once_leave_nothing_behind() -> None:
    settings = dataclasses.replace(SETTINGS, max_waiting=20, max_queue_wait_ms=2000, max_sessions=150)

    async def fuzz() -> None:
        async with serving("live", settings) as server:
            before = len(asyncio.all_tasks())
            for start in range(0, SESSIONS, 50):
                await asyncio.gather(*(ramble(server, seed) for seed in range(start, start + 50)))
            await until(server.is_idle)
            await until(lambda: len(asyncio.all_tasks()) <= before)
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(150):  # as many as may be open
                    await stack.enter_async_context(socket(server, "/tts/websocket"))
            assert await server.metric("sonoro_requests_in_flight") == 0
            if not FRONTS:
                assert server.service.session_count == 0
                assert server.service.speech.gate.waiting == server.service.speech.gate.running == 0
            assert server.engine.replicas[0].restarts == 0
            assert failures((await server.http.get("/metrics")).text) == []
            assert (await server.speak()).status_code == 200

    run(fuzz())


def test_no_body_and_no_query_is_the_servers_fault() -> None:
    valid = {
        f"{VOICE}": ({"text": "Hm."}, ("text", "voice_settings", "seed", "language_code", "model_id")),
        f"{VOICE}/stream/with-timestamps": ({"text": "Hm."}, ("text", "voice_settings", "seed")),
        f"{VOICE}/with-timestamps": ({"text": "Hm."}, ("text", "voice_settings", "seed")),
        "/tts/bytes": ({"transcript": "Hm.", "voice": {"id": "a"}}, CARTESIA),
        "/tts/sse": ({"transcript": "Hm.", "voice": {"id": "a"}}, CARTESIA),
        "/v1/speak": ({"text": "Hm."}, ("text",)),
    }
    queries = ("output_format", "encoding", "sample_rate", "container", "speed", "model", "enable_logging")

    async def fuzz() -> None:
        async with serving("live") as server:
            chance, statuses = random.Random(3), set()
            for path, (fields, names) in valid.items():
                for _ in range(40):
                    body = fields | {chance.choice(names): chance.choice(JUNK) for _ in range(chance.randrange(3))}
                    junk = [value for value in JUNK if isinstance(value, (str, int, float))]
                    query = {chance.choice(queries): str(chance.choice(junk)) for _ in range(chance.randrange(2))}
                    sent: dict[str, Any] = {"json": body} if chance.random() < 0.8 else {"content": b"\xff{}"}
                    answer = await server.http.post(path, params=query, **sent)
                    statuses.add(answer.status_code)
            assert statuses == {200, 400}
            for path in ("/v1/voices", "/v2/voices", "/v1/voices/%00", "/voices", "/voices/%F0%9F%98%80", "/v1/models"):
                for name in ("search", "page_size", "starting_after", "limit", "q"):
                    answer = await server.http.get(path, params={name: "\u2028"}, headers={"xi-api-key": "\x7e"})
                    assert answer.status_code in (200, 400, 404)
            await until(server.is_idle)
            assert failures((await server.http.get("/metrics")).text) == []

    run(fuzz())
