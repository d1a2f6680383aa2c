"""What Cartesia's clients send, as recorded from them, and what they need to be answered."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from servers import serving
from sessions import TEXT, audio_of, socket, whole
from sine_engines import LONG, nothing_left, run, until

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

VOICE = {"mode": "id", "id": "694f9389-aac1-45b6-b726-9d9369183238"}
RAW = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 8000}
SOCKET = "/tts/websocket?api_key=any&cartesia_version=2025-04-16"


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model_id": "sonic-3", "transcript": text, "voice": VOICE, "output_format": RAW, "language": "en", **fields}


def check_words(messages: list[dict[str, Any]], text: str) -> None:
    """The words told are those of the text, in order and without falling times."""
    told = [message["word_timestamps"] for message in messages if message["type"] == "timestamps"]
    assert [word for part in told for word in part["words"]] == text.split()
    starts, ends = ([at for part in told for at in part[name]] for name in ("start", "end"))
    assert all(start <= end for start, end in zip(starts, ends, strict=True))
    assert starts == sorted(starts)
    assert ends[-1] == pytest.approx(len(whole(text)) / 16000, abs=0.02)


def test_bytes_come_in_the_format_that_is_asked_for() -> None:
    async def speak() -> None:
        async with serving() as server:
            post = server.http.post
            headers = {"accept": "audio/wav", "cartesia-version": "2026-08-14"}
            answer = await post("/tts/bytes", json=body(TEXT), headers=headers)
            assert answer.content == whole()
            assert answer.headers["cartesia-request-id"]
            floats = await post("/tts/bytes", json=body(TEXT, output_format={**RAW, "encoding": "pcm_f32le"}))
            assert np.array_equal(np.frombuffer(floats.content, "<f4") * 32768, np.frombuffer(whole(), "<i2"))
            for given in ({**RAW, "container": "wav"}, {**RAW, "container": "wav", "encoding": "pcm_mulaw"}):
                wav = (await post("/tts/bytes", json=body(TEXT, output_format=given))).content
                assert (wav[:4], wav[8:12], wav[20]) == (b"RIFF", b"WAVE", 7 if "mulaw" in given["encoding"] else 1)
                assert len(wav) - 44 == len(whole()) / (2 if "mulaw" in given["encoding"] else 1)
            mp3 = {"container": "mp3", "sample_rate": 44100, "bit_rate": 128000}
            answer = await post("/tts/bytes", json=body(TEXT, output_format=mp3))
            assert answer.headers["content-type"] == "audio/mpeg"
            for rate in ({"speed": "fast"}, {"generation_config": {"speed": 1.25}}, {"speed": 1.25}):
                answer = await post("/tts/bytes", json=body(TEXT, **rate))
                assert len(answer.content) == pytest.approx(len(whole()) / 1.25, rel=0.05)

    run(speak())


def test_events_hold_audio_and_words_and_end_with_done() -> None:
    async def speak() -> None:
        async with serving() as server:
            answer = await server.http.post("/tts/sse", json=body(TEXT, add_timestamps=True, context_id="a"))
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
            messages = [json.loads(data.removeprefix("data: ")) for _, data in events]
            assert [name for name, _ in events] == [f"event: {message['type']}" for message in messages]
            assert audio_of(messages, "data") == whole()
            assert all({"step_time", "done"} <= set(each) for each in messages if each["type"] == "chunk")
            assert {message["context_id"] for message in messages} == {"a"}
            check_words(messages, TEXT)
            assert [message["type"] for message in messages if message["done"]] == ["done"]
            assert messages[-1]["type"] == "done"

    run(speak())


def test_voices_are_listed_until_there_are_none() -> None:
    async def ask() -> None:
        async with serving() as server:
            names, after = [], {}
            while page := (await server.http.get("/voices", params=after)).json()["data"]:
                names += [voice["id"] for voice in page]
                after = {"starting_after": names[-1]}
            assert names == list(server.service.speech.spec().voices)
            assert (await server.http.get(f"/voices/{names[0]}")).json()["id"] == names[0]
            refused = await server.http.get("/voices/nobody")
            assert (refused.status_code, refused.json()["error_code"]) == (404, "unknown_voice")

    run(ask())


def test_bad_requests_are_told_in_the_clients_words() -> None:
    async def ask() -> None:
        async with serving() as server:
            for fields in (
                {"transcript": None},
                {"transcript": ""},
                {"output_format": {"container": "ogg"}},
                {"output_format": {**RAW, "encoding": "pcm_s24le"}},
                {"output_format": {**RAW, "sample_rate": 1}},
                {"output_format": {"container": "mp3"}, "path": "/tts/sse"},
            ):
                path = fields.pop("path", "/tts/bytes")
                answer = await server.http.post(path, json={**body("Hm."), **fields})
                error = answer.json()
                assert (answer.status_code, error["type"], error["status_code"]) == (400, "error", 400), fields
                assert {"title", "message", "error_code", "request_id", "done"} <= set(error)
            name = 'sonoro_requests_total{dialect="cartesia",model="sine",reason="invalid_request"}'
            assert await server.metric(name) == 6

    run(ask())


def test_contexts_go_on_until_their_last_message_and_tell_of_flushes() -> None:
    async def speak() -> None:
        async with serving("live") as server, socket(server, SOCKET) as client:
            timed = {"add_timestamps": True}
            for piece in (TEXT[:4], TEXT[4:11], TEXT[11:]):
                await client.say(body(piece, context_id="one", **timed, **{"continue": True}))
            await client.say(body("Other words.", context_id="two", **timed))
            await client.say(body("", context_id="one", **timed, **{"continue": False}))
            heard: list[dict[str, Any]] = []
            while [message["type"] for message in heard].count("done") < 2:
                heard.append(await client.hear())
            for name, text in (("one", TEXT), ("two", "Other words.")):
                mine = [message for message in heard if message["context_id"] == name]
                assert audio_of(mine, "data") == whole(text)
                check_words(mine, text)
                assert mine[-1] == {"type": "done", "context_id": name, "done": True, "status_code": 200}
            for text in ("One. ", "Two."):
                await client.say(body(text, context_id="three", flush=True, **{"continue": True}))
            await client.say(body(" ", context_id="three", **{"continue": False}))
            heard = await client.hear_until(type="done")
            kinds = [message["type"] for message in heard]
            assert [message["flush_id"] for message in heard if message["type"] == "flush_done"] == [1, 2]
            assert kinds.index("flush_done") < len(kinds) - 2
            assert audio_of(heard, "data") == whole("One.") + whole("Two.")
            await until(server.is_idle)

    run(speak())


def test_phrases_stand_apart_when_nothing_is_buffered() -> None:
    async def speak() -> None:
        async with serving("live") as server, socket(server, SOCKET) as client:
            for delay, text in (({"max_buffer_delay_ms": 0}, "One. Two."), ({}, "One.Two.")):
                for piece in ("One.", "Two."):
                    await client.say(body(piece, context_id=text, **delay, **{"continue": True}))
                await client.say(body("", context_id=text, **delay, **{"continue": False}))
                assert audio_of(await client.hear_until(type="done"), "data") == whole(text)

    run(speak())


def test_a_cancelled_context_ends_and_others_go_on() -> None:
    async def speak() -> None:
        async with serving("slow_live") as server, socket(server, SOCKET) as client:
            await client.say(body(LONG, context_id="long"))
            heard = [await client.hear() for _ in range(3)]
            await client.say({"context_id": "long", "cancel": True}, {"context_id": "nobody", "cancel": True})
            await client.say(body("What then?", context_id="next"))
            heard += await client.hear_until(type="done", context_id="next")
            mine = [message for message in heard if message["context_id"] == "long"]
            assert {message["type"] for message in mine} == {"chunk"}
            assert 0 < len(audio_of(mine, "data")) < len(whole(LONG)) / 2
            assert audio_of([message for message in heard if message["context_id"] == "next"], "data") == whole(
                "What then?"
            )
            await until(server.is_idle)

    run(speak())


def test_errors_on_a_socket_have_their_context_and_end_it() -> None:
    async def speak() -> None:
        async with serving("live") as server, socket(server, SOCKET) as client:
            wav = {**RAW, "container": "wav"}
            for message in (
                body("Hm.", context_id="a", output_format=wav),
                body("x" * 5000, context_id="a"),
                {"context_id": "a", "transcript": 7},
            ):
                await client.say(message)
                error = await client.hear()
                assert (error["type"], error["status_code"], error["done"]) == ("error", 400, True)
            await client.say("no JSON", b"\x00")
            for _ in range(2):
                assert "context_id" in (await client.hear_until(type="error"))[-1]
            await client.say(body("Still here.", context_id="b"))
            assert audio_of(await client.hear_until(type="done"), "data") == whole("Still here.")

    run(speak())


def test_a_client_that_leaves_frees_its_slot() -> None:
    async def leave() -> None:
        async with serving("slow_live") as server:
            async with socket(server, SOCKET) as client:
                for name in "ab":
                    await client.say(body(LONG, context_id=name))
                assert base64.b64decode((await client.hear())["data"])
            await until(server.is_idle, 5)
            name = 'sonoro_requests_total{dialect="cartesia",model="sine",reason="disconnected"}'
            assert await server.metric(name) == 2

    run(leave())
