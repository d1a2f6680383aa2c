"""Cartesia's own client."""

from __future__ import annotations

import time
from typing import Any

import cartesia
import numpy as np
import pytest

from conftest import KEY, LONG, TEXT, Native, Server, is_same, pause_of, run, sounds_like, until

VOICE = {"mode": "id", "id": "6ccbfb76-1fc6-48f7-b71d-91ac6298247b"}
RAW = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000}
SETTINGS: dict[str, Any] = {"model_id": "sonic-3", "voice": VOICE, "output_format": RAW}


def settings(server: Server) -> dict[str, Any]:
    return {"api_key": KEY, "base_url": server.url, "websocket_base_url": server.ws, "max_retries": 0}


def client(server: Server, **more: Any) -> cartesia.Cartesia:
    return cartesia.Cartesia(**{**settings(server), **more})


def test_a_text_is_spoken_whole_and_by_events(server: Server, native: Native) -> None:
    speech = client(server).tts
    assert is_same(speech.generate(transcript=TEXT, **SETTINGS).read(), native.whole(TEXT))
    wav = {"container": "wav", "encoding": "pcm_f32le", "sample_rate": 44100}
    assert sounds_like(
        speech.generate(transcript=TEXT, **{**SETTINGS, "output_format": wav}).read(), native.whole(TEXT)
    )
    events = list(speech.generate_sse(transcript=TEXT, add_timestamps=True, **SETTINGS))
    assert is_same(b"".join(event.audio for event in events if event.type == "chunk"), native.whole(TEXT))
    words = [word for event in events if event.type == "timestamps" for word in event.word_timestamps.words]
    assert words == TEXT.split()
    assert events[-1].type == "done"


def test_live_text_is_spoken_in_contexts(server: Server, native: Native) -> None:
    with client(server).tts.websocket_connect() as connection:
        for _ in range(2):
            context = connection.context(**SETTINGS)
            for piece in ("Good mor", "ning, ", "everyone."):
                context.push(piece)
            context.no_more_inputs()
            heard = list(context.receive())
            assert is_same(b"".join(event.audio for event in heard if event.type == "chunk"), native.live(TEXT))
            assert heard[-1].type == "done"


def test_a_cancelled_context_frees_its_slot_and_the_next_is_spoken(server: Server, native: Native) -> None:
    with client(server).tts.websocket_connect() as connection:
        context = connection.context(**SETTINGS)
        context.push(LONG, continue_=False)
        for event in context.receive():
            if event.type == "chunk":
                break
        context.cancel()
        until(lambda: server.is_idle)
        context = connection.context(**SETTINGS)
        context.push(TEXT, continue_=False)
        heard = [
            event for event in context.receive() if event.type == "chunk" and event.context_id == context._context_id
        ]
        assert is_same(b"".join(event.audio for event in heard), native.live(TEXT))


def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    with client(server).tts.websocket_connect() as connection:
        context = connection.context(**SETTINGS)
        context.push(LONG, continue_=False)
        next(iter(context.receive()))
    left_s = time.monotonic()
    until(lambda: server.is_idle)
    with client(server).tts.with_streaming_response.generate(transcript=LONG, **SETTINGS) as answer:
        next(answer.iter_bytes())
    until(lambda: server.is_idle)
    assert time.monotonic() - left_s < 30


def test_voices_are_listed_and_what_is_refused_is_an_error_of_the_client(server: Server) -> None:
    assert {voice.id for voice in client(server).voices.list()} >= {"nora", "miles"}
    assert client(server).voices.get("nora").name == "nora"
    with pytest.raises(cartesia.AuthenticationError):
        client(server, api_key="wrong").tts.generate(transcript=TEXT, **SETTINGS)
    with pytest.raises(cartesia.BadRequestError) as caught:
        client(server).tts.generate(transcript="x" * 5000, **SETTINGS)
    assert "4096" in str(caught.value)


def test_the_asynchronous_client_speaks_live(server: Server, native: Native) -> None:
    async def speak() -> bytes:
        async with (
            cartesia.AsyncCartesia(**settings(server)) as asked,
            asked.tts.websocket_connect() as connection,
        ):
            context = connection.context(**SETTINGS)
            await context.push("Good morning, ")
            await context.push("everyone.", continue_=False)
            return b"".join([event.audio async for event in context.receive() if event.type == "chunk"])

    assert is_same(run(speak()), native.live(TEXT))


def test_a_break_is_a_pause_whole_and_live(server: Server) -> None:
    whole = client(server).tts.generate(transcript='Good morning.<break time="750ms"/>My friends.', **SETTINGS).read()
    assert pause_of(whole) == 18000
    with client(server).tts.websocket_connect() as connection:
        context = connection.context(**SETTINGS)
        for piece in ("Good morning.<br", 'eak time="750ms"/>My', " friends."):
            context.push(piece)
        context.no_more_inputs()
        assert pause_of(b"".join(event.audio for event in context.receive() if event.type == "chunk")) == 18000


def test_dictionaries_are_managed_and_used(server: Server) -> None:
    asked = client(server).pronunciation_dicts
    made = asked.create(name="words", items=[{"text": "SQL", "pronunciation": "sequel"}])
    assert made.id in [one.id for one in asked.list()]
    assert asked.retrieve(made.id).items[0].alias == "sequel"
    speech = client(server).tts
    said = speech.generate(transcript="SQL", pronunciation_dict_id=made.id, **SETTINGS).read()
    assert is_same(said, np.frombuffer(speech.generate(transcript="sequel", **SETTINGS).read(), np.int16).astype(int))
    with client(server).tts.websocket_connect() as connection:
        live = []
        for text, more in (("SQL", {"pronunciation_dict_id": made.id}), ("sequel", {})):
            context = connection.context(**SETTINGS, **more)
            context.push(text, continue_=False)
            live.append(b"".join(event.audio for event in context.receive() if event.type == "chunk"))
        assert is_same(live[0], np.frombuffer(live[1], np.int16).astype(int))
    asked.delete(made.id)
    assert made.id not in [one.id for one in asked.list()]
