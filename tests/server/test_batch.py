"""Several texts in one request: each as if it had come alone, in order, failing alone, within limits."""

import asyncio
import base64
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import SETTINGS, Server, recording, serving
from sine_engines import LONG, alone, nothing_left, run, until
from sine_models import HELD

from sonoro.core.types import SpeechRequest
from sonoro.server.batch import Item
from sonoro.server.speech import SpeechFactory

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

BATCH = "/v1/audio/speech/batch"


async def speak(server: Server, items: Any, **common: Any) -> httpx.Response:
    return await server.http.post(BATCH, json={"items": items, "response_format": "pcm", **common})


def spoken(text: str, **fields: Any) -> bytes:
    return alone(SpeechRequest(id="a", text=text, **{"voice": "low", **fields}))


def test_each_is_spoken_as_if_alone_and_fails_alone() -> None:
    items = [
        {"input": "The first one."},
        {"input": "The second, higher.", "voice": "high", "seed": 3},
        {"input": "Nobody's.", "voice": "nobody"},
        {"input": 7},
        {},
        {"input": "As events.", "stream_format": "sse"},
        {"input": "With words.", "stream_format": "json", "timestamps": ["word"]},
        {"input": "It is unspeakable."},
        {"input": "A tone.", "ref_audio": recording(), "voice": None, "x_vector_only_mode": True},
        {"input": "As a file.", "response_format": "wav"},
    ]

    async def ask() -> None:
        async with serving() as server:
            answer = await speak(server, items, voice="low", seed=1, model="tts-1")
            assert answer.status_code == 200
            whole = answer.json()
            assert whole["id"] == answer.headers["x-request-id"]
            assert (whole["total"], whole["succeeded"], whole["failed"]) == (10, 4, 6)
            results = whole["results"]
            assert [result["index"] for result in results] == list(range(10))
            for index, expected in (
                (0, spoken("The first one.", seed=1)),
                (1, spoken("The second, higher.", seed=3, voice="high")),
            ):
                result = results[index]
                assert base64.b64decode(result["audio_data"]) == expected
                assert (result["status"], result["media_type"], result["sample_rate"]) == ("success", "audio/pcm", 8000)
                assert result["finish_reason"] == "stop"
                assert result["usage"]["input_tokens"] == len(items[index]["input"])
            for index, code, field in (
                (2, "unknown_voice", "voice"),
                (3, "invalid_request", "input"),
                (4, "invalid_request", "input"),
                (5, "invalid_request", "stream_format"),
                (6, "invalid_request", "timestamps"),
                (7, "invalid_request", "input"),
            ):
                assert results[index]["status"] == "error"
                assert (results[index]["error"]["code"], results[index]["error"]["param"]) == (code, field)
            assert results[8]["status"] == "success"
            assert base64.b64decode(results[9]["audio_data"]).startswith(b"RIFF")
            assert results[9]["media_type"] == "audio/wav"
            assert await server.is_idle()
            assert await server.metric("sonoro_requests_in_flight") == 0
            for reason, count in (("stop", 4), ("invalid_request", 5), ("unknown_voice", 1)):
                assert await server.metric(f'sonoro_requests_total{{model="sine",reason="{reason}"}}') == count

    run(ask())


def test_headers_tell_of_ignored_fields_and_of_what_a_quota_leaves() -> None:
    """As those of one text do."""
    settings = dataclasses.replace(SETTINGS, quotas={"default": {"requests_per_minute": 60}})

    async def ask() -> None:
        async with serving(settings=settings) as server:
            body = {"items": [{"input": "One.", "b": 1}, {"input": "Two."}, {"input": 3, "c": 1}], "a\n": 2, "d": None}
            answer = await server.http.post(BATCH, json=body)
            assert answer.headers["x-sonoro-ignored"] == "a%0A, b"
            assert answer.headers["x-ratelimit-remaining-requests"] == "58"
            answer = await server.http.post(BATCH, json={"items": [{"input": "One."}]})
            assert "x-sonoro-ignored" not in answer.headers

    run(ask())


def test_what_is_wrong_with_the_whole_is_refused() -> None:
    settings = dataclasses.replace(SETTINGS, max_batch_characters=100)

    async def ask() -> None:
        async with serving(settings=settings) as server:
            for items, words in (
                (None, "items"),
                ([], "items"),
                ([{"input": "One."}] * 33, "items"),
                (["One."], "items"),
                ({"input": "One."}, "items"),
                ([{"input": "a" * 50}, {"input": "b" * 51}], "at most 100"),
            ):
                answer = await speak(server, items)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "items"
                assert words in answer.json()["error"]["message"]
            assert (await server.http.post(BATCH, content=b"{")).status_code == 400
            most = (await speak(server, [{"input": f"{number}."} for number in range(32)])).json()
            assert most["succeeded"] == 32

    run(ask())


def test_somebody_with_one_text_does_not_wait_for_a_batch() -> None:
    long = {"max_new_tokens": 100, "ignore_eos": True}

    async def ask() -> None:
        async with serving("slow", dataclasses.replace(SETTINGS, max_concurrency=2)) as server:
            batch = asyncio.create_task(speak(server, [{"input": LONG, **long}] * 6))
            await until(lambda: server.metric("sonoro_engine_running"))
            assert (await server.speak()).status_code == 200
            assert not batch.done()
            assert (await batch).json()["succeeded"] == 6

    run(ask())


def test_a_client_that_leaves_ends_its_batch() -> None:
    long = {"max_new_tokens": 400, "ignore_eos": True}

    async def leave() -> None:
        async with serving("slow") as server:
            body = {"items": [{"input": LONG, **long}] * 8}
            with pytest.raises(httpx.ReadTimeout):
                await server.http.post(BATCH, json=body, timeout=0.5)
            await until(server.is_idle)
            assert await server.metric("sonoro_requests_in_flight") == 0

    run(leave())


def test_a_killed_engine_fails_the_items_that_were_under_way() -> None:
    async def kill() -> None:
        async with serving("slow") as server:
            answer = await speak(server, [{"input": "Some words."}, {"input": "It must die."}])
            assert answer.status_code == 200
            results = answer.json()["results"]
            assert results[1]["error"]["code"] == "engine_crashed"
            await until(server.is_ready)
            assert (await speak(server, [{"input": "Some words."}])).json()["succeeded"] == 1

    run(kill())


def test_an_answer_that_could_be_too_large_is_refused_before_anything_is_spoken() -> None:
    """32 KB that asked for 156 MB; and the same length in a format in which it is small enough."""
    items = [{"input": "a word or " * 102 + "two."}] * 32
    largest = {"response_format": "wav", "sample_rate": 48_000, "speed": 0.25}

    async def ask() -> None:
        async with serving() as server:
            refused = await asyncio.gather(*(speak(server, items, **largest) for _ in range(4)))
            for answer in refused:
                assert answer.status_code == 413
                assert answer.json()["error"]["code"] == "answer_too_large"
                assert "max_new_tokens" in answer.text
            assert await server.metric("sonoro_requests_in_flight") == 0
            assert await server.metric('sonoro_audio_seconds_total{model="sine"}') == 0
            few = await speak(server, items[:1], **largest)
            assert few.json()["succeeded"] == 1
            endless = [{"input": "Short.", "max_new_tokens": 2000, "ignore_eos": True, **largest}] * 32
            assert (await speak(server, endless)).status_code == 413

    run(ask())


def test_answers_that_are_held_have_room_together_and_give_it_back(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, max_total_answer_bytes=200_000)
    go = tmp_path / "go"
    items = [{"input": "Some words.", "max_new_tokens": 400, "ignore_eos": True}]  # 400 frames of 10 ms: 85 KB

    async def ask() -> None:
        async with serving(f"{HELD}{go}", settings) as server:
            first = asyncio.create_task(speak(server, items))
            await until(lambda: server.has("sonoro_requests_in_flight", 1))
            assert (await speak(server, items)).status_code == 429
            go.touch()
            assert (await first).status_code == 200
            go.unlink()
            with pytest.raises(httpx.ReadTimeout):
                await server.http.post(BATCH, json={"items": items}, timeout=0.2)
            await until(server.is_idle)
            go.touch()
            for _ in range(3):
                assert (await speak(server, items)).status_code == 200

    run(ask())


def test_an_item_that_takes_more_than_it_could_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SpeechFactory, "max_audio_bytes", lambda self, body, *_: 4000 if body.input == LONG else 100_000
    )

    async def ask() -> None:
        async with serving() as server:
            answer = (await speak(server, [{"input": LONG}, {"input": "Some words."}])).json()
            assert [result["status"] for result in answer["results"]] == ["error", "success"]
            assert answer["results"][0]["error"]["code"] == "answer_too_large"
            await until(server.is_idle)

    run(ask())


def test_one_json_object_is_limited_as_a_batch_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before it is spoken, together with others, and in the end by what was spoken."""
    settings = dataclasses.replace(SETTINGS, max_answer_bytes=150_000, max_total_answer_bytes=200_000)
    go = tmp_path / "go"
    fields = {"stream_format": "json", "max_new_tokens": 400, "ignore_eos": True}  # 400 frames of 10 ms: 85 KB

    async def ask() -> None:
        async with serving(f"{HELD}{go}", settings) as server:
            refused = await server.speak("Some words.", **fields | {"max_new_tokens": 600})
            assert refused.status_code == 413
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("answer_too_large", "invalid_request_error")
            assert error["message"].startswith("stream_format: 'json': the answer could have 1")
            assert "bytes and must have at most 150000; " in error["message"]
            assert "input" in (await server.speak("word " * 2000, **fields)).json()["error"]["message"]
            first = asyncio.create_task(server.speak("Some words.", **fields))
            await until(lambda: server.has("sonoro_requests_in_flight", 1))
            assert (await server.speak("Some words.", **fields)).status_code == 429
            go.touch()
            assert (await first).status_code == 200
            for _ in range(3):
                answer = await server.speak("Some words.", **fields)
                assert answer.status_code == 200
                assert len(answer.content) <= 150_000
            monkeypatch.setattr(SpeechFactory, "max_audio_bytes", lambda self, body, *_: 4000)
            cut = await server.speak("Some words.", **fields)
            assert (cut.status_code, cut.json()["error"]["code"]) == (413, "answer_too_large")
            assert "input: its audio takes more than 4000 bytes" in cut.text
            assert (await server.speak("Some words.", **fields | {"stream_format": "sse"})).status_code == 200
            await until(server.is_idle)

    run(ask())


@pytest.mark.parametrize("format", ["pcm", "wav", "mp3", "opus", "aac", "flac"])
def test_no_answer_is_larger_than_it_could_be(format: str) -> None:
    """What each text could come to, by its letters and by max_new_tokens, is more than what it comes to."""

    async def ask() -> None:
        async with serving() as server:
            for fields in ({}, {"max_new_tokens": 300}):
                for text in ("A.", "Some words.", LONG):
                    items = [{"input": text, "ignore_eos": True, "speed": 0.5, **fields}]
                    wanted = {"items": items, "response_format": format}
                    item = Item(server.service, {**items[0], "response_format": format})
                    answer = await server.http.post(BATCH, json=wanted)
                    assert answer.json()["succeeded"] == 1, answer.text[:300]
                    assert len(base64.b64decode(answer.json()["results"][0]["audio_data"])) <= item.audio_bytes
                    assert len(answer.content) <= item.max_bytes

    run(ask())
