"""Wyoming's own client, with the events of Home Assistant in its order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from conftest import LONG, TEXT, Native, Server, is_same, pause_of, run, until


async def spoken(client: AsyncTcpClient, last: type[AudioStop | SynthesizeStopped]) -> bytes:
    """The audio up to an event of the kind `last`."""
    pcm = b""
    while (event := await client.read_event()) is not None:
        if Error.is_type(event.type):
            raise RuntimeError(Error.from_event(event).text)
        if AudioStart.is_type(event.type):
            assert AudioStart.from_event(event).rate == 24000
        elif AudioChunk.is_type(event.type):
            pcm += AudioChunk.from_event(event).audio
        elif last.is_type(event.type):
            return pcm
    raise AssertionError("the connection was closed")


def test_home_assistant_reads_the_description_and_speaks_whole_live_and_cut(server: Server, native: Native) -> None:
    left = server.metric("sonoro_requests_total", reason="disconnected", dialect="wyoming")

    async def follow() -> None:
        async with AsyncTcpClient("127.0.0.1", server.wyoming_port) as client:
            await client.write_event(Describe().event())
            (program,) = Info.from_event(await client.read_event()).tts
            assert program.installed
            assert program.supports_synthesize_streaming
            assert "nora" in [voice.name for voice in program.voices if "en" in voice.languages]
            await client.write_event(Ping(text="here").event())
            assert Pong.from_event(await client.read_event()).text == "here"

        async with AsyncTcpClient("127.0.0.1", server.wyoming_port) as client:
            await client.write_event(Synthesize(text=TEXT, voice=SynthesizeVoice(name="nora")).event())
            assert is_same(await spoken(client, AudioStop), native.live(TEXT))

        async with AsyncTcpClient("127.0.0.1", server.wyoming_port) as client:
            await client.write_event(SynthesizeStart(voice=SynthesizeVoice(name="nora")).event())
            for word in ("Good", " morn", "ing,", " every", "one", "."):
                await client.write_event(SynthesizeChunk(text=word).event())
                await asyncio.sleep(0.01)
            await client.write_event(Synthesize(text=TEXT, voice=SynthesizeVoice(name="nora")).event())
            await client.write_event(SynthesizeStop().event())
            assert is_same(await spoken(client, SynthesizeStopped), native.live(TEXT))

        async with AsyncTcpClient("127.0.0.1", server.wyoming_port) as client:
            await client.write_event(Synthesize(text=LONG).event())
            while not AudioChunk.is_type((await client.read_event()).type):
                pass

    run(follow())
    until(lambda: server.metric("sonoro_requests_total", reason="disconnected", dialect="wyoming") == left + 1)


async def whole_text(port: int, text: str) -> bytes | None:
    """What `async_get_tts_audio` of Home Assistant's `wyoming` makes of a text: an error is an event like any other."""
    async with AsyncTcpClient("127.0.0.1", port) as client:
        await client.write_event(Synthesize(text=text).event())
        pcm = b""
        while (event := await client.read_event()) is not None:
            if AudioStop.is_type(event.type):
                return pcm
            if AudioChunk.is_type(event.type):
                pcm += AudioChunk.from_event(event).audio
    return None


async def live_text(port: int, text: str) -> bytes | None:
    """What its `async_stream_tts_audio` makes of one that is still being written."""
    async with AsyncTcpClient("127.0.0.1", port) as client:
        await client.write_event(SynthesizeStart().event())
        for word in text.split(" "):
            await client.write_event(SynthesizeChunk(text=f"{word} ").event())
        await client.write_event(Synthesize(text=text).event())
        await client.write_event(SynthesizeStop().event())
        pcm = b""
        while (event := await client.read_event()) is not None:
            if SynthesizeStopped.is_type(event.type):
                break
            if AudioChunk.is_type(event.type):
                pcm += AudioChunk.from_event(event).audio
    return pcm or None


@pytest.mark.parametrize("ask", [whole_text, live_text])
@pytest.mark.parametrize("refused", ["", " ", "\N{ARABIC LETTER BEH}" * 20])
def test_home_assistant_stops_waiting_for_a_text_that_is_refused(
    server: Server, native: Native, ask: Callable[[int, str], Awaitable[bytes | None]], refused: str
) -> None:
    async def follow() -> None:
        # Without an end it would wait for the `session_idle_timeout_s` of a minute.
        async with asyncio.timeout(10):
            assert await ask(server.wyoming_port, refused) is None
        pcm = await ask(server.wyoming_port, TEXT)
        assert pcm is not None
        assert is_same(pcm, native.live(TEXT))

    run(follow())


def test_ssml_is_spoken_as_it_says(server: Server) -> None:
    async def follow() -> None:
        async with AsyncTcpClient("127.0.0.1", server.wyoming_port) as client:
            text = "<speak>Good morning.<break time='750ms'/>My friends.</speak>"
            event = Synthesize(text=text).event()
            event.data["text_format"] = "ssml"
            await client.write_event(event)
            assert pause_of(await spoken(client, AudioStop)) == 18000

    run(follow())
