"""LiveKit's plugins, each with its own transport: whole, live text, cut in mid-speech, and live again."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest
from livekit.plugins import baseten, cartesia, deepgram, elevenlabs, openai

from conftest import KEY, LONG, TEXT, Native, Server, is_same, run, until

FIELDS = {"cartesia": {"language": "english"}}
"""What a plugin asks for unasked."""

OVER_HTTP = ("openai", "elevenlabs", "cartesia", "deepgram")
"""Those that speak a whole text so."""


def plugin(name: str, server: Server, session: aiohttp.ClientSession) -> Any:
    """A plugin as docs/clients.md has it, but for samples in place of mp3 where it has the choice."""
    match name:
        case "openai":
            return openai.TTS(base_url=server.v1, api_key=KEY, voice="nora", response_format="pcm")
        case "elevenlabs":
            settings = {"voice_id": "nora", "encoding": "pcm_24000", "http_session": session}
            return elevenlabs.TTS(base_url=server.v1, api_key=KEY, **settings)
        case "cartesia":
            return cartesia.TTS(base_url=server.url, api_key=KEY, voice="nora", http_session=session)
        case "deepgram":
            return deepgram.TTS(base_url=f"{server.v1}/speak", api_key=KEY, model="nora", http_session=session)
        case "baseten":
            where = f"{server.ws}/v1/audio/speech/stream"
            return baseten.TTS(
                model="qwen3-tts",
                model_endpoint=where,
                api_key=KEY,
                voice="nora",
                word_timestamps=True,
                http_session=session,
            )
    raise AssertionError(name)


async def spoken(events: Any) -> tuple[bytes, str]:
    """The audio of a stream, and the words that were told with times, as they were written."""
    pcm, words = b"", []
    async for event in events:
        assert event.frame.sample_rate == 24000
        pcm += bytes(event.frame.data)
        words += [word.strip() for word in event.frame.userdata.get("lk.timed_transcripts", [])]
    return pcm, " ".join(filter(None, words))


def begins_alike(pcm: bytes, expected: np.ndarray) -> bool:
    """As `is_same`, but for silence that a plugin puts in at the end of a segment."""
    samples = np.frombuffer(pcm, np.int16)
    return is_same(samples[: len(expected)].tobytes(), expected) and not samples[len(expected) :].any()


@pytest.mark.parametrize("name", ["openai", "elevenlabs", "cartesia", "deepgram", "baseten"])
def test_a_plugin_speaks_whole_live_cut_and_live_again(name: str, server: Server, native: Native) -> None:
    fields = FIELDS.get(name, {})
    whole = native.whole(TEXT, **fields) if name in OVER_HTTP else native.live(TEXT, **fields)
    in_pieces = native.live(TEXT, **fields)

    async def live(speaker: Any) -> tuple[bytes, str]:
        stream = speaker.stream()
        for token in ("Good", " morn", "ing,", " every", "one", "."):
            stream.push_text(token)
            await asyncio.sleep(0.01)
        stream.end_input()
        try:
            return await spoken(stream)
        finally:
            await stream.aclose()

    async def cut(speaker: Any) -> None:
        stream = speaker.stream() if speaker.capabilities.streaming else speaker.synthesize(LONG)
        if speaker.capabilities.streaming:
            stream.push_text(LONG)
            stream.end_input()
        async for _ in stream:
            break
        await stream.aclose()

    async def follow() -> None:
        async with aiohttp.ClientSession() as session:
            speaker = plugin(name, server, session)
            pcm, _ = await spoken(speaker.synthesize(TEXT))
            assert begins_alike(pcm, whole)
            if speaker.capabilities.streaming:
                pcm, words = await live(speaker)
                assert begins_alike(pcm, in_pieces)
                if speaker.capabilities.aligned_transcript:
                    assert words == TEXT
            await cut(speaker)
            if speaker.capabilities.streaming:
                pcm, _ = await live(speaker)
                assert begins_alike(pcm, in_pieces)
            await speaker.aclose()

    cut_before = sum(server.metric("sonoro_requests_total", reason=reason) for reason in ("disconnected", "cancelled"))
    run(follow())
    until(lambda: server.is_idle)
    cut_after = sum(server.metric("sonoro_requests_total", reason=reason) for reason in ("disconnected", "cancelled"))
    assert cut_after == cut_before + 1


@pytest.mark.parametrize("name", ["openai", "elevenlabs"])
def test_mp3_as_a_plugin_asks_for_it_unless_told(name: str, server: Server, native: Native) -> None:
    async def follow() -> None:
        async with aiohttp.ClientSession() as session:
            if name == "openai":
                speaker: Any = openai.TTS(base_url=server.v1, api_key=KEY, voice="alloy")
                speaker.prewarm()
            else:
                speaker = elevenlabs.TTS(base_url=server.v1, api_key=KEY, http_session=session)
            samples = 0
            async for event in speaker.synthesize(TEXT):
                samples += len(event.frame.data) / event.frame.sample_rate * 24000
            assert abs(samples - len(native.whole(TEXT))) < 0.15 * 24000
            await speaker.aclose()

    run(follow())
