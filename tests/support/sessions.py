"""Live sessions and the sockets of the dialects, and the contract that every server keeps to its clients."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import av
import httpx
import openai
import pytest
from processes import GUARD_S
from servers import Server, Speaker, check_error, recording, sound
from sine_engines import alone, until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from sonoro.core.types import SpeechRequest

PATH = "/v1/audio/speech/stream"
TEXT = "Some words, which come one by one."


@dataclasses.dataclass
class Session:
    """A client's side of a session. `created` is what it was greeted with."""

    socket: ClientConnection
    created: dict[str, Any]
    is_spoken_to: bool = False

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def hear(self) -> dict[str, Any] | bytes:
        """The next event, or the next audio, of which there is none but between its events."""
        message = await asyncio.wait_for(self.socket.recv(), GUARD_S)
        if isinstance(message, bytes):
            assert self.is_spoken_to
            return message
        event = json.loads(message)
        if event["type"] == "audio.start":
            assert not self.is_spoken_to
            self.is_spoken_to = True
        elif event["type"] in ("audio.done", "response.cancelled") or event.get("request_id"):
            self.is_spoken_to = False
        return event

    async def listen(self) -> tuple[bytes, list[dict[str, Any]]]:
        """All audio up to the next event that ends an utterance, an error included; and the events."""
        audio, events = b"", []
        while not events or events[-1]["type"] == "audio.start":
            heard = await self.hear()
            if isinstance(heard, bytes):
                audio += heard
            else:
                events.append(heard)
        return audio, events

    async def speak(self, *pieces: str) -> tuple[bytes, list[dict[str, Any]]]:
        """An utterance, from its pieces to its end."""
        for piece in pieces:
            await self.say("input.text", text=piece)
        await self.say("input.done")
        return await self.listen()

    async def refused(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The error that a message is answered with."""
        await self.say(kind, **fields)
        event = await self.hear()
        assert event["type"] == "error", event
        assert set(event["error"]) == {"message", "type", "param", "code"}
        return event["error"]


@contextlib.asynccontextmanager
async def session(server: Server, **settings: Any) -> AsyncIterator[Session]:
    """A session; what it is configured with is of its own."""
    url = server.url.replace("http", "ws") + PATH
    async with connect(url, proxy=None, compression=None, **settings) as socket:
        created = json.loads(await socket.recv())
        assert created["type"] == "session.created"
        yield Session(socket, created)


def whole(text: str = TEXT, **fields: Any) -> bytes:
    """What is said of a text that is whole from the start."""
    return alone(SpeechRequest(id="a", text=text, **fields))


async def ended(session: Session) -> tuple[list[dict[str, Any]], int | None]:
    """What is still said until the connection is closed, and its code."""
    said = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            said.append(await session.hear())
    return said, session.socket.close_code


class Socket:
    """What is said and heard on one connection; `closed` is its code once it is."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.closed: int | None = None

    async def say(self, *messages: dict[str, Any] | str | bytes) -> None:
        for message in messages:
            await self.connection.send(json.dumps(message) if isinstance(message, dict) else message)

    async def hear(self) -> Any:
        """The next message: an object, or bytes; None once the connection is closed."""
        try:
            message = await asyncio.wait_for(self.connection.recv(), GUARD_S)
        except ConnectionClosed:
            self.closed = self.connection.close_code
            return None
        return message if isinstance(message, bytes) else json.loads(message)

    async def hear_until(self, **fields: Any) -> list[Any]:
        """Everything up to a message that has `fields`, or to the end."""
        heard = []
        while (message := await self.hear()) is not None:
            heard.append(message)
            if fields and isinstance(message, dict) and fields.items() <= message.items():
                break
        return heard


@contextlib.asynccontextmanager
async def socket(server: Server, path: str, **settings: Any) -> AsyncIterator[Socket]:
    async with connect(server.url.replace("http", "ws") + path, proxy=None, compression=None, **settings) as connection:
        yield Socket(connection)


def audio_of(messages: list[Any], field: str = "audio") -> bytes:
    """The audio in `messages`, base64 in `field` of those that have it, or as it is."""
    parts = (each if isinstance(each, bytes) else base64.b64decode(each.get(field) or "") for each in messages)
    return b"".join(parts)


VOICES = "/v1/audio/voices"


async def aliases(server: Server) -> dict[str, str]:
    """Which voice each of OpenAI's names stands for."""
    listed: dict[str, str] = (await server.http.get(VOICES)).json()["aliases"]
    return listed


async def together(server: Server, asked: Iterable[dict[str, Any]]) -> list[httpx.Response]:
    """The answers to requests of these fields, asked at once."""
    return await asyncio.gather(*(server.speak(**fields) for fields in asked))


async def fields_reach_the_engine(server: Server, speaker: Speaker) -> None:
    named = await aliases(server)
    second, options = speaker.voices[1], speaker.options
    drawn = {"temperature": 0, "top_k": 5, "top_p": 0.5}
    other = {"voice": second, "seed": (seed := speaker.seeds[1])}
    asked = (
        ({}, speaker.spoken()),
        ({"model": "tts-1", "voice": "alloy"}, speaker.spoken(voice=named["alloy"])),
        ({"voice": "ash", "unheard_of": {"a": [1]}}, speaker.spoken(voice=named["ash"])),
        ({"model": "gpt-4o-mini-tts", "voice": second}, speaker.spoken(voice=second)),
        ({"model": speaker.name, "voice": {"id": second.upper()}, "instructions": ""}, speaker.spoken(voice=second)),
        ({"speaker": second, "seed": seed, "language": "English"}, speaker.spoken(**other, language="English")),
        ({**options, **drawn}, speaker.spoken(**options, **drawn)),
    )
    # All at once, as everywhere below where one answer does not depend on another.
    for (fields, expected), answer in zip(asked, await together(server, [each for each, _ in asked]), strict=True):
        assert speaker.is_same(answer.content, expected), fields
        assert answer.headers["x-sample-rate"] == str(speaker.sample_rate)
        assert re.fullmatch(r"[\w-]{8,}", answer.headers["x-request-id"])
    cut = await server.speak(speaker.long_text, seed=speaker.seeds[0], max_new_tokens=7)
    whole = speaker.spoken(speaker.long_text, seed=speaker.seeds[0])
    assert speaker.is_same(cut.content, whole[: 2 * (7 * speaker.hop - speaker.lead_in)])


async def what_is_wrong_is_refused_by_name(server: Server, speaker: Speaker) -> None:
    (option,) = speaker.options
    for fields, status, parameter in (
        ({"voice": "nobody"}, 404, "voice"),
        ({"model": "nothing"}, 404, "model"),
        ({option: 1000}, 400, option),
        ({"response_format": "midi"}, 400, "response_format"),
        ({"ref_audio": "data:audio/wav;base64,AAAA", "ref_text": "hm"}, 400, "ref_audio"),
    ):
        check_error(await server.speak(**fields), status, parameter)
    check_error(await server.http.get("/v1/nothing"), 404)


async def formats_are_read_back_and_named(server: Server, speaker: Speaker) -> None:
    kinds = {"mp3": "mpeg", "opus": "ogg", "aac": "aac", "flac": "flac", "wav": "wav"}
    text, seed = speaker.long_text, speaker.seeds[0]
    expected_s = len(speaker.spoken(text, seed=seed)) / (2 * speaker.sample_rate)
    answers = await together(server, [{"text": text, "seed": seed, "response_format": format} for format in kinds])
    for (format, kind), answer in zip(kinds.items(), answers, strict=True):
        assert answer.headers["content-type"].startswith(f"audio/{kind}")
        with av.open(io.BytesIO(answer.content)) as file:
            heard_s = sum(frame.samples / frame.sample_rate for frame in file.decode(audio=0))
        assert heard_s == pytest.approx(expected_s, abs=0.2), format
    unnamed = await server.http.post("/v1/audio/speech", json={"input": "Some words."})
    assert unnamed.headers["content-type"] == "audio/mpeg"


async def events_hold_the_audio_and_say_how_it_ended(server: Server, speaker: Speaker) -> None:
    answer = await server.speak(stream_format="sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = (json.loads(line[6:]) for line in answer.text.split("\n\n") if line)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert speaker.is_same(b"".join(base64.b64decode(delta["audio"]) for delta in deltas), speaker.spoken())
    frames = (len(speaker.spoken()) // 2 + speaker.lead_in) // speaker.hop
    assert done == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 11, "output_tokens": frames, "total_tokens": 11 + frames},
        "finish_reason": "stop",
    }
    # An Accept header alone changes nothing.
    plain = await server.http.post(
        "/v1/audio/speech",
        json={"input": "Some words.", "response_format": "pcm"},
        headers={"accept": "text/event-stream"},
    )
    assert speaker.is_same(plain.content, speaker.spoken())


async def the_official_client_hears_streams_and_whole_answers(server: Server, speaker: Speaker) -> None:
    text, seed = speaker.long_text, speaker.seeds[0]
    expected = speaker.spoken(text, seed=seed, voice=(await aliases(server))["alloy"])

    def hear(format: str, is_streamed: bool) -> None:
        arguments = {"model": "tts-1", "voice": "alloy", "input": text, "response_format": format}
        arguments["extra_body"] = {"seed": seed}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            if is_streamed:
                with client.audio.speech.with_streaming_response.create(**arguments) as answer:
                    parts = list(answer.iter_bytes())
                assert len(parts) > 3
            else:
                parts = [client.audio.speech.create(**arguments).content]
        heard = b"".join(parts)
        assert (format == "wav") == heard.startswith(b"RIFF")
        assert speaker.is_same(heard[44 * (format == "wav") :], expected)

    def ask() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            names = [speaker.name, "tts-1", "tts-1-hd", "gpt-4o-mini-tts"]
            assert [model.id for model in client.models.list()] == names
            with pytest.raises(openai.NotFoundError, match="nobody"):
                client.audio.speech.create(model="tts-1", voice="nobody", input="Hello.")
            with pytest.raises(openai.BadRequestError, match="not white space"):
                client.audio.speech.create(model="tts-1", voice="alloy", input=" ")

    ways = itertools.product(("pcm", "wav"), (False, True))
    await asyncio.gather(*(asyncio.to_thread(hear, format, is_streamed) for format, is_streamed in ways))
    await asyncio.to_thread(ask)


async def a_batch_is_answered_together(server: Server, speaker: Speaker) -> None:
    second = speaker.voices[1]
    items = [{"input": "Some words."}, {"input": "Another.", "voice": second}, {"input": "", "seed": 1}]
    answer = await server.http.post("/v1/audio/speech/batch", json={"items": items, "response_format": "pcm"})
    results = answer.json()["results"]
    assert [result["status"] for result in results] == ["success", "success", "error"]
    for result, expected in zip(results, (speaker.spoken(), speaker.spoken("Another.", voice=second)), strict=False):
        assert speaker.is_same(base64.b64decode(result["audio_data"]), expected)


async def an_uploaded_voice_is_known_at_once_and_everywhere(server: Server, speaker: Speaker) -> None:
    """Asked many times over, so that every engine there is has been asked. Who cannot speak like others says so."""
    voices = speaker.voices

    async def upload() -> httpx.Response:
        fields, files = {"name": "Anna", "ref_text": "A tone."}, {"audio": ("a.wav", sound(), "audio/wav")}
        return await server.http.post(VOICES, data=fields, files=files)

    async def listed() -> set[tuple[str, ...]]:
        answers = await asyncio.gather(*(server.http.get(VOICES) for _ in range(8)))
        return {tuple(voice["id"] for voice in answer.json()["voices"]) for answer in answers}

    assert await listed() == {voices}
    if not speaker.can_clone:
        check_error(await upload(), 400, "audio")
        return
    assert (await upload()).status_code == 201
    inline = await server.speak(ref_audio=recording(), ref_text="A tone.")
    answers = await asyncio.gather(*(server.speak(voice="anna") for _ in range(8)))
    assert {answer.content for answer in answers} == {inline.content}
    assert await listed() == {(*voices, "anna")}
    check_error(await upload(), 409, "name")
    assert (await server.http.delete(f"{VOICES}/anna")).status_code == 200
    assert await listed() == {voices}

    async def is_unknown() -> bool:
        answers = await asyncio.gather(*(server.speak(voice="anna") for _ in range(8)))
        return {answer.status_code for answer in answers} == {404}

    await until(is_unknown)
    check_error(await server.speak(voice="anna"), 404, "voice")


async def sessions_have_utterances_and_settings_of_their_own(server: Server, speaker: Speaker) -> None:
    second_voice, rate = speaker.voices[1], speaker.sample_rate
    async with session(server) as first, session(server) as second:
        for pieces in ([TEXT], list(TEXT), TEXT.replace(" ", " |").split("|")):
            audio, (start, done) = await first.speak(*pieces)
            assert speaker.is_same(audio, speaker.spoken_live(TEXT))
            begun = {"type": "audio.start", "request_id": done["request_id"], "format": "pcm", "sample_rate": rate}
            assert start == begun
            assert (done["finish_reason"], done["characters"]) == ("stop", len(TEXT))
        wanted = {"voice": second_voice.upper(), "seed": (seed := speaker.seeds[1]), **speaker.options}
        await second.say("session.config", **wanted, response_format="wav")
        configured = await second.hear()
        assert configured == {"type": "session.configured", "voice": second_voice, "language": "auto", "format": "wav"}
        (one, _), (other, _) = await asyncio.gather(first.speak("One ", "text."), second.speak("Ano", "ther."))
        assert speaker.is_same(one, speaker.spoken_live("One text."))
        assert other[:4] == b"RIFF"
        expected = speaker.spoken_live("Another.", voice=second_voice, seed=seed, **speaker.options)
        assert speaker.is_same(other[44:], expected)
        assert speaker.is_same((await first.speak("Again."))[0], speaker.spoken_live("Again."))
        assert first.created["session_id"] != second.created["session_id"]
        assert (first.created["model"], first.created["sample_rate"]) == (speaker.name, rate)


async def what_holds_nothing_to_speak_is_a_moment_of_silence(server: Server, speaker: Speaker) -> None:
    silent = bytes(2 * (speaker.sample_rate // 5))
    for text in (".", "...", "?!", "👍🏽", "☃ …", " - \n", "。", "(¬_¬)"):
        assert (await server.speak(text)).content == silent, text
    assert (await server.speak(".", attempts=2, stream_format="sse")).text.count("speech.audio.done") == 1
    answer = await server.http.post("/v1/audio/speech", json={"input": "🎉"})
    with av.open(io.BytesIO(answer.content)) as file:
        heard = [sample for frame in file.decode(audio=0) for sample in frame.to_ndarray().ravel()]
    assert len(heard) > 0
    assert not any(heard)
    batch = {"items": [{"input": "!"}, {"input": "Some words."}], "response_format": "pcm"}
    results = (await server.http.post("/v1/audio/speech/batch", json=batch)).json()["results"]
    assert [result["status"] for result in results] == ["success", "success"]
    assert base64.b64decode(results[0]["audio_data"]) == silent
    for text in ("", " ", "\n\t"):
        check_error(await server.speak(text), 400, "input")
    async with session(server) as client:
        for pieces in (["👍"], [".", ".", "."], ["Some words.", " ..."]):
            audio, (_, done) = await client.speak(*pieces)
            assert (done["finish_reason"], done["characters"]) == ("stop", len("".join(pieces)))
            assert (audio == silent) == (len(pieces) != 2)
        await client.say("input.text", text=" ")
        await client.say("input.done")
        assert (await client.listen())[1][-1]["error"]["param"] == "input"


async def a_crowd_is_answered_as_if_each_were_alone(server: Server, speaker: Speaker) -> None:
    texts = {seed: f"It is {seed}. " * (1 + seed % 3) for seed in speaker.seeds}
    answers = await asyncio.gather(*(server.speak(text, seed=seed) for seed, text in texts.items()))
    for (seed, text), answer in zip(texts.items(), answers, strict=True):
        assert speaker.is_same(answer.content, speaker.spoken(text, seed=seed)), seed


CHECKS: tuple[Callable[[Server, Speaker], Awaitable[None]], ...] = (
    fields_reach_the_engine,
    what_is_wrong_is_refused_by_name,
    formats_are_read_back_and_named,
    events_hold_the_audio_and_say_how_it_ended,
    the_official_client_hears_streams_and_whole_answers,
    a_batch_is_answered_together,
    an_uploaded_voice_is_known_at_once_and_everywhere,
    sessions_have_utterances_and_settings_of_their_own,
    what_holds_nothing_to_speak_is_a_moment_of_silence,
    a_crowd_is_answered_as_if_each_were_alone,
)


async def check_all(server: Server, speaker: Speaker) -> None:
    """Every check, one after the other; a failure says of which."""
    for check in CHECKS:
        try:
            await check(server, speaker)
        except Exception as error:
            error.add_note(f"in the check that {check.__name__.replace('_', ' ')}")
            raise
