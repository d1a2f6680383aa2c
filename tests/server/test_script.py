"""Markup over HTTP: pauses in every format and body, refusals with their place, warnings, lexicons of a request."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from servers import Server, check_error, serving
from sessions import session
from sine_engines import nothing_left, run

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

SPEECH = "/v1/audio/speech"
TEXT = 'Good morning<break time="750ms"/>my friends'


async def answer(server: Server, text: str, **fields: Any) -> Any:
    return await server.http.post(SPEECH, json={"input": text, "response_format": "pcm"} | fields)


def longest_silence(pcm: bytes) -> int:
    audible = np.flatnonzero(np.abs(np.frombuffer(pcm, "<i2").astype(int)) > 32)
    return int(np.diff(audible).max()) - 1


@pytest.mark.parametrize("form", ["audio", "sse", "json"])
def test_a_pause_is_exact_in_every_body(form: str) -> None:
    def audio_of(sent: Any) -> bytes:
        if form == "audio":
            return bytes(sent.content)
        if form == "json":
            return base64.b64decode(sent.json()["audio"])
        events = [json.loads(part.removeprefix("data: ")) for part in sent.text.split("\n\n") if part]
        return b"".join(base64.b64decode(event["audio"]) for event in events if "audio" in event)

    async def ask() -> None:
        async with serving("shown") as server:
            sent = await answer(server, TEXT, stream_format=form)
            assert sent.status_code == 200, sent.text
            assert longest_silence(audio_of(sent)) == 6000

    run(ask())


def test_a_pause_keeps_its_length_at_another_speed() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            texts = (TEXT, "Good morning,", "my friends")
            whole, *parts = [(await answer(server, text, speed=2.0)).content for text in texts]
            # Silence around the pause is left out; the sine has up to a sample of it.
            assert abs(len(whole) - 2 * 6000 - sum(map(len, parts))) <= 4

    run(ask())


def test_markup_is_refused_with_its_place_or_listed() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            text = "<speak>One <foo/>two</speak>"
            check_error(await answer(server, text), 400, "input")
            assert "line 1, column 12" in (await answer(server, text)).json()["error"]["message"]
            plain = await answer(server, text, on_markup="plain")
            assert (plain.status_code, plain.headers["x-sonoro-warnings"]) == (200, "1")
            told = (await answer(server, text, on_markup="plain", stream_format="json")).json()
            assert told["warnings"] == ["foo (line 1, column 12)"]
            check_error(await answer(server, "x", markup="html"), 400, "markup")

    run(ask())


def test_marks_are_told_in_events_and_in_json() -> None:
    text = "<speak>Good <mark name='a'/>day <mark name='b'/></speak>"

    async def ask() -> None:
        async with serving("shown") as server:
            asked = {"timestamps": ["word"], "speed": 2.0}
            whole = (await answer(server, text, stream_format="json", **asked)).json()
            assert [mark["name"] for mark in whole["marks"]] == ["a", "b"]
            assert whole["marks"][0]["time_s"] == whole["words"][1]["start_s"]
            sent = await answer(server, text, stream_format="sse", **asked)
            told = [json.loads(part.removeprefix("data: ")) for part in sent.text.split("\n\n") if part]
            assert [mark for event in told for mark in event.get("marks", ())] == whole["marks"]
            async with session(server) as live:
                await live.say("session.config", response_format="pcm", **asked)
                await live.hear()
                _, events = await live.speak(text)
                while events[-1]["type"] != "audio.done":
                    events += (await live.listen())[1]
                assert [mark for event in events for mark in event.get("marks", ())] == whole["marks"]
            model = (await server.http.get("/v1/models")).json()["data"][0]
            assert {"pause", "mark", "voice"} < set(model["markup"])

    run(ask())


def test_nothing_to_speak_is_its_pause_or_a_moment_of_silence() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            assert (await answer(server, "[pause:1s]", speed=2.0)).content == bytes(16000)
            assert (await answer(server, "<speak/>")).content == bytes(2 * 1600)

    run(ask())


def test_a_request_brings_lexicons_of_its_own() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            long = await answer(server, "SQL", lexicons=[{"SQL": "sequel and more"}])
            assert len(long.content) == 160 * len("sequel and more")
            rules = [{"text": "SQL", "alias": "sequel", "case_sensitive": False}]
            assert len((await answer(server, "sql", lexicons=[rules])).content) == 160 * len("sequel")
            check_error(await answer(server, "SQL", lexicons=[[{"text": "SQL"}]]), 400, "lexicons")

    run(ask())


def test_aliases_make_no_endless_text() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            rules = [{"a": "word " * 90}]
            check_error(await answer(server, "a " * 200, lexicons=rules), 400, "input")
            async with session(server) as live:
                await live.say("session.config", response_format="pcm", lexicons=[{"a": "b" * 500}])
                await live.hear()
                assert (await live.speak("a " * 250))[1][-1]["type"] in ("audio.done", "error")

    run(ask())


def test_voices_change_within_a_text() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            text = "[voice:high]Good day to you.[voice:low]And you."
            changed = (await answer(server, text, allow_voice_tags=True)).content
            high = (await answer(server, "Good day to you.", voice="high")).content
            assert changed[: len(high)] == high
            check_error(await answer(server, "[voice:x]Hi", allow_voice_tags=True), 404, "voice")
            named = text.replace("high", "Ann").replace("low", "Bob")
            aliases = {"ann": "high", "BOB": "low"}
            assert (await answer(server, named, allow_voice_tags=True, voice_aliases=aliases)).content == changed

    run(ask())


def test_a_dialogue_of_inputs_is_its_lines_with_pauses() -> None:
    lines = [("high", "Good day to you."), ("low", "And you, my friend."), ("high", "Well.")] * 13 + [("low", "Bye.")]
    inputs = [{"voice": voice, "text": text} for voice, text in lines]

    async def ask() -> None:
        async with serving("shown") as server:
            body = {"inputs": inputs, "response_format": "pcm", "pause_between": 0.5}
            sent = await server.http.post(SPEECH, json=body)
            assert sent.status_code == 200, sent.text
            letters = sum(len(text) for _, text in lines)
            assert abs(len(sent.content) / 2 - 80 * letters - 39 * 4000) <= 40 * 3
            both = await server.http.post(SPEECH, json={**body, "input": "Hi."})
            check_error(both, 400, "inputs")
            turns = [{"voice": voice, "text": text} for voice, text in lines]
            body = {"turns": turns, "response_format": "pcm", "pause_between_turns": 0.3}
            kokoro = await server.http.post("/dev/dialogue", json=body)
            # Neighbours of one voice are one turn.
            assert abs(len(kokoro.content) / 2 - 80 * (letters + 12) - 27 * 2400) <= 40 * 3
            aliases = {"a": {"voice": "high", "rate": 2.0}, "b": "low"}
            turns = [{"voice_id": "a", "text": "Good day."}] * 2 + [{"voice_id": "b", "text": "Yes."}]
            body = {**body, "voice_aliases": aliases, "turns": None, "inputs": turns, "pause_between_turns": 0}
            sent = await server.http.post("/dev/dialogue", json=body)
            assert abs(len(sent.content) / 2 - 80 * (len("Good day. Good day.") / 2 + 4)) <= 240
            refused = await server.http.post("/dev/dialogue", json={"turns": [{"text": "a", "voice": "x"}]})
            assert (refused.status_code, refused.json()["detail"]["error"]) == (404, "unknown_voice")
            assert (await server.http.post("/dev/dialogue", json={"turns": []})).status_code == 400
            turns = [{"voice_id": f"stranger {voice}", "text": text} for voice, text in lines]
            path = "/v1/text-to-dialogue/stream?output_format=pcm_8000"
            other = await server.http.post(path, json={"inputs": turns, "model_id": "eleven_v3"})
            assert abs(len(other.content) / 2 - 80 * letters - 39 * 2400) <= 40 * 3

    run(ask())
