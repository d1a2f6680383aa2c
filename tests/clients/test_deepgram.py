"""Deepgram's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from deepgram import AsyncDeepgramClient, DeepgramClient
from deepgram.core.api_error import ApiError
from deepgram.environment import DeepgramClientEnvironment
from deepgram.speak.v1.types import SpeakV1Text

from conftest import KEY, LONG, TEXT, Native, Server, is_same, pause_of, run, sounds_like, until

VOICE = "aura-2-thalia-en"
LIVE = {"model": VOICE, "encoding": "linear16", "sample_rate": 24000}


def settings(server: Server, key: str = KEY) -> dict[str, Any]:
    at = DeepgramClientEnvironment(base=server.url, production=server.ws, agent=server.ws, agent_rest=server.url)
    return {"api_key": key, "environment": at}


def heard(messages: Iterator[Any], kind: str) -> bytes:
    """The audio up to a message of that type."""
    audio = b""
    for message in messages:
        if isinstance(message, bytes):
            audio += message
        elif message.type == kind:
            break
    return audio


def test_a_text_is_spoken_whole_and_streamed(server: Server, native: Native) -> None:
    speech = DeepgramClient(**settings(server)).speak.v1.audio
    pcm = b"".join(speech.generate(text=TEXT, model=VOICE, encoding="linear16", container="none", sample_rate=24000))
    assert is_same(pcm, native.whole(TEXT))
    assert sounds_like(b"".join(speech.generate(text=TEXT)), native.whole(TEXT))
    law = b"".join(speech.generate(text=TEXT, encoding="mulaw", container="wav", sample_rate=8000))
    assert sounds_like(law, native.whole(TEXT))


def test_live_text_is_spoken_flush_by_flush_until_it_is_cleared(server: Server, native: Native) -> None:
    with DeepgramClient(**settings(server)).speak.v1.connect(**LIVE) as socket:
        messages = iter(socket)
        assert next(messages).type == "Metadata"
        for _ in range(2):
            for word in ("Good ", "morning, ", "everyone."):
                socket.send_text(SpeakV1Text(text=word))
            socket.send_flush()
            assert is_same(heard(messages, "Flushed"), native.live(TEXT))
        socket.send_text(SpeakV1Text(text=LONG))
        assert isinstance(next(messages), bytes)
        socket.send_clear()
        heard(messages, "Cleared")
        until(lambda: server.is_idle)
        socket.send_text(SpeakV1Text(text=TEXT))
        socket.send_close()
        assert is_same(heard(messages, "none"), native.live(TEXT))


def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    with DeepgramClient(**settings(server)).speak.v1.connect(**LIVE) as socket:
        socket.send_text(SpeakV1Text(text=LONG))
        while not isinstance(socket.recv(), bytes):
            pass
    until(lambda: server.is_idle)


def test_what_is_refused_is_an_error_of_the_client(server: Server) -> None:
    with pytest.raises(ApiError) as caught:
        list(DeepgramClient(**settings(server, "wrong")).speak.v1.audio.generate(text=TEXT))
    assert caught.value.status_code == 401
    with pytest.raises(Exception, match="401"), DeepgramClient(**settings(server, "wrong")).speak.v1.connect(**LIVE):
        pass
    assert DeepgramClient(**settings(server)).manage.v1.models.list().tts


def test_the_asynchronous_client_speaks_live(server: Server, native: Native) -> None:
    async def speak() -> bytes:
        async with AsyncDeepgramClient(**settings(server)).speak.v1.connect(**LIVE) as socket:
            await socket.send_text(SpeakV1Text(text=TEXT))
            await socket.send_close()
            return b"".join([message async for message in socket if isinstance(message, bytes)])

    assert is_same(run(speak()), native.live(TEXT))


def test_a_pause_of_its_own_form_is_played(server: Server) -> None:
    speech = DeepgramClient(**settings(server)).speak.v1.audio
    text = r"Good morning.\{pause:750ms\}My friends."
    pcm = b"".join(speech.generate(text=text, model=VOICE, encoding="linear16", container="none", sample_rate=24000))
    assert pause_of(pcm) == 18000
