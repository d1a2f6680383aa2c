"""One bad piece in a live session is refused alone: the text before and after it is spoken."""

import asyncio
import dataclasses
import json
import os
import signal
import tracemalloc
from typing import Any

import pytest
from servers import SETTINGS, check_error, serving
from sessions import PATH, TEXT, audio_of, session, socket, whole
from sine_engines import LONG, engines, nothing_left, run, until

from sonoro.server.half_characters import HalfCharacters

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")

LABS = "/v1/text-to-speech/low/multi-stream-input?output_format=pcm_8000"
RAW = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 8000}
BEFORE, AFTER = TEXT[:11], TEXT[11:]


def labs(**fields: Any) -> dict[str, Any]:
    return {"context_id": "a", **fields}


def cartesia(**fields: Any) -> dict[str, Any]:
    return {"context_id": "a", "output_format": RAW, "continue": True, **fields}


def omni(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


OMNI = omni("session.config", stream_audio=True, response_format="pcm")

DIALECTS = {
    "elevenlabs": (
        LABS,
        [labs(text=BEFORE)],
        [labs(text=7), labs(text="x" * 5000), "{", b"{", labs(text="\udc00")],
        [labs(text=AFTER), labs(flush=True), labs(close_context=True)],
        {"isFinal": True},
    ),
    "single": (
        LABS.replace("multi-", ""),
        [{"text": BEFORE}],
        [{"text": 7}, {"text": "x" * 5000}, "{", b"{", {"text": "\udc00"}],
        [{"text": AFTER}, {"text": ""}],
        {"isFinal": True},
    ),
    "cartesia": (
        "/tts/websocket",
        [cartesia(transcript=BEFORE)],
        [cartesia(transcript=7), cartesia(transcript="x" * 5000), "{", b"{", cartesia(transcript="\udc00")],
        [cartesia(transcript=AFTER), cartesia(transcript="", **{"continue": False}), cartesia(transcript="More.")],
        {"type": "done"},
    ),
    "deepgram": (
        "/v1/speak?encoding=linear16&sample_rate=8000",
        [{"type": "Speak", "text": BEFORE}],
        [{"type": "Speak", "text": 7}, {"type": "Speak"}, "{", b"{", {"type": "Speak", "text": "\udc00"}],
        [{"type": "Speak", "text": AFTER}, {"type": "Flush"}],
        {"type": "Flushed"},
    ),
    "vllm_omni": (
        PATH,
        [OMNI, omni("input.text", text=BEFORE)],
        [omni("input.text", text=7), omni("none"), "{", b"{", OMNI, omni("input.text", text="\udc00")],
        [omni("input.text", text=AFTER), omni("input.done")],
        {"type": "session.done"},
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_bad_piece_is_refused_alone(name: str) -> None:
    path, before, bad, after, last = DIALECTS[name]

    async def ask() -> None:
        async with serving("live") as server, socket(server, path) as client:
            await client.say(*before, *bad, *after)
            heard = await client.hear_until(**last)
            assert audio_of(heard, "data" if name == "cartesia" else "audio") == whole()
            errors = [message for message in heard if isinstance(message, dict) and "rror" in str(message)]
            assert len(errors) >= len(bad) - (name == "vllm_omni")

    run(ask())


@pytest.mark.parametrize("name", ["elevenlabs", "cartesia"])
def test_an_id_can_be_used_again_once_it_was_cancelled(name: str) -> None:
    path, before, _, after, last = DIALECTS[name]
    long, cancel = {
        "elevenlabs": (labs(text=LONG, flush=True), [labs(close_context=True)] * 2),
        "cartesia": (cartesia(transcript=LONG), [cartesia(cancel=True)]),
    }[name]
    ends = len([message for message in cancel if name == "elevenlabs"]) // 2  # it ends a cancelled context in words

    async def ask() -> None:
        async with serving("slow_live") as server, socket(server, path) as client:
            await client.say(long)
            await client.hear()
            await client.say(*cancel, *before, *after)
            for _ in range(ends):
                await client.hear_until(**last)
            heard = await client.hear_until(**last)
            assert audio_of(heard, "data" if name == "cartesia" else "audio").endswith(whole())

    run(ask())


def test_a_half_waits_under_no_long_id() -> None:
    halves = HalfCharacters()
    tracemalloc.start()
    try:
        for number in range(40):
            halves.join(json.dumps({"context_id": str(number) + "x" * 100_000, "text": "\ud83d"}))
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_halves_of_a_character_are_joined() -> None:
    halves = HalfCharacters()
    assert halves.join('{"text": "a\\ud83d"}') == '{"text": "a"}'
    assert halves.join('{"text": "b", "context_id": "other"}') == '{"text": "b", "context_id": "other"}'
    assert not halves.has_lost
    assert halves.join('{"text": "\\ude00c"}') == '{"text": "\\ud83d\\ude00c"}'
    assert halves.join('{"data": {"text": "\\uD83D"}}') is None
    assert halves.join('{"text": "d"}') == '{"text": "d"}'
    assert halves.has_lost
    for same in ('{"text": "\\ude00"}', '{"text": 7, "x": "\\ud83d"}', "[" * 100_000 + "\\ud83d", '"\\ud83d"'):
        assert halves.join(same) == same


def test_text_after_a_limit_is_not_kept() -> None:
    async def ask() -> None:
        async with serving("live") as server, socket(server, PATH) as client:
            await client.say(OMNI, omni("input.text", text="x" * 5000))
            await client.hear_until(type="error")
            sessions = [each for each in server.process.server_state.connections if hasattr(each, "queue")]
            assert len(sessions) == 1
            await client.say(*[omni("input.text", text=" x" * 20_000) for _ in range(20)], omni("input.done"))
            await client.hear_until(type="session.done")
            await client.say(*[omni("input.text", text=" " * 20_000) for _ in range(20)])
            await client.say(omni("input.text", text="Hm."), omni("input.done"))
            begun = (await client.hear_until(type="audio.start"))[-1]
            assert begun["sentence_text"] == "Hm."

    run(ask())


def test_cancel_does_not_wait_for_an_engine_that_hangs() -> None:
    async def ask() -> None:
        async with serving("slow_live") as server, session(server) as client:
            await client.say("input.text", text=TEXT * 3)
            await client.hear()
            [pid] = engines()
            os.kill(pid, signal.SIGSTOP)
            try:
                await client.say("response.cancel")
                async with asyncio.timeout(4):
                    while isinstance(event := await client.hear(), bytes):
                        pass
                assert event["type"] == "response.cancelled"
            finally:
                os.kill(pid, signal.SIGCONT)

    run(ask())


def test_a_first_message_of_deep_json_is_refused() -> None:
    async def ask() -> None:
        async with serving("live") as server, session(server) as client:
            await client.socket.send('{"type": "session.config", "stream_audio": ' + "[" * 100_000)
            assert (await client.hear())["error"]["code"] == "invalid_request"
            assert (await client.speak(TEXT))[0] == whole()

    run(ask())


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/audio/speech/batch"])
def test_at_shutdown_an_answer_that_has_not_begun_says_so(path: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(SETTINGS, shutdown_timeout_s=0.5)
    body = {"input": LONG, "stream_format": "json"} if path.endswith("speech") else {"items": [{"input": LONG}]}

    async def ask() -> None:
        async with serving("slow_live", settings) as server:
            asking = asyncio.create_task(server.http.post(path, json=body))
            await until(lambda: server.has("sonoro_requests_in_flight", 1))
            server.process.should_exit = True
            answer = await asking
            check_error(answer, 503)

    run(ask())
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("name", DIALECTS)
def test_at_shutdown_a_socket_whose_text_does_not_end_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(SETTINGS, shutdown_timeout_s=0.1)
    path, before, *_ = DIALECTS[name]

    async def ask() -> None:
        async with serving("live", settings) as server, socket(server, path) as client:
            await client.say(*before)
            await until(lambda: server.has("sonoro_requests_in_flight", 1))
            server.process.should_exit = True
            failed = [one for one in await client.hear_until() if not isinstance(one, bytes)][-1]
            assert "the server is shutting down" in json.dumps(failed)
            assert (failed.get("context_id") or failed.get("contextId")) == before[0].get("context_id")
            assert failed.get("done", True)
            assert client.closed == 1012

    run(ask())
    assert "Traceback" not in caplog.text
