"""Wyoming as Home Assistant speaks it, and as nobody should."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import re
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Self

import pytest
from processes import GUARD_S
from servers import SETTINGS, serving
from sessions import TEXT, session, whole
from sine_engines import LONG, nothing_left, run, until
from zeroconf import NonUniqueNameException
from zeroconf.asyncio import AsyncServiceInfo

from sonoro.core.errors import ConfigError
from sonoro.server.dialects import wyoming

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

LISTENING = dataclasses.replace(SETTINGS, wyoming="0")
Event = tuple[str, dict[str, Any], bytes]


@dataclasses.dataclass
class Client:
    """A client's side of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def say(self, kind: str, *, is_apart: bool = True, **data: Any) -> None:
        """Send an event, its data apart from its line or within it."""
        body = json.dumps(data).encode() if is_apart else b""
        line = {"type": kind, "data_length": len(body)} if is_apart else {"type": kind, "data": data}
        self.writer.write(json.dumps(line).encode() + b"\n" + body)

    async def hear(self) -> Event | None:
        """The next event; None at the end of the connection."""
        async with asyncio.timeout(GUARD_S):
            if not (line := await self.reader.readline()):
                return None
            event = json.loads(line)
            data = json.loads(await self.reader.readexactly(event["data_length"]))
            return event["type"], data, await self.reader.readexactly(event.get("payload_length", 0))

    async def hear_until(self, last: str) -> list[Event]:
        """All events to the next of that kind, which is among them."""
        heard: list[Event] = []
        while not heard or heard[-1][0] != last:
            event = await self.hear()
            assert event is not None, heard
            heard.append(event)
        return heard

    async def ended(self) -> list[Event]:
        heard = []
        while (event := await self.hear()) is not None:
            heard.append(event)
        return heard


def address(caplog: pytest.LogCaptureFixture) -> tuple[str, int]:
    """Where the server says that it listens."""
    found = re.findall(r"dialect=wyoming host=(\S+) port=(\d+)", caplog.text)
    return found[-1][0], int(found[-1][1])


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@contextlib.asynccontextmanager
async def client(said: pytest.LogCaptureFixture) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(*address(said), limit=2**22)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def audio(events: list[Event]) -> bytes:
    """What is heard between `audio-start` and `audio-stop`, between which there is audio alone."""
    kinds = [kind for kind, _, _ in events]
    start, stop = kinds.index("audio-start"), kinds.index("audio-stop")
    assert set(kinds[start + 1 : stop]) == {"audio-chunk"}
    assert all(data == {"rate": 8000, "width": 2, "channels": 1} for _, data, _ in events[start:stop])
    return b"".join(payload for _, _, payload in events)


def test_a_description_says_all_that_clients_read_of_one(said: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with serving("live", LISTENING), client(said) as asked:
            asked.say("ping", text="here")
            assert await asked.hear() == ("pong", {"text": "here"}, b"")
            asked.say("select-program", name="sonoro")  # which an older server passes over
            asked.say("describe")
            kind, info, _ = await asked.hear()
            assert kind == "info"
            assert [info[other] for other in ("asr", "handle", "intent", "wake", "mic", "snd")] == [[]] * 6
            (program,) = info["tts"]
            assert program["supports_synthesize_streaming"] is True
            facts = {"name", "description", "version", "installed", "attribution"}
            for thing in (program, *program["voices"]):
                assert facts <= set(thing)
                assert thing["installed"] is True
                assert set(thing["attribution"]) == {"name", "url"}
            assert [voice["name"] for voice in program["voices"]] == ["low", "high"]
            assert all("en" in voice["languages"] for voice in program["voices"])

    run(ask())


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_text_is_spoken_whole_and_as_it_comes(said: pytest.LogCaptureFixture, is_apart: bool) -> None:
    async def speak() -> None:
        async with serving("live", LISTENING) as server, client(said) as asked:
            for voice in ({"name": "low", "speaker": "one"}, {"name": "low"}):
                asked.say("synthesize", is_apart=is_apart, text=TEXT, voice=voice, context={"of": "theirs"})
                assert audio(await asked.hear_until("audio-stop")) == whole(voice="low")
            for words in (TEXT, LONG[:200]):
                asked.say("synthesize-start", is_apart=is_apart, voice={"language": "en"})
                for word in words.split(" "):
                    asked.say("synthesize-chunk", is_apart=is_apart, text=f"{word} ")
                asked.say("synthesize", is_apart=is_apart, text=words)  # for servers that know of no streams
                asked.say("synthesize-stop", is_apart=is_apart)
                events = await asked.hear_until("synthesize-stopped")
                assert [kind for kind, _, _ in events].count("audio-start") == 1
                assert audio(events) == whole(words)
            assert await server.metric('sonoro_requests_total{dialect="wyoming",model="sine",reason="stop"}') == 4

    run(speak())


def test_what_is_wrong_is_told_and_what_comes_next_is_spoken(said: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(LISTENING, max_characters=100)
    wrong = [
        ("synthesize", {"text": ""}, "text"),
        ("synthesize", {"text": "a" * 101}, "input"),
        ("synthesize", {"text": "<speak>a</speak>", "text_format": "html"}, "text_format"),
        ("synthesize", {"text": "<speak>a</sp>", "text_format": "ssml"}, "mismatched tag"),
        ("synthesize", {"text": 7}, "data"),
        ("synthesize", {"text": "a", "voice": {"name": 7}}, "data"),
        ("synthesize-chunk", {"text": "a"}, "synthesize-start"),
        ("synthesize-stop", {}, "synthesize-start"),
    ]

    async def speak() -> None:
        async with serving("live", settings) as server, contextlib.AsyncExitStack() as stack:
            for kind, data, named in wrong:
                asked = await stack.enter_async_context(client(said))
                asked.say(kind, **data)
                # Home Assistant reads past an error to the end of the audio, or of the connection.
                ((told, error, _),) = await asked.ended()
                assert told == "error"
                assert named in error["text"]
                assert error["code"] == "invalid_request"
            asked = await stack.enter_async_context(client(said))
            asked.say("synthesize-start")
            asked.say("synthesize-start")
            assert (await asked.hear())[0] == "error"
            for _ in range(9):
                asked.say("synthesize-chunk", text="Too much text. ")
            assert (await asked.hear_until("error"))[-1][1]["code"] == "invalid_request"
            asked.say("synthesize-chunk", text="Of which this is the rest.")
            asked.say("synthesize-stop")
            assert await asked.hear() == ("synthesize-stopped", {}, b"")
            asked.say("synthesize-start")
            asked.say("synthesize-chunk", text=" ")
            asked.say("synthesize-stop")
            assert await asked.hear() == ("synthesize-stopped", {}, b"")
            asked.say("synthesize", text=TEXT)
            assert audio(await asked.hear_until("audio-stop")) == whole()
            await until(server.is_idle)

    run(speak())


def test_a_voice_that_is_not_there_is_another(said: pytest.LogCaptureFixture) -> None:
    async def speak() -> None:
        async with serving("live", LISTENING), client(said) as asked:
            asked.say("synthesize", text=TEXT, voice={"name": "en_US-lessac-medium"})
            assert audio(await asked.hear_until("audio-stop")) == whole()

    run(speak())


def test_who_leaves_frees_the_slot_and_who_says_nothing_is_let_go(said: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(LISTENING, session_idle_timeout_s=0.5)
    left = 'sonoro_requests_total{dialect="wyoming",model="sine",reason="disconnected"}'

    async def leave() -> None:
        async with serving("slow_live", settings) as server:
            for count, is_whole in enumerate((True, False)):
                async with client(said) as asked:
                    if is_whole:
                        asked.say("synthesize", text=LONG)
                    else:
                        asked.say("synthesize-start")
                        asked.say("synthesize-chunk", text=LONG)
                    assert (await asked.hear())[0] == "audio-start"
                await until(server.is_idle)
                await until(lambda count=count: server.has(left, count + 1))
            async with client(said) as asked:
                asked.say("ping", text="here")
                _, (kind, error, _) = await asked.ended()
                assert (kind, error["code"]) == ("error", "idle_session")

    run(leave())


def test_sessions_are_as_many_as_may_be_and_hold_the_server_until_they_have_spoken(
    said: pytest.LogCaptureFixture,
) -> None:
    async def follow() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(
                serving("slow_live", dataclasses.replace(LISTENING, max_sessions=2))
            )
            first, second, third = [await stack.enter_async_context(client(said)) for _ in range(3)]
            for one in (first, second):
                one.say("ping", text="here")
                await one.hear()
            third.say("describe")
            ((kind, error, _),) = await third.ended()
            assert (kind, error["code"]) == ("error", "too_many_requests")
            first.say("synthesize", text=LONG[:200])
            assert (await first.hear())[0] == "audio-start"
            server.process.should_exit = True
            heard = [("audio-start", {"rate": 8000, "width": 2, "channels": 1}, b""), *await first.ended()]
            assert audio(heard) == whole(LONG[:200])
            assert await second.ended() == []

    run(follow())


def test_who_is_cut_off_by_a_shutdown_is_told(said: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(LISTENING, shutdown_timeout_s=0.1)

    async def ask() -> None:
        async with serving("slow_live", settings) as server, client(said) as asked:
            asked.say("synthesize", text=LONG)
            await asked.hear_until("audio-chunk")
            server.process.should_exit = True
            kind, error, _ = (await asked.ended())[-1]
            assert (kind, error["text"]) == ("error", "the server is shutting down")

    run(ask())


def test_where_it_listens_is_checked_at_the_start(said: pytest.LogCaptureFixture) -> None:
    async def start(wyoming: str) -> None:
        async with serving("live", dataclasses.replace(SETTINGS, wyoming=wyoming)) as server:
            taken = server.url.rpartition(":")[2]
            with pytest.raises(ConfigError, match="wyoming"):
                async with serving("live", dataclasses.replace(SETTINGS, wyoming=taken)):
                    pass

    async def refuse(wyoming: str, **settings: str) -> None:
        async with serving("live", dataclasses.replace(SETTINGS, wyoming=wyoming, **settings)):
            pass

    run(start("0"))
    assert address(said)[0] == "127.0.0.1"
    run(start("0.0.0.0:0"))
    assert address(said)[0] == "0.0.0.0"
    for wrong in ("here", "host:", "70000", "no-such-host.invalid:0", ":"):
        with pytest.raises(ConfigError, match="wyoming"):
            run(refuse(wrong))
    with pytest.raises(ConfigError, match="wyoming_name"):
        run(refuse("0", wyoming_name="kitchen"))


@pytest.mark.parametrize("keys", [(), ("key",)])
def test_silent_connections_hold_no_sessions(keys: tuple[str, ...], said: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        settings = dataclasses.replace(LISTENING, api_keys=keys, max_sessions=2, head_timeout_s=0.5)
        with_key = {"additional_headers": {"Authorization": "Bearer key"}}
        async with serving("live", settings) as server, contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(client(said)) for _ in range(10)]
            async with session(server, **with_key), session(server, **with_key):
                for each in silent:
                    ((kind, error, _),) = await each.ended()
                    assert (kind, error["code"]) == ("error", "idle_session")
                # Sessions without a key, beside others that need one, have places of their own.
                async with client(said) as asked:
                    asked.say("describe")
                    assert (await asked.hear())[0] == ("info" if keys else "error")

    run(ask())


def test_a_crowd_that_is_silent_keeps_nobody_out(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonoro.server.service.MAX_KEYLESS", 3)

    async def ask() -> None:
        async with serving("live", LISTENING), contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(client(said)) for _ in range(5)]
            async with client(said) as asked:
                asked.say("describe")
                assert (await asked.hear_until("info"))[0][0] == "info"
            assert [data["code"] for _, data, _ in await silent[0].ended()] == ["too_many_requests"]

    run(ask())


@pytest.mark.parametrize("bad", ['"data": []', '"data": {"text": 7}', '"data": 7', '"data_length": 2'])
def test_a_bad_piece_of_a_stream_is_refused_alone(said: pytest.LogCaptureFixture, bad: str) -> None:
    async def ask() -> None:
        async with serving("live", LISTENING), client(said) as asked:
            asked.say("synthesize-start")
            asked.say("synthesize-chunk", text=TEXT[:11])
            asked.writer.write(f'{{"type": "synthesize-chunk", {bad}}}\n'.encode() + b"[]" * ("length" in bad))
            asked.say("synthesize-chunk", text=TEXT[11:])
            asked.say("synthesize-stop")
            heard = await asked.hear_until("synthesize-stopped")
            errors = [event for event in heard if event[0] == "error"]
            assert len(errors) == 1
            assert audio([event for event in heard if event[0] != "error"]) == whole()

    run(ask())


class Announcer:
    """In place of a network: what is announced at this moment."""

    announced: ClassVar[list[AsyncServiceInfo]] = []
    taken: ClassVar[set[str]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def async_register_service(self, about: AsyncServiceInfo) -> None:
        if about.name.partition(".")[0] in self.taken:
            raise NonUniqueNameException
        self.announced.append(about)

    async def __aexit__(self, *_: object) -> None:
        self.announced.clear()


def test_it_is_announced_by_its_name(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wyoming, "AsyncZeroconf", Announcer)
    monkeypatch.setattr(wyoming, "ANNOUNCE_AGAIN_S", 0.05)

    async def announce() -> None:
        here = dataclasses.replace(SETTINGS, wyoming="0.0.0.0:0", wyoming_name="kitchen")
        async with serving("live", here):
            await until(lambda: Announcer.announced or "event=not_announced" in said.text)
            if not Announcer.announced:
                pytest.skip("this machine has no network")
            (about,) = Announcer.announced
            assert about.name == "kitchen._wyoming._tcp.local."
            assert about.port == address(said)[1]
            assert "0.0.0.0" not in about.parsed_addresses()
        assert Announcer.announced == []

        # Another server has the name, and ends.
        Announcer.taken.add("kitchen")
        async with serving("live", here):
            await until(lambda: said.text.count("event=not_announced dialect=wyoming name=kitchen") > 1)
            assert Announcer.announced == []
            Announcer.taken.clear()
            await until(lambda: Announcer.announced)

    run(announce())


GARBAGE = (
    *(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\x00\xff\xfe\n", b"[]\n", b"null\n", b"7\n", b'"describe"\n', b"{}\n"),
    *(b'{"type": "describe", "data": []}\n', b'{"type": "describe", "data_length": -1}\n', b'{"type": 7}\n'),
    *(b'{"type": "describe", "data_length": 1e99}\n', b'{"type": "describe", "data_length": 99999999}\n'),
    *(b'{"type": "describe", "data_length": true}\nx', b'{"type": "describe", "data_length": 3}\nnul'),
    *(b'{"type": "describe", "payload_length": "7"}\n', b'{"type": "describe", "data_length": 2}\n[]'),
    *(b"[" * 100_000 + b"\n", b'{"type": "' + b"a" * 10**6, b'{"type": "synthesize", "data": {"text": "\\ud800"}}\n'),
)


def test_garbage_neither_breaks_the_server_nor_holds_anything_of_it(said: pytest.LogCaptureFixture) -> None:
    """In wrong order, cut anywhere, of bytes: whoever says it gets an answer or the end; no slot or task is left."""
    chance = random.Random(7)
    events = [
        *(("synthesize-start", {}), ("synthesize-chunk", {"text": "Some "}), ("synthesize-stop", {})),
        *(("synthesize", {"text": "Words."}), ("describe", {}), ("ping", {"text": "a"}), ("ping", {})),
        *(("synthesize-start", {"voice": {"name": "low"}}), ("audio-start", {"rate": 7}), ("transcribe", {})),
    ]

    async def talk() -> None:
        async with client(said) as asked:
            for _ in range(chance.randrange(1, 12)):
                kind, data = chance.choice(events)
                asked.say(kind, is_apart=chance.random() < 0.5, **data)
            if chance.random() < 0.3:
                asked.writer.write(chance.randbytes(chance.randrange(1, 200)) + b"\n")
            if chance.random() < 0.5:
                await asked.hear()
            if chance.random() < 0.5:
                asked.writer.transport.abort()

    async def fuzz() -> None:
        async with serving("live", dataclasses.replace(LISTENING, session_idle_timeout_s=1)) as server:
            before = len(asyncio.all_tasks())
            for garbage in GARBAGE:
                async with client(said) as asked:
                    asked.writer.write(garbage)
                    kind, error, _ = (await asked.ended())[0]
                    assert (kind, error["code"]) == ("error", "invalid_request"), garbage[:60]
            await asyncio.gather(*(talk() for _ in range(200)))
            await until(server.is_idle)
            await until(lambda: len(asyncio.all_tasks()) <= before)
            assert await server.metric("sonoro_requests_in_flight") == 0
            assert server.engine.replicas[0].restarts == 0
            async with client(said) as asked:
                asked.say("synthesize", text=TEXT)
                assert audio(await asked.hear_until("audio-stop")) == whole()
        assert [record.getMessage() for record in said.records if record.levelno >= logging.ERROR] == []

    run(fuzz())
