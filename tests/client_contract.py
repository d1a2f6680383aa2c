"""What clients may rely on, whatever stands behind the address: each check asks a server of the sine model.

It takes its text while it speaks; the server has its usual settings and no keys.
"""

import asyncio
import base64
import io
import json
import re
from collections.abc import Awaitable, Callable

import av
import httpx
import openai
import pytest

from engine_processes import LONG, alone, until
from live_sessions import TEXT, session, whole
from server_processes import Server, check_error, recording, sound
from sonoro.core.types import SpeechRequest

VOICES = "/v1/audio/voices"


def spoken(text: str = "Some words.", seed: int = 0, voice: str = "low", loudness: int = 50) -> bytes:
    """The PCM16 that a request should be answered with."""
    return alone(SpeechRequest(id="a", text=text, seed=seed, voice=voice, options={"loudness": loudness}))


async def fields_reach_the_engine(server: Server) -> None:
    for fields, expected in (
        ({}, spoken()),
        ({"model": "tts-1", "voice": "alloy"}, spoken()),
        ({"model": "gpt-4o-mini-tts", "voice": "ash", "unheard_of": {"a": [1]}}, spoken(voice="high")),
        ({"model": "sine", "voice": {"id": "HIGH"}, "instructions": ""}, spoken(voice="high")),
        ({"speaker": "high", "seed": 3, "language": "English"}, spoken(voice="high", seed=3)),
        ({"loudness": 20, "temperature": 0, "top_k": 5, "top_p": 0.5}, spoken(loudness=20)),
    ):
        answer = await server.speak(**fields)
        assert answer.content == expected, fields
        assert answer.headers["x-sample-rate"] == "8000"
        assert re.fullmatch(r"[\w-]{8,}", answer.headers["x-request-id"])
    cut = await server.speak(LONG, max_new_tokens=7)
    assert cut.content == spoken(LONG)[: 7 * 160]


async def what_is_wrong_is_refused_by_name(server: Server) -> None:
    for fields, status, parameter in (
        ({"voice": "nobody"}, 404, "voice"),
        ({"model": "nothing"}, 404, "model"),
        ({"loudness": 1000}, 400, "loudness"),
        ({"response_format": "midi"}, 400, "response_format"),
        ({"ref_audio": "data:audio/wav;base64,AAAA", "ref_text": "hm"}, 400, "ref_audio"),
    ):
        check_error(await server.speak(**fields), status, parameter)
    check_error(await server.speak("..."), 400, "input")
    check_error(await server.http.get("/v1/nothing"), 404)


async def formats_are_read_back_and_named(server: Server) -> None:
    kinds = {"mp3": "mpeg", "opus": "ogg", "aac": "aac", "flac": "flac", "wav": "wav"}
    for format, kind in kinds.items():
        answer = await server.speak(LONG, response_format=format)
        assert answer.headers["content-type"].startswith(f"audio/{kind}")
        with av.open(io.BytesIO(answer.content)) as file:
            heard_s = sum(frame.samples / frame.sample_rate for frame in file.decode(audio=0))
        assert heard_s == pytest.approx(len(spoken(LONG)) / 16000, abs=0.2), format
    unnamed = await server.http.post("/v1/audio/speech", json={"input": "Some words."})
    assert unnamed.headers["content-type"] == "audio/mpeg"


async def events_hold_the_audio_and_say_how_it_ended(server: Server) -> None:
    answer = await server.speak(stream_format="sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = (json.loads(line[6:]) for line in answer.text.split("\n\n") if line)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == spoken()
    assert done == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 11, "output_tokens": 11, "total_tokens": 22},
        "finish_reason": "stop",
    }
    # An Accept header alone changes nothing.
    plain = await server.http.post(
        "/v1/audio/speech",
        json={"input": "Some words.", "response_format": "pcm"},
        headers={"accept": "text/event-stream"},
    )
    assert plain.content == spoken()


async def the_official_client_hears_streams_and_whole_answers(server: Server) -> None:
    def ask() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            for format in ("pcm", "wav"):
                arguments = {"model": "tts-1", "voice": "alloy", "input": LONG, "response_format": format}
                answered = client.audio.speech.create(**arguments).content
                with client.audio.speech.with_streaming_response.create(**arguments) as answer:
                    parts = list(answer.iter_bytes())
                assert len(parts) > 3
                assert b"".join(parts) == answered
                assert answered.endswith(spoken(LONG))
                assert (format == "wav") == answered.startswith(b"RIFF")
            assert [model.id for model in client.models.list()] == ["sine", "tts-1", "tts-1-hd", "gpt-4o-mini-tts"]
            with pytest.raises(openai.NotFoundError, match="nobody"):
                client.audio.speech.create(model="tts-1", voice="nobody", input="Hello.")
            with pytest.raises(openai.BadRequestError, match="letter or digit"):
                client.audio.speech.create(model="tts-1", voice="alloy", input="...")

    await asyncio.to_thread(ask)


async def a_batch_is_answered_together(server: Server) -> None:
    items = [{"input": "The first one."}, {"input": "A higher one.", "voice": "high"}, {"input": "", "seed": 1}]
    answer = await server.http.post("/v1/audio/speech/batch", json={"items": items, "response_format": "pcm"})
    results = answer.json()["results"]
    assert [result["status"] for result in results] == ["success", "success", "error"]
    assert base64.b64decode(results[0]["audio_data"]) == spoken("The first one.")
    assert base64.b64decode(results[1]["audio_data"]) == spoken("A higher one.", voice="high")


async def an_uploaded_voice_is_known_at_once_and_everywhere(server: Server) -> None:
    """Asked many times over, so that every engine there is has been asked."""

    async def upload() -> httpx.Response:
        fields, files = {"name": "Anna", "ref_text": "A tone."}, {"audio": ("a.wav", sound(), "audio/wav")}
        return await server.http.post(VOICES, data=fields, files=files)

    async def listed() -> set[tuple[str, ...]]:
        answers = await asyncio.gather(*(server.http.get(VOICES) for _ in range(8)))
        return {tuple(answer.json()["voices"]) for answer in answers}

    assert await listed() == {("low", "high")}
    assert (await upload()).status_code == 201
    inline = await server.speak(ref_audio=recording(), ref_text="A tone.")
    answers = await asyncio.gather(*(server.speak(voice="anna") for _ in range(8)))
    assert {answer.content for answer in answers} == {inline.content}
    assert await listed() == {("low", "high", "anna")}
    check_error(await upload(), 409, "name")
    assert (await server.http.delete(f"{VOICES}/anna")).status_code == 200
    assert await listed() == {("low", "high")}

    async def is_unknown() -> bool:
        answers = await asyncio.gather(*(server.speak(voice="anna") for _ in range(8)))
        return {answer.status_code for answer in answers} == {404}

    await until(is_unknown, timeout_s=10)
    check_error(await server.speak(voice="anna"), 404, "voice")


async def sessions_have_utterances_and_settings_of_their_own(server: Server) -> None:
    async with session(server) as first, session(server) as second:
        for pieces in ([TEXT], list(TEXT), TEXT.replace(" ", " |").split("|")):
            audio, (start, done) = await first.speak(*pieces)
            assert audio == whole()
            begun = {"type": "audio.start", "request_id": done["request_id"], "format": "pcm", "sample_rate": 8000}
            assert start == begun
            assert (done["finish_reason"], done["characters"]) == ("stop", len(TEXT))
        await second.say("session.config", voice="HIGH", seed=3, loudness=20, response_format="wav")
        configured = await second.hear()
        assert configured == {"type": "session.configured", "voice": "high", "language": "auto", "format": "wav"}
        (one, _), (other, _) = await asyncio.gather(first.speak("One ", "text."), second.speak("Ano", "ther."))
        assert one == whole("One text.")
        assert other[:4] == b"RIFF"
        assert other[44:] == whole("Another.", voice="high", seed=3, options={"loudness": 20})
        assert (await first.speak("Again."))[0] == whole("Again.")
        assert first.created["session_id"] != second.created["session_id"]
        assert (first.created["model"], first.created["sample_rate"]) == ("sine", 8000)


async def a_crowd_is_answered_as_if_each_were_alone(server: Server) -> None:
    texts = {seed: f"Number {seed}. " * (1 + seed % 3) for seed in range(20)}
    answers = await asyncio.gather(*(server.speak(text, seed=seed) for seed, text in texts.items()))
    for (seed, text), answer in zip(texts.items(), answers, strict=True):
        assert answer.content == spoken(text, seed), seed


CHECKS: tuple[Callable[[Server], Awaitable[None]], ...] = (
    fields_reach_the_engine,
    what_is_wrong_is_refused_by_name,
    formats_are_read_back_and_named,
    events_hold_the_audio_and_say_how_it_ended,
    the_official_client_hears_streams_and_whole_answers,
    a_batch_is_answered_together,
    an_uploaded_voice_is_known_at_once_and_everywhere,
    sessions_have_utterances_and_settings_of_their_own,
    a_crowd_is_answered_as_if_each_were_alone,
)


async def check_all(server: Server) -> None:
    """Every check, one after the other; a failure says of which."""
    for check in CHECKS:
        try:
            await check(server)
        except Exception as error:
            error.add_note(f"in the check that {check.__name__.replace('_', ' ')}")
            raise
