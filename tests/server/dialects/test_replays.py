"""What unmodified clients said, replayed without them: answers have the status, shape and order that they had then, and
the audio is what our own API says of the text. Recorded by `make clients RECORD=tests/server/dialects/recordings`."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import soundfile
from processes import GUARD_S
from servers import SETTINGS, Server, serving
from sine_engines import until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from wire_shapes import all_fit, fits, is_flow, messages_of, name_of, shape

from sonoro.server.dialects import wyoming

FOLDER = Path(__file__).with_name("recordings")
CLIENTS = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
KEY = "a-key-of-this-server"
RATE = 8000
LONG = 200
"""Characters from which on a text is one that its client interrupts: of it no end need be heard."""

ENDS_TEXT = ("Flush", "Close", "Clear", "input.done", "synthesize", "synthesize-stop")
ENDS_AUDIO = ("Flushed", "Cleared", "session.done", "audio-stop")


def first_of(message: dict[str, Any], *names: str) -> str:
    """The first of those fields that is a string; empty if none is."""
    return next((message[name] for name in names if isinstance(message.get(name), str)), "")


def text_of(message: dict[str, Any]) -> str:
    return first_of(message.get("data", message), "text", "transcript", "input")


def audio_of(message: dict[str, Any] | bytes) -> bytes:
    if isinstance(message, bytes):
        return message
    return base64.b64decode(first_of(message, "audio", "audio_base64", "audio_b64", "data"))


def known(of_flow: Any) -> str:
    """The shape of a message of the flow, of whichever context; of times, whether any are told depends on the voice."""
    if not isinstance(of_flow, dict):
        return json.dumps(of_flow)
    aligned = ("alignment", "normalizedAlignment", "normalized_alignment")
    return json.dumps({name: None if name in aligned else of_flow[name] for name in of_flow if "ontext" not in name})


class Conversation:
    """What was said and heard on a connection: texts and their audio by context, or one after the other."""

    def __init__(self) -> None:
        self.marks: list[Any] = []
        self.flow: set[str] = set()
        self.texts: dict[str, list[str]] = {}
        self.audio: dict[str, list[bytes]] = {}
        self.has_ended = False

    def say(self, message: dict[str, Any]) -> None:
        texts = self.texts.setdefault(name_of(message), [""])
        texts[-1] += text_of(message)
        if message.get("type") == "Clear":  # one answer for all that has none yet
            answered = len(self.audio.get("", [b""])) - 1
            texts[answered:] = ["".join(texts[answered:])]
        if message.get("type") in ENDS_TEXT:
            texts.append("")

    def hear(self, message: dict[str, Any] | bytes) -> None:
        audio = self.audio.setdefault(name_of(message), [b""])
        audio[-1] += audio_of(message)
        shown = shape("audio" if isinstance(message, bytes) else message)
        if is_flow(shown):
            self.flow.add(known(shown))
            return
        self.marks.append(shown)
        if shown.get("type") in ENDS_AUDIO:
            audio.append(b"")

    def has_heard(self, mark: Any, times: int) -> bool:
        return self.has_ended or sum(fits(heard, mark) for heard in self.marks) >= times

    def is_spoken_to(self, name: str) -> bool:
        return self.has_ended or bool(self.audio.get(name, [b""])[-1])


@dataclasses.dataclass
class Replay:
    """Asks a server what was recorded of a client."""

    server: Server
    wyoming_port: int
    spoken: dict[tuple[str, int], bytes] = dataclasses.field(default_factory=dict)

    async def native(self, text: str, rate: int) -> bytes:
        """What our own API says of `text`, as PCM16 at `rate` Hz."""
        if text and (text, rate) not in self.spoken:
            answer = await self.server.http.post(
                "/v1/audio/speech",
                json={"input": text, "response_format": "pcm", "sample_rate": rate},
                headers={"authorization": f"Bearer {KEY}"},
            )
            self.spoken[text, rate] = answer.raise_for_status().content
        return self.spoken.get((text, rate), b"")

    async def judge(self, text: str, audio: bytes, facts: str) -> None:
        """That `audio` is `text`, in the format that `facts` name: samples, or else a file."""
        found = re.search(r'(?:pcm_|sample_rate=|"sample_rate": )(\d+)', facts)
        rate = int(found[1]) if found else RATE
        expected = await self.native(text.strip(), rate)
        if audio.startswith(b"RIFF") or "mp3" in facts or "audio/mpeg" in facts:
            samples, rate_heard = soundfile.read(io.BytesIO(audio))
            # Three frames of mp3 at 8 kHz, which coder and padding add.
            assert 0 <= len(samples) / rate_heard - len(expected) / 2 / rate < 0.22
        else:
            assert audio == expected

    async def http(self, recorded: dict[str, Any]) -> None:
        said = [step["say"] for step in recorded["steps"] if "say" in step]
        answered = [step.get("hear", step.get("flow")) for step in recorded["steps"] if "say" not in step]
        settings = {"headers": recorded["headers"], "content": json.dumps(said[0]) if said else None}
        path = recorded["path"].replace("/builtin", "/sine")
        async with self.server.http.stream(recorded["method"], path, **settings) as answer:
            if recorded.get("is_left"):
                assert answer.status_code == 200
                assert await anext(answer.aiter_raw())
                return
            kind = answer.headers.get("content-type", "")
            assert (answer.status_code, kind) == (recorded["status"], recorded["content_type"])
            body = await answer.aread()
        heard = messages_of(body, kind)
        marks, flow = [shape(one) for one in heard if not is_flow(one)], [one for one in heard if is_flow(one)]
        assert all_fit(marks, [one for one in answered if not is_flow(one)])
        assert {known(shape(one)) for one in flow} == {known(one) for one in answered if is_flow(one)}
        if flow:
            audio = body if kind.startswith("audio/") else b"".join(map(audio_of, flow))
            await self.judge(text_of(said[0]), audio, f"{kind} {recorded['path']} {json.dumps(said[0])}")

    async def websocket(self, recorded: dict[str, Any]) -> None:
        url = self.server.url.replace("http", "ws", 1) + recorded["path"]
        headers = {name: value for name, value in recorded["headers"].items() if name != "user-agent"}
        agent = recorded["headers"].get("user-agent")
        settings = {"additional_headers": headers, "user_agent_header": agent, "proxy": None, "compression": None}
        if recorded["status"] != 101:
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, **settings)
            answer, kind = refused.value.response, recorded["content_type"]
            assert (answer.status_code, answer.headers.get("content-type", "")) == (recorded["status"], kind)
            heard = [shape(one) for one in messages_of(answer.body or b"", kind)]
            assert all_fit(heard, [step["hear"] for step in recorded["steps"]])
            return
        socket = await connect(url, **settings)

        async def listen(conversation: Conversation) -> None:
            async for message in socket:
                conversation.hear(message if isinstance(message, bytes) else json.loads(message))

        conversation = await self.converse(recorded, listen, lambda said: send(socket, json.dumps(said)))
        if recorded["end"] == "client":
            socket.transport.abort()
        else:
            await until(lambda: conversation.has_ended)
            assert socket.close_code == recorded["end"]
        await self.check(conversation, recorded, recorded["path"])
        await socket.close()

    async def wyoming(self, recorded: dict[str, Any]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.wyoming_port)

        async def listen(conversation: Conversation) -> None:
            while line := await reader.readline():
                event = json.loads(line)
                data = json.loads(await reader.readexactly(event["data_length"]))
                if payload := await reader.readexactly(event.get("payload_length", 0)):
                    conversation.audio.setdefault("", [b""])[-1] += payload
                conversation.hear({"type": event["type"], "data": data})

        async def write(said: str) -> None:
            writer.write(said.encode())
            await writer.drain()

        conversation = await self.converse(recorded, listen, write)
        writer.transport.abort()
        await self.check(conversation, recorded, "")

    async def converse(
        self,
        recorded: dict[str, Any],
        listen: Callable[[Conversation], Awaitable[None]],
        say: Callable[[Any], Awaitable[None]],
    ) -> Conversation:
        """The steps in their order: what was heard before something was said is heard before it is said again."""
        conversation, is_stream, awaited, marks = Conversation(), False, False, list[Any]()

        async def listening() -> None:
            with contextlib.suppress(ConnectionClosed, ConnectionError, asyncio.IncompleteReadError):
                await listen(conversation)
            conversation.has_ended = True

        task = asyncio.create_task(listening())
        name, spoken = "", {"synthesize", "synthesize-start", "synthesize-chunk", "synthesize-stop"}
        for step in recorded["steps"]:
            if "hear" in step:
                marks.append(step["hear"])
                await until(lambda mark=step["hear"]: conversation.has_heard(mark, marks.count(mark)))
                awaited = False
            elif "flow" in step:
                awaited, name = True, name_of(step["flow"])
            else:
                message = step["say"]
                if isinstance(message, str):  # an event of Wyoming: in a stream the whole text is for older servers
                    line, _, data = message.partition("\n")
                    event = json.loads(line) | {"data": json.loads(data or "{}")}
                    is_stream |= event["type"] == "synthesize-start"
                    noted = event if event["type"] in spoken - ({"synthesize"} if is_stream else set()) else {}
                else:
                    noted = message
                if awaited and not text_of(noted):
                    await until(lambda name=name: conversation.is_spoken_to(name))
                awaited = False
                conversation.say(noted)
                await say(message)
        if awaited:
            await until(lambda: conversation.is_spoken_to(name))
        if recorded["end"] == "client":
            task.cancel()
        return conversation

    async def check(self, conversation: Conversation, recorded: dict[str, Any], path: str) -> None:
        """That what was heard is what was recorded, and the audio that of the texts."""
        marks = [step["hear"] for step in recorded["steps"] if "hear" in step]
        facts = path + json.dumps([step.get("say") for step in recorded["steps"]])
        has_error = any("error" in json.dumps(mark).lower() for mark in marks)
        for name, texts in conversation.texts.items():
            is_cut = any(len(text) > LONG for text in texts)
            expected = [mark for mark in marks if name_of(mark) == name]
            heard = [mark for mark in conversation.marks if name_of(mark) == name]
            assert all_fit(heard[: len(expected)] if is_cut else heard, expected)
            audio = conversation.audio.get(name, [b""])
            for text, said in zip(texts, audio, strict=False):
                if len(text) <= LONG and not has_error:
                    await self.judge(text, said, facts)
                else:
                    assert said or has_error
        recorded_flow = {known(step["flow"]) for step in recorded["steps"] if "flow" in step}
        assert conversation.flow <= recorded_flow


async def send(socket: ClientConnection, text: str) -> None:
    with contextlib.suppress(ConnectionClosed):
        await socket.send(text)


class Listening(logging.Handler):
    """Reads in the log at which port Wyoming is spoken."""

    port = 0

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"event=listening dialect=wyoming host=\S+ port=(\d+)", record.getMessage()):
            self.port = int(found[1])


@pytest.fixture(scope="module")
def replaying() -> Iterator[tuple[asyncio.Runner, Replay]]:
    """One server for all clients, and the loop that it runs in."""
    logger, listening, stack = logging.getLogger(wyoming.__name__), Listening(), contextlib.AsyncExitStack()
    settings = dataclasses.replace(SETTINGS, wyoming="0", api_keys=(KEY,))
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="s") as folder, asyncio.Runner() as runner:
        patch.setattr("tempfile.tempdir", folder)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"), prepend=os.pathsep)
        logger.addHandler(listening)
        logger.setLevel(logging.INFO)
        try:
            server = runner.run(stack.enter_async_context(serving("clients", settings)))
            yield runner, Replay(server, listening.port)
        finally:
            runner.run(stack.aclose())
            logger.setLevel(logging.NOTSET)
            logger.removeHandler(listening)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_is_answered_as_it_was(
    client: str, replaying: tuple[asyncio.Runner, Replay], caplog: pytest.LogCaptureFixture
) -> None:
    runner, replays = replaying

    async def replay(line: str) -> None:
        recorded = json.loads(line)
        try:
            async with asyncio.timeout(GUARD_S):
                await getattr(replays, recorded["transport"])(recorded)
        except (Exception, TimeoutError) as error:
            error.add_note(f"{recorded['client']}, {recorded['test']}: {line[:2000]}")
            raise

    async def all_of_them() -> None:
        await asyncio.gather(*map(replay, (FOLDER / f"{client}.jsonl").read_text(encoding="utf-8").splitlines()))
        await until(replays.server.is_idle)

    runner.run(all_of_them())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
