"""Sessions over a WebSocket as their clients see them: text in pieces, audio meanwhile, and what is refused."""

import asyncio
import contextlib
import dataclasses
import io
import itertools
import tracemalloc

import numpy as np
import pytest
import soundfile
from servers import SETTINGS, Server, check_error, recording, serving, sound
from sessions import TEXT, ended, session, whole
from sine_engines import LONG, nothing_left, run, until

from sonoro.core.config import EngineConfig
from sonoro.transport.fleet import Fleet
from sonoro.transport.messages import WorkerSettings

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("model", ["live", "sine"])
def test_pieces_are_said_as_their_text_is(model: str) -> None:
    splits = [[TEXT], list(TEXT), TEXT.replace(" ", " |").split("|"), ["", TEXT, " "]]

    async def speak() -> None:
        async with serving(model) as server, session(server) as client:
            for pieces in splits:
                audio, (start, done) = await client.speak(*pieces)
                assert audio == whole()
                begun = {"type": "audio.start", "request_id": done["request_id"], "format": "pcm", "sample_rate": 8000}
                assert start == begun
                assert done["type"] == "audio.done"
                assert done["finish_reason"] == "stop"
                assert done["samples"] == len(audio) / 2
                assert done["duration_s"] == len(audio) / 2 / 8000
                assert done["characters"] == len("".join(pieces))
            await client.say("session.close")
            assert await ended(client) == ([{"type": "session.done", "reason": "closed"}], 1000)
            assert await server.is_idle()
            assert await server.metric('sonoro_requests_total{model="sine",reason="stop"}') == len(splits)
            assert await server.metric('sonoro_first_packet_seconds_count{model="sine"}') == len(splits)

    run(speak())


def test_audio_comes_while_text_is_still_missing() -> None:
    async def speak() -> None:
        async with serving("live") as server, session(server) as client:
            for character in TEXT[:20]:
                await client.say("input.text", text=character)
            heard = b""
            assert (await client.hear())["type"] == "audio.start"
            while len(heard) < 19 * 160:  # the last character may still be changed by the next
                heard += await client.hear()
            await client.say("input.text", text=TEXT[20:])
            await client.say("session.close")
            audio, (done,) = await client.listen()
            assert heard + audio == whole()
            assert done["characters"] == len(TEXT)
            assert (await client.hear())["type"] == "session.done"

    run(speak())


@pytest.mark.parametrize(("chunk_frames", "difference"), [((1,), 0), (EngineConfig().chunk_frames, 1)])
def test_the_built_in_voice_says_pieces_as_it_says_the_whole(chunk_frames: tuple[int, ...], difference: int) -> None:
    """Equal where chunks are; which lengths they have follows the clock, and others round by a step of 16 bits."""
    text = "On it, and 3 of us slid on. Rice is good."

    async def speak() -> None:
        builtin = Fleet(WorkerSettings(config=EngineConfig(slots=1, chunk_frames=chunk_frames)), ("cpu",))
        async with serving(engine=builtin) as server, session(server) as client:
            await client.say("session.config", voice="nora", seed=7)
            assert (await client.hear())["voice"] == "nora"
            fields = {"voice": "nora", "seed": 7, "non_streaming_mode": False}
            given = np.frombuffer((await server.speak(text, **fields)).content, "<i2").astype(int)
            for pieces in (3, 40):
                cuts = [len(text) * cut // pieces for cut in range(pieces + 1)]
                audio, (_, done) = await client.speak(*(text[start:end] for start, end in itertools.pairwise(cuts)))
                live = np.frombuffer(audio, "<i2").astype(int)
                assert len(live) == len(given) == done["samples"] > 24000
                assert np.abs(live - given).max() <= difference

    run(speak())


def test_a_session_has_utterances_and_settings_of_its_own() -> None:
    async def speak() -> None:
        async with serving("live") as server, session(server) as first, session(server) as second:
            await second.say("session.config", voice="HIGH", seed=3, strength=20, response_format="wav")
            configured = await second.hear()
            assert configured == {
                "type": "session.configured",
                "voice": "high",
                "language": "auto",
                "format": "wav",
            }
            (one, _), (other, _) = await asyncio.gather(first.speak("One ", "text."), second.speak("Ano", "ther."))
            assert one == whole("One text.")
            assert other[:4] == b"RIFF"
            assert other[44:] == whole("Another.", voice="high", seed=3, options={"strength": 20})
            assert (await first.speak("Again."))[0] == whole("Again.")
            await second.say("session.config", ref_audio=recording(), ref_text="Hm.")
            assert (await second.hear())["type"] == "session.configured"
            assert len((await second.speak("Like this."))[0]) == len("Like this.") * 160
            await second.say("session.config", response_format="mp3", speed=2, sample_rate=16000)
            assert (await second.hear())["format"] == "mp3"
            audio, (start, done) = await second.speak(TEXT)
            assert (start["format"], start["sample_rate"]) == ("mp3", 16000)
            assert soundfile.info(io.BytesIO(audio)).samplerate == 16000
            assert done["samples"] == len(TEXT) * 80
            assert first.created["session_id"] != second.created["session_id"]
            assert (first.created["model"], first.created["sample_rate"]) == ("sine", 8000)

    run(speak())


def test_what_sessions_hold_is_bounded() -> None:
    settings = dataclasses.replace(SETTINGS, max_total_body_bytes=100_000)

    async def ask() -> None:
        async with serving("live", settings) as server, session(server) as first:
            async with session(server) as second:
                await second.say("session.config", ref_audio=recording(), ref_text="Hm.")
                assert (await second.hear())["type"] == "session.configured"
                error = await first.refused("session.config", ref_audio=recording(), ref_text="Hm.")
                assert error["code"] == "too_many_requests"
                assert (await first.speak(TEXT))[0] == whole()
                await second.say("session.config", ref_audio=recording(), ref_text="Hm.")
                assert (await second.hear())["error"]["code"] == "too_many_requests"
            await until(lambda: server.service.speech._references.taken == 0)
            await first.say("session.config", ref_audio=recording(), ref_text="Hm.")
            assert (await first.hear())["type"] == "session.configured"

    run(ask())


def test_of_a_message_nothing_is_kept_once_it_was_handled() -> None:
    async def ask() -> None:
        async with serving("live") as server, session(server) as client:
            assert (await client.speak(TEXT))[0] == whole()
            tracemalloc.start()
            try:
                await client.say("session.config", unheard_of="x" * 4_000_000)
                assert (await client.hear())["type"] == "session.configured"
                await until(lambda: tracemalloc.get_traced_memory()[0] < 2**20)
            finally:
                tracemalloc.stop()

    run(ask())


def test_a_cancelled_utterance_says_how_far_it_came_and_the_session_goes_on() -> None:
    async def cancel() -> None:
        async with serving("slow_live") as server, session(server) as client:
            await client.say("input.text", text=LONG)
            heard = b""
            assert (await client.hear())["type"] == "audio.start"
            while len(heard) < 30 * 160:
                heard += await client.hear()
            await client.say("response.cancel")
            audio, (cancelled,) = await client.listen()
            heard += audio
            assert cancelled["type"] == "response.cancelled"
            assert cancelled["samples_sent"] == len(heard) / 2 < len(LONG) * 80
            assert whole(LONG).startswith(heard)
            # It is an estimate within a segment, of no more than was given and less than was to be said.
            assert 0 < cancelled["text_position"] < len(LONG)
            await until(server.is_idle)
            assert await server.metric('sonoro_requests_total{model="sine",reason="cancelled"}') == 1
            await client.say("response.cancel")
            assert await client.hear() == {
                "type": "response.cancelled",
                "request_id": None,
                "samples_sent": 0,
                "text_position": 0,
            }
            # Nobody has to wait for the answer before going on.
            await client.say("input.text", text=LONG)
            assert (await client.hear())["type"] == "audio.start"
            await client.say("response.cancel")
            await client.say("input.text", text="What then?")
            await client.say("input.done")
            assert (await client.listen())[1][0]["type"] == "response.cancelled"
            assert (await client.listen())[0] == whole("What then?")

    run(cancel())


def test_an_utterance_that_waits_for_a_place_can_be_cancelled_or_is_refused() -> None:
    settings = dataclasses.replace(SETTINGS, max_concurrency=1, max_queue_wait_ms=500)

    async def wait() -> None:
        async with serving("slow_live", settings) as server, session(server) as first, session(server) as second:
            await first.say("input.text", text=LONG)
            assert (await first.hear())["type"] == "audio.start"
            await second.say("input.text", text=TEXT)
            await second.say("response.cancel")
            _, (cancelled,) = await second.listen()
            assert (cancelled["samples_sent"], cancelled["text_position"]) == (0, 0)
            await second.say("input.text", text=TEXT)
            await second.say("input.text", text="word " * 1000)
            _, (failed,) = await second.listen()
            assert failed["error"]["param"] == "input"
            await second.say("input.done")
            _, (refused,) = await second.speak(TEXT)
            assert refused["error"]["code"] == "too_many_requests"
            assert refused["request_id"]
            await first.say("response.cancel")
            await first.listen()
            assert (await second.speak(TEXT))[0] == whole()

    run(wait())


def test_what_is_wrong_is_told_by_name_and_the_session_goes_on() -> None:
    wrong = [
        ("session.config", {"voice": "nobody"}, "voice"),
        ("session.config", {"speed": 9}, "speed"),
        ("session.config", {"speed": "fast"}, "speed"),
        ("session.config", {"response_format": "midi"}, "response_format"),
        ("session.config", {"stream_format": "sse"}, "stream_format"),
        ("session.config", {"input": "Some words."}, "input"),
        ("session.config", {"strength": 101}, "strength"),
        ("session.config", {"model": "gpt-9"}, "model"),
        ("session.config", {"ref_audio": "data:audio/wav;base64,AAAA", "ref_text": "Hm."}, "ref_audio"),
        ("session.config", {"instructions": "Whisper."}, "instructions"),
        ("input.text", {}, "input"),
        ("input.text", {"text": 7}, "input"),
        ("input.text", {"text": ["a"]}, "input"),
        ("input.audio", {}, "type"),
        ("", {}, "type"),
    ]
    raw = ["", "{", "null", "[]", '"input.done"', "{}", '{"type": 3}', '{"type": "input.text", "text": "\\udc00"}']

    async def ask() -> None:
        async with serving("live") as server, session(server) as client:
            for kind, fields, parameter in wrong:
                error = await client.refused(kind, **fields)
                assert error["param"] == parameter, error
                assert parameter in error["message"]
            for message in [*raw, "[" * 50_000, b'{"type": "input.done"}']:
                await client.socket.send(message)
                event = await client.hear()
                assert event["error"]["code"] == "invalid_request", message
                assert event["request_id"] is None
            await client.say("input.done")  # of no utterance: there is nothing to end
            silence, events = await client.speak(" ?", "!")
            assert silence
            assert not any(silence)
            assert "error" not in {event["type"] for event in events}
            assert (await client.speak(TEXT))[0] == whole()
            assert await server.is_idle()

    run(ask())


def test_a_model_that_needs_a_recording_asks_for_it() -> None:
    async def speak() -> None:
        async with serving("cloning") as server, session(server) as client:
            _, (refused,) = await client.speak("No ", "voice ", "yet.")
            assert refused["error"]["param"] == "ref_audio"
            await client.say("session.config", ref_audio=recording(), x_vector_only_mode=True)
            assert (await client.hear())["type"] == "session.configured"
            assert len((await client.speak("Like ", "this."))[0]) == len("Like this.") * 160

    run(speak())


def test_what_comes_at_the_wrong_time_is_refused_and_the_utterance_goes_on() -> None:
    async def ask() -> None:
        async with serving("slow_live") as server, session(server) as client:
            await client.say("input.text", text=TEXT)
            assert (await client.hear())["type"] == "audio.start"
            await client.say("session.config", voice="high")
            await client.say("input.done")
            await client.say("input.text", text="More.")
            audio, errors = b"", []
            while len(errors) < 2:
                heard = await client.hear()
                if isinstance(heard, bytes):
                    audio += heard
                else:
                    errors.append(heard)
            assert [error["error"]["param"] for error in errors] == ["session.config", "input.text"]
            rest, (done,) = await client.listen()
            assert audio + rest == whole()
            assert done["type"] == "audio.done"

    run(ask())


def test_the_rest_of_an_utterance_that_failed_is_not_the_next_one() -> None:
    settings = dataclasses.replace(SETTINGS, max_characters=40)

    async def speak() -> None:
        async with serving("live", settings) as server, session(server) as client:
            for _ in range(9):
                await client.say("input.text", text="twelve more ")
            heard, (*_, failed) = await client.listen()
            assert failed["error"]["param"] == "input"
            assert "at most 40" in failed["error"]["message"]
            assert len(heard) <= 48 * 160
            await client.say("input.done")
            assert (await client.speak(TEXT))[0] == whole()
            _, (failed,) = await client.speak("word " * 9, "and more")
            assert failed["error"]["param"] == "input"
            assert (await client.speak(TEXT))[0] == whole()
            await until(server.is_idle)
            assert await server.metric("sonoro_requests_in_flight") == 0

    run(speak())


def test_sessions_of_one_key_leave_room_for_recordings_of_another() -> None:
    settings = dataclasses.replace(SETTINGS, max_total_body_bytes=400_000, api_keys=("first-key", "second-key"))

    async def configured(server: Server, key: str, kept: contextlib.AsyncExitStack) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        client = await kept.enter_async_context(session(server, additional_headers=headers))
        await client.say("session.config", ref_audio=recording(), ref_text="Hm.")
        return str((await client.hear())["type"])

    async def ask() -> None:
        async with serving("live", settings) as server, contextlib.AsyncExitStack() as kept:
            first = [await configured(server, "first-key", kept) for _ in range(7)]
            assert set(first) == {"session.configured", "error"}
            assert await configured(server, "second-key", kept) == "session.configured"

    run(ask())


def test_recordings_of_requests_that_wait_are_bounded_together() -> None:
    settings = dataclasses.replace(SETTINGS, max_total_body_bytes=100_000)
    cloned = {"input": LONG, "ref_audio": recording(), "ref_text": "Hm.", "response_format": "pcm"}

    async def ask() -> None:
        async with serving("slow", settings) as server:
            async with server.http.stream("POST", "/v1/audio/speech", json=cloned) as first:
                assert first.status_code == 200
                second = await server.http.post("/v1/audio/speech", json=cloned)
                check_error(second, 429)
                assert "recordings held in memory" in second.json()["error"]["message"]
                voice = {"name": "anna", "x_vector_only_mode": "true"}
                upload = await server.http.post("/v1/audio/voices", data=voice, files={"audio": sound()})
                check_error(upload, 429)
            await until(lambda: server.service.speech._references.taken == 0)
            third = await server.http.post("/v1/audio/speech", json={**cloned, "input": "Hm."})
            assert third.status_code == 200

    run(ask())
