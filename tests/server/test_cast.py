"""A dialogue of four voices, the model's own and uploaded ones, is the same by each way in."""

import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from servers import Server, check_error, recording, serving, sound
from sine_engines import nothing_left, run

__all__ = ["nothing_left"]

# The folder of a test is made before that of its links, which must be empty at the end.
pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")

VOICES = ("low", "anna", "high", "bert")
LINES = [(voice, f"This is number {number} of {voice}.") for number in range(10) for voice in VOICES]


def recorded(text: str | None = None, seconds: float = 1.0) -> dict[str, str | None]:
    return {"audio": recording(seconds), "text": text}


INPUTS = [{"voice": voice, "text": text} for voice, text in LINES]


async def upload(server: Server, name: str, text: str) -> None:
    fields = {"name": name, "ref_text": text} | ({} if text else {"x_vector_only_mode": "true"})
    files = {"audio": (f"{name}.wav", sound(), "audio/wav")}
    assert (await server.http.post("/v1/audio/voices", data=fields, files=files)).status_code == 201


async def speech(server: Server, **fields: Any) -> bytes:
    body = {"response_format": "pcm", "stream_format": "audio"} | fields
    sent = await server.http.post("/v1/audio/speech", json=body)
    assert sent.status_code == 200, sent.text
    return sent.content


@contextlib.asynccontextmanager
async def spoken() -> AsyncIterator[tuple[Server, bytes]]:
    """A server that has the uploaded voices, and the dialogue as it speaks it."""
    async with serving() as server:
        await upload(server, "anna", "A tone.")
        await upload(server, "bert", "")
        yield server, await speech(server, inputs=INPUTS)


def test_forty_lines_are_the_same_by_each_way_in() -> None:
    async def ask() -> None:
        async with spoken() as (server, whole):
            letters = sum(len(text) for _, text in LINES)
            assert abs(len(whole) / 2 - 80 * letters - 39 * 2400) <= 40 * 3
            tags = "[pause:300ms]".join(f"[voice:{voice}]{text}" for voice, text in LINES)
            ssml = "<break time='300ms'/>".join(f"<voice name='{voice}'>{text}</voice>" for voice, text in LINES)
            assert await speech(server, input=tags, voice="low", allow_voice_tags=True) == whole
            assert await speech(server, input=f"<speak>{ssml}</speak>", voice="low") == whole
            turns = [{"voice_id": voice, "text": text} for voice, text in LINES]
            for path in ("", "/stream"):
                url = f"/v1/text-to-dialogue{path}?output_format=pcm_8000"
                sent = await server.http.post(url, json={"inputs": turns, "model_id": "eleven_v3"})
                assert sent.content == whole
            beside = await speech(server, inputs=INPUTS, parallel=3)
            assert len(beside) == len(whole)

    run(ask())


def test_an_uploaded_voice_speaks_its_line_as_it_speaks_alone() -> None:
    async def ask() -> None:
        async with serving("cloning") as server:
            await upload(server, "anna", "A tone.")
            await upload(server, "bert", "")
            inputs = [{"voice": "bert", "text": "One is here."}, {"voice": "anna", "text": "Two is here."}]
            made = np.frombuffer(await speech(server, inputs=inputs, pause_between=1), "<i2")
            one = np.frombuffer(await speech(server, input="One is here.", voice="bert"), "<i2")
            # The second has the number 1, which a sine adds to the pitch, as it does with a seed.
            two = np.frombuffer(await speech(server, input="Two is here.", voice="anna", seed=1), "<i2")
            assert abs(len(made) - len(one) - len(two) - 8000) <= 6
            assert np.array_equal(made[: len(one) - 2], one[:-2])
            assert np.array_equal(made[len(two) * -1 + 3 :], two[3:])

    run(ask())


def test_recordings_in_the_body_speak_as_uploaded_voices_do() -> None:
    async def ask() -> None:
        async with spoken() as (server, whole):
            voices: dict[str, Any] = {"Ann": recorded("A tone."), "Bob": recorded(), "CAROL": "low", "Eve": "anna"}
            cast = {"low": "carol", "anna": "ANN", "bert": "bob", "high": "high"}
            inputs = [{"voice": cast[voice], "text": text} for voice, text in LINES]
            assert await speech(server, inputs=inputs, voices=voices) == whole
            inputs = [{"voice": {"anna": "eve"}.get(voice, cast[voice]), "text": text} for voice, text in LINES]
            assert await speech(server, inputs=inputs, voices=voices) == whole
            assert await speech(server, input="Hi.", voice="bob", voices=voices) == await speech(
                server, input="Hi.", voice="bert"
            )
            assert await speech(server, input="Hi.", voice="eve", voices=voices) == await speech(
                server, input="Hi.", voice="anna"
            )
            fields = {"input": "Hi.", "voices": {"ann": {"audio": "data:audio/wav;base64,AAAA"}}}
            check_error(await server.http.post("/v1/audio/speech", json=fields), 400, "voices")
            for many, seconds, limit in ((17, 0.5, "at most 16"), (16, 16.0, "at most 240 s")):
                voices = {f"voice {number}": recorded(seconds=seconds) for number in range(many)}
                sent = await server.http.post("/v1/audio/speech", json={"input": "Hi.", "voices": voices})
                check_error(sent, 400, "voices")
                assert limit in sent.text

    run(ask())


def test_a_model_without_voices_speaks_recordings_of_the_body() -> None:
    async def ask() -> None:
        async with serving("cloning") as server:
            voices = {"ann": recorded("A tone."), "bob": recorded()}
            inputs = [{"voice": "bob", "text": "One is here."}, {"voice": "ann", "text": "Two is here."}]
            made = await speech(server, inputs=inputs, voices=voices)
            await upload(server, "anna", "A tone.")
            await upload(server, "bert", "")
            inputs = [{"voice": "bert", "text": "One is here."}, {"voice": "anna", "text": "Two is here."}]
            assert made == await speech(server, inputs=inputs)

    run(ask())


def test_a_model_that_cannot_clone_refuses_recordings_of_the_body() -> None:
    async def ask() -> None:
        async with serving("shown") as server:
            fields = {"input": "Hi.", "voices": {"ann": recorded()}}
            check_error(await server.http.post("/v1/audio/speech", json=fields), 400, "voices")

    run(ask())


def test_voices_that_the_caller_may_not_name_are_unknown() -> None:
    async def ask() -> None:
        async with serving() as server:
            for text in ("[voice:eve]Hi.", "<speak><voice name='eve'>Hi.</voice></speak>"):
                fields = {"input": text, "allow_voice_tags": True, "stream_format": "json"}
                check_error(await server.http.post("/v1/audio/speech", json=fields), 404, "voice")

    run(ask())


def test_a_dialogue_with_timestamps_tells_who_says_what_when() -> None:
    turns = [{"voice_id": f"stranger {number % 4}", "text": f"Line {number}, so."} for number in range(40)]
    text = "".join(turn["text"] for turn in turns)

    def check(told: list[dict[str, Any]], pcm: bytes) -> None:
        characters = [one for each in told if each["alignment"] for one in each["alignment"]["characters"]]
        assert "".join(characters) == text
        segments = [one for each in told for one in each["voice_segments"]]
        starts = {}
        for each in told:
            for one in each["voice_segments"]:
                at, end = one["character_start_index"], one["character_end_index"]
                turn = turns[one["dialogue_input_index"]]
                assert "".join(each["alignment"]["characters"][at:end]) in turn["text"]
                assert one["voice_id"] == turn["voice_id"]
                starts.setdefault(one["dialogue_input_index"], one["start_time_seconds"])
        assert list(starts) == list(range(40))
        times = [one[f"{name}_time_seconds"] for one in segments for name in ("start", "end")]
        assert times == sorted(times)
        assert times[-1] == pytest.approx(len(pcm) / 16000, abs=0.01)
        # A sine speaks a letter in 10 ms; .3 s are between two lines.
        lengths = [0.01 * len(turn["text"]) + 0.3 for turn in turns]
        assert list(starts.values()) == pytest.approx([sum(lengths[:at]) for at in range(40)], abs=0.35)

    async def ask() -> None:
        async with serving("shown") as server:
            body = {"inputs": turns, "model_id": "eleven_v3"}
            url = "/v1/text-to-dialogue{}/with-timestamps?output_format=pcm_8000"
            whole = (await server.http.post(url.format(""), json=body)).json()
            pcm = base64.b64decode(whole["audio_base64"])
            check([whole], pcm)
            sent = await server.http.post(url.format("/stream"), json=body)
            lines = [json.loads(line) for line in sent.text.splitlines()]
            assert b"".join(base64.b64decode(line["audio_base64"]) for line in lines) == pcm
            check(lines, pcm)

    run(ask())
