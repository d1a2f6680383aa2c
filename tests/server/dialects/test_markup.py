"""Pauses that clients of other servers send, whole and live: silence of their length, and no tag read aloud."""

from typing import Any

import numpy as np
import pytest
from servers import Server, serving
from sessions import audio_of, session, socket
from sine_engines import nothing_left, run

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

TAG = '<break time="750ms"/>'
TEXT = f"Good morning.{TAG}My friends."
LEAST = len("Good morning.") + len("My friends.")
RAW = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 8000}
FRAME = 80


def check(pcm: bytes, pause_s: float = 0.75) -> None:
    samples = np.abs(np.frombuffer(pcm, "<i2").astype(int))
    assert int(np.diff(np.flatnonzero(samples > 32)).max()) - 1 == round(pause_s * 8000)
    spoken = (len(samples) - round(pause_s * 8000)) / FRAME
    assert abs(spoken - LEAST) <= 1.1


def pieces(text: str, size: int = 4) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


async def cartesia(server: Server) -> bytes:
    async with socket(server, "/tts/websocket?cartesia_version=2025-04-16") as client:
        said: dict[str, Any] = {"model_id": "sonic-3", "context_id": "a", "output_format": RAW}
        for piece in pieces(TEXT):
            await client.say({**said, "transcript": piece, "continue": True})
        await client.say({**said, "transcript": "", "continue": False})
        return audio_of(await client.hear_until(type="done"), "data")


async def elevenlabs(server: Server) -> bytes:
    path = "/v1/text-to-speech/low/stream-input?output_format=pcm_8000&enable_ssml_parsing=true"
    async with socket(server, path) as client:
        for piece in [" ", *pieces(TEXT), ""]:
            await client.say({"text": piece})
        return audio_of(await client.hear_until())


async def deepgram(server: Server) -> bytes:
    async with socket(server, "/v1/speak?encoding=linear16&sample_rate=8000") as client:
        await client.hear()
        for piece in pieces(TEXT.replace(TAG, r"\{pause:750ms\}")):
            await client.say({"type": "Speak", "text": piece})
        await client.say({"type": "Flush"})
        return audio_of([one for one in await client.hear_until(type="Flushed") if isinstance(one, bytes)])


async def native(server: Server) -> bytes:
    async with session(server) as live:
        await live.say("session.config", response_format="pcm")
        await live.hear()
        return (await live.speak(*pieces(TEXT)))[0]


@pytest.mark.parametrize("speak", [cartesia, elevenlabs, deepgram, native])
@pytest.mark.parametrize("model", ["live", "shown"])
def test_a_pause_within_live_text_is_played(speak: Any, model: str) -> None:
    async def ask() -> None:
        async with serving(model) as server:
            check(await speak(server))

    run(ask())


def test_a_pause_within_a_text_is_played() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            body = {"transcript": TEXT, "voice": "low", "output_format": RAW}
            check((await server.http.post("/tts/bytes", json=body)).content)
            path = "/v1/text-to-speech/low?output_format=pcm_8000"
            check((await server.http.post(path, json={"text": TEXT})).content)
            emotional = f'<emotion value="angry"/>{TEXT}'
            check((await server.http.post("/tts/bytes", json={**body, "transcript": emotional})).content)
            params = {"encoding": "linear16", "sample_rate": "8000", "container": "none"}
            text = TEXT.replace(TAG, r"\{pause:750ms\}")
            check((await server.http.post("/v1/speak", params=params, json={"text": text})).content)

    run(ask())


def test_a_session_takes_every_syntax_but_no_dialogue() -> None:
    async def ask() -> None:
        async with serving("live") as server, session(server) as live:
            await live.say("session.config", response_format="pcm", markup="tags", on_markup="plain")
            assert (await live.hear())["type"] == "session.configured"
            check((await live.speak("<b>Good</b> morn", "ing.[pau", "se 750ms]My friends."))[0])
            inputs = [{"text": "Hi.", "voice": "low"}]
            assert (await live.refused("session.config", inputs=inputs))["param"] == "inputs"

    run(ask())
