"""Words over HTTP and in sessions: beside the audio, at its speed, and none unless asked for."""

import asyncio
import base64
import json
from typing import Any

import pytest
from servers import Server, check_error, serving
from sessions import Session, session
from sine_engines import nothing_left, run

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

SPEECH = "/v1/audio/speech"
TEXT = "Some words, which come one by one."
WORDS = ["Some", "words", "which", "come", "one", "by", "one"]
ASKED = {"input": TEXT, "response_format": "pcm", "timestamps": ["word"]}
CHARACTER_S = 0.01
"""How long the fake model speaks each."""


def check(words: list[dict[str, Any]], speed: float = 1.0, times: int = 1) -> None:
    assert [word["text"] for word in words] == WORDS * times
    text = " ".join([TEXT] * times)
    assert all(text[word["start"] : word["end"]] == word["text"] for word in words)
    for word in words[1:]:
        assert word["start_s"] == pytest.approx((word["start"] - 0.5) * CHARACTER_S / speed, abs=0.006)


def events_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(part.removeprefix(b"data: ")) for part in body.split(b"\n\n") if part]


async def until(kind: str, live: Session) -> list[dict[str, Any]]:
    """The events up to the first of `kind`; audio between them is passed over."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != kind:
        heard = await live.hear()
        events += [] if isinstance(heard, bytes) else [heard]
    return events


async def answer(server: Server, **fields: Any) -> Any:
    return await server.http.post(SPEECH, json=ASKED | fields)


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_events_hold_words_as_they_become_certain(speed: float) -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            # Long enough for several of the longest chunks: a word waits for .2 s of the audio after it.
            made = (await answer(server, input=" ".join([TEXT] * 5), stream_format="sse", speed=speed)).content
            events = events_of(made)
            kinds = [event["type"] for event in events]
            assert kinds[-1] == "speech.audio.done"
            assert kinds.count("speech.words") > 1
            check([word for event in events if event["type"] == "speech.words" for word in event["words"]], speed, 5)
            plain = events_of((await answer(server, stream_format="sse", timestamps=None)).content)
            assert {event["type"] for event in plain} == {"speech.audio.delta", "speech.audio.done"}

    run(ask())


def test_json_holds_audio_and_words_whole() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            told = (await answer(server, stream_format="json")).json()
            check(told["words"])
            heard = base64.b64decode(told["audio"])
            assert (len(heard) // 2, told["finish_reason"], told["format"]) == (len(TEXT) * 80, "stop", "pcm")
            assert (await answer(server, stream_format="json", timestamps=None)).json()["words"] is None
            check_error(await answer(server), 400, "timestamps")

    run(ask())


def test_a_model_that_shows_none_says_null() -> None:
    async def ask() -> None:
        async with serving("slow") as server:
            assert (await answer(server, stream_format="json")).json()["words"] is None

    run(ask())


def test_a_session_tells_of_words_and_which_was_heard_last() -> None:
    async def talk() -> None:
        async with serving("shown") as server, session(server) as live:
            await live.say("session.config", response_format="pcm", timestamps=["word"])
            assert (await live.hear())["type"] == "session.configured"
            await live.say("input.text", text=TEXT)
            await live.say("input.done")
            events = await until("audio.done", live)
            check([word for event in events if event["type"] == "audio.words" for word in event["words"]])
            long = " ".join([TEXT] * 20)
            await live.say("input.text", text=long)
            await live.say("input.done")
            while not isinstance(await live.hear(), bytes):
                pass
            await asyncio.sleep(0.5)
            await live.say("response.cancel")
            events = await until("response.cancelled", live)
            last = events[-1]["last_word"]
            assert long[last["start"] : last["end"]] == last["text"]
            # Made in a fifth of the time it plays: what was made is far beyond what was heard.
            assert 0.2 < last["start_s"] < 1.5

    run(talk())
