"""What ElevenLabs' clients send, as recorded from them, and what they need to be answered."""

import asyncio
import base64
import dataclasses
import json

import httpx
import pytest
from servers import SETTINGS, serving
from sessions import TEXT, audio_of, socket, whole
from sine_engines import LONG, nothing_left, run, until

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

ID = "JBFqnCBsd6RMkjVDRZzb"
SPEAK = f"/v1/text-to-speech/{ID}"
PCM = {"output_format": "pcm_8000"}
KEYS = dataclasses.replace(SETTINGS, api_keys=("a-key",))


def test_a_text_is_spoken_whole_and_streamed_in_formats_by_their_names() -> None:
    async def speak() -> None:
        async with serving() as server:
            for path in ("", "/stream"):
                answer = await server.http.post(SPEAK + path, params=PCM, json={"text": TEXT, "model_id": "eleven_x"})
                assert answer.content == whole()
                assert answer.headers["content-type"].startswith("audio/")
                assert answer.headers["request-id"] == answer.headers["x-trace-id"] == answer.headers["x-request-id"]
            for name, kind in (("mp3_22050_32", "audio/mpeg"), ("opus_48000_64", "audio/ogg"), (None, "audio/mpeg")):
                params = {"output_format": name} if name else {}
                answer = await server.http.post(SPEAK, params=params, json={"text": "Some words."})
                assert answer.headers["content-type"].startswith(kind)
                assert len(answer.content) > 500
            settings = {"stability": 0.5, "speed": 2.0, "style": None}
            answer = await server.http.post(
                SPEAK, params=PCM, json={"text": TEXT, "voice_settings": settings, "seed": 2**32 - 1}
            )
            assert len(answer.content) == pytest.approx(len(whole()) / 2, rel=0.05)
            name = 'sonoro_requests_total{dialect="elevenlabs",model="sine",reason="stop"}'
            assert await server.metric(name) == 6
            # Each is counted under one dialect.
            assert await server.metric('sonoro_requests_total{model="sine",reason="stop"}') == 6

    run(speak())


def test_times_of_characters_go_on_through_a_stream_and_cover_the_text() -> None:
    def check(alignments: list[dict], seconds: float) -> None:
        characters = [character for part in alignments for character in part["characters"]]
        starts = [at for part in alignments for at in part["character_start_times_seconds"]]
        ends = [at for part in alignments for at in part["character_end_times_seconds"]]
        assert "".join(characters) == TEXT
        assert len(starts) == len(ends) == len(TEXT)
        assert starts == sorted(starts)
        assert starts[0] == 0
        assert ends[-1] == pytest.approx(seconds)

    async def speak() -> None:
        async with serving() as server:
            answer = await server.http.post(f"{SPEAK}/with-timestamps", params=PCM, json={"text": TEXT})
            told = answer.json()
            assert base64.b64decode(told["audio_base64"]) == whole()
            assert told["alignment"] == told["normalized_alignment"]
            check([told["alignment"]], len(whole()) / 16000)
            answer = await server.http.post(f"{SPEAK}/stream/with-timestamps", params=PCM, json={"text": TEXT})
            lines = [json.loads(line) for line in answer.text.splitlines()]
            assert audio_of(lines, "audio_base64") == whole()
            assert len(lines) > 2
            check([line["alignment"] for line in lines if line["alignment"]], len(whole()) / 16000)

    run(speak())


def test_voices_models_and_the_user_are_listed() -> None:
    async def ask() -> None:
        async with serving(settings=KEYS) as server:
            mine = {"xi-api-key": "a-key"}
            voices = (await server.http.get("/v1/voices", headers=mine)).json()["voices"]
            names = [voice["voice_id"] for voice in voices]
            assert names == list(server.service.speech.spec().voices)
            assert all(voice["category"] and voice["name"] and voice["labels"] == {} for voice in voices)
            found = (await server.http.get("/v2/voices", params={"search": names[0]}, headers=mine)).json()
            assert (found["has_more"], found["total_count"], len(found["voices"])) == (False, 1, 1)
            one = await server.http.get(f"/v1/voices/{names[0]}", headers=mine)
            assert one.json()["voice_id"] == names[0]
            unknown = await server.http.get("/v1/voices/nobody", headers=mine)
            assert (unknown.status_code, unknown.json()["detail"]["status"]) == (404, "unknown_voice")
            models = (await server.http.get("/v1/models", headers=mine)).json()
            assert all(model["can_do_text_to_speech"] and model["languages"] for model in models)
            # The same path is OpenAI's for everybody else.
            openai = await server.http.get("/v1/models", headers={"authorization": "Bearer a-key"})
            assert openai.json()["object"] == "list"
            user = (await server.http.get("/v1/user", headers=mine)).json()
            assert user["subscription"]["tier"]
            for path in ("/v1/voices", "/v1/user/subscription"):
                refused = await server.http.get(path, headers={"xi-api-key": "wrong"})
                assert (refused.status_code, refused.json()["detail"]["status"]) == (401, "invalid_api_key")

    run(ask())


def test_bad_requests_are_told_in_the_clients_words_and_counted() -> None:
    async def ask() -> None:
        async with serving() as server:

            async def refused(status: int, **arguments: object) -> httpx.Response:
                answer = await server.http.post(SPEAK, **arguments)
                assert answer.status_code == status
                assert set(answer.json()["detail"]) == {"status", "message"}
                return answer

            await refused(400, json={"txt": "Some words."})
            await refused(400, content=b"\xff\x00 no JSON")
            await refused(400, json={"text": " "})
            long = await refused(400, json={"text": "x" * 5000})
            assert "4096" in long.json()["detail"]["message"]
            await refused(400, params={"output_format": "mp3"}, json={"text": "Hm."})
            await refused(400, params={"output_format": "pcm_96000"}, json={"text": "Hm."})
            wrong = await server.http.get(SPEAK)
            assert (wrong.status_code, wrong.json()["detail"]["status"]) == (405, "http")
            name = 'sonoro_requests_total{dialect="elevenlabs",model="sine",reason="invalid_request"}'
            assert await server.metric(name) == 6

    run(ask())


def test_live_text_is_spoken_to_its_end_as_the_sdk_sends_it() -> None:
    async def speak() -> None:
        async with serving("live") as server, socket(server, f"{SPEAK}/stream-input?output_format=pcm_8000") as client:
            first = {"try_trigger_generation": True, "voice_settings": None}
            await client.say({"text": " ", **first, "generation_config": {"chunk_length_schedule": [50]}})
            for word in TEXT.split():
                await client.say({"text": f"{word} ", "try_trigger_generation": True})
            await client.say({"text": ""})
            heard = await client.hear_until()
            assert audio_of(heard) == whole()
            assert heard[-1] == {"isFinal": True, "audio": None}
            assert all(message["isFinal"] is None for message in heard[:-1])
            assert client.closed == 1000
            told = [message["alignment"] for message in heard if message.get("alignment")]
            assert "".join(character for part in told for character in part["chars"]) == f"{TEXT} "
            await until(server.is_idle)

    run(speak())


def multi(query: str = "") -> str:
    return f"{SPEAK}/multi-stream-input?output_format=pcm_8000{query}"


@pytest.mark.parametrize("is_synchronised", [True, False])
def test_contexts_are_spoken_side_by_side_with_their_times(is_synchronised: bool) -> None:
    texts = {"one": TEXT, "two": "Another text."}
    query = "&sync_alignment=true" if is_synchronised else ""

    async def speak() -> None:
        async with serving("live") as server, socket(server, multi(query)) as client:
            for name in texts:
                await client.say({"text": " ", "context_id": name, "voice_settings": {"stability": 0.5}})
            for name, text in texts.items():
                for piece in (text[:4], text[4:9], text[9:]):
                    await client.say({"text": piece, "context_id": name})
                await client.say({"text": "", "context_id": name, "flush": True})
            await client.say({"text": "", "context_id": "one"}, {"text": ""})  # keep-alives
            heard = []
            for name in texts:
                await client.say({"context_id": name, "close_context": True})
            while sum(bool(message.get("isFinal")) for message in heard) < 2:
                heard.append(await client.hear())
            for name, text in texts.items():
                mine = [message for message in heard if message["contextId"] == name]
                assert audio_of(mine) == whole(text)
                assert mine[-1] == {"isFinal": True, "audio": None, "contextId": name}
                told = [message["alignment"] for message in mine if message.get("alignment")]
                assert "".join(character for part in told for character in part["chars"]) == f"{text} "
                at_ms = 0
                for part in told:
                    starts, durations = part["charStartTimesMs"], part["charDurationsMs"]
                    assert len(starts) == len(durations) == len(part["chars"])
                    assert starts[0] == (at_ms if is_synchronised else 0)
                    end_ms = starts[-1] + durations[-1]
                    at_ms = end_ms if is_synchronised else at_ms + end_ms
                assert at_ms == pytest.approx(1000 * len(whole(text)) / 16000, abs=2)
            await client.say({"close_socket": True})
            assert await client.hear() is None
            assert client.closed == 1000
            await until(server.is_idle)

    run(speak())


def test_phrases_stand_apart_in_auto_mode_and_only_there() -> None:
    async def speak() -> None:
        async with serving("live") as server:
            for query, text in (("&auto_mode=true", "One. Two. Three."), ("", "One.Two.Three.")):
                async with socket(server, multi(query)) as client:
                    for piece in ("One.", "Two.", "Three."):
                        await client.say({"text": piece, "context_id": "a"})
                    await client.say({"context_id": "a", "flush": True}, {"context_id": "a", "close_context": True})
                    heard = await client.hear_until(isFinal=True)
                    assert audio_of(heard) == whole(text)

    run(speak())


def test_a_context_is_interrupted_and_the_socket_goes_on() -> None:
    async def speak() -> None:
        async with serving("slow_live") as server, socket(server, multi()) as client:
            # Pipecat: text still open. LiveKit: all of it flushed, closed, and then closed again.
            for number, is_flushed in enumerate((False, True)):
                name = f"context {number}"
                await client.say({"text": LONG, "context_id": name})
                if is_flushed:
                    await client.say({"context_id": name, "flush": True}, {"context_id": name, "close_context": True})
                heard = [await client.hear() for _ in range(3)]
                await client.say({"context_id": name, "close_context": True})
                heard += await client.hear_until(isFinal=True)
                assert heard[-1] == {"isFinal": True, "audio": None, "contextId": name}
                assert 0 < len(audio_of(heard)) < len(whole(LONG)) / 2
                assert whole(LONG).startswith(audio_of(heard))
            await until(server.is_idle)
            await client.say({"text": "What then?", "context_id": "next"}, {"context_id": "next", "flush": True})
            await client.say({"context_id": "next", "close_context": True})
            assert audio_of(await client.hear_until(isFinal=True)) == whole("What then?")
            name = 'sonoro_requests_total{dialect="elevenlabs",model="sine",reason="cancelled"}'
            assert await server.metric(name) == 2

    run(speak())


def test_text_for_a_context_that_was_closed_is_refused() -> None:
    async def speak() -> None:
        async with serving("slow_live") as server, socket(server, multi()) as client:
            await client.say({"text": "Spoken to its end.", "context_id": "a", "flush": True})
            await client.say({"context_id": "a", "close_context": True}, {"context_id": "a", "text": "Too late."})
            await client.say({"context_id": "a", "text": ""})  # a keep-alive
            heard = await client.hear_until(isFinal=True)
            (refused,) = [message for message in heard if "error" in message]
            assert (refused["contextId"], "it was closed" in refused["error"]) == ("a", True)
            assert audio_of(heard) == whole("Spoken to its end.")
            await client.say({"text": "Now.", "context_id": "a", "flush": True})
            await client.say({"context_id": "a", "close_context": True})
            assert audio_of(await client.hear_until(isFinal=True)) == whole("Now.")

    run(speak())


def test_what_is_not_flushed_is_dropped_and_an_empty_context_ends_too() -> None:
    async def speak() -> None:
        async with serving("live") as server, socket(server, multi()) as client:
            await client.say({"text": " ", "context_id": "a"}, {"context_id": "a", "close_context": True})
            assert await client.hear() == {"isFinal": True, "audio": None, "contextId": "a"}
            await client.say({"text": "Spoken.", "context_id": "b", "flush": True})
            await client.say({"text": "Not sp", "context_id": "b"}, {"context_id": "b", "close_context": True})
            heard = await client.hear_until(isFinal=True)
            assert audio_of(heard).startswith(whole("Spoken."))
            assert len(audio_of(heard)) < len(whole("Spoken.Not sp"))

    run(speak())


def test_what_is_wrong_on_a_socket_is_told_and_ends_its_context_alone() -> None:
    async def speak() -> None:
        async with serving("live") as server:
            async with socket(server, multi()) as client:
                await client.say({"text": "Fine.", "context_id": "fine"})
                await client.say({"text": "x" * 5000, "context_id": "long"})
                error = (await client.hear_until(contextId="long"))[-1]
                assert "4096" in error["error"]
                assert (await client.hear_until(isFinal=True))[-1]["contextId"] == "long"
                for message in ("no JSON", "[]", '{"text": 3}', b"\x00\xff"):
                    await client.say(message)
                    assert (await client.hear_until(contextId=None) or [{}])[-1].get("error")
                await client.say({"context_id": "fine", "flush": True}, {"context_id": "fine", "close_context": True})
                await client.hear_until(isFinal=True)
            async with socket(server, f"{SPEAK}/stream-input") as client:
                await client.say({"text": "x" * 5000})
                # The SDK takes what came last for the error.
                assert "message" in (await client.hear_until())[-1]
                assert client.closed == 1000
            async with socket(server, f"{SPEAK}/stream-input?output_format=pcm_8000") as client:
                await client.say(
                    {"text": " "}, {"text": TEXT[:9]}, {"text": "x" * 5000}, {"text": TEXT[9:]}, {"text": ""}
                )
                heard = await client.hear_until()
                assert audio_of(heard) == whole()
                assert heard[-1]["isFinal"]
                assert "message" in heard[-1]
            answer = await server.http.get(f"{SPEAK}/multi-stream-input")
            assert answer.status_code == 404
            await until(server.is_idle)

    run(speak())


def test_a_browser_gives_its_key_in_the_first_message() -> None:
    async def speak() -> None:
        async with serving("live", settings=KEYS) as server:
            async with socket(server, multi()) as client:
                await client.say({"text": " ", "context_id": "a", "xi_api_key": "a-key"})
                await client.say({"text": "Hm.", "context_id": "a", "flush": True})
                assert audio_of(await client.hear_until(contextId="a"))
            for message in ({"text": "Hm.", "context_id": "a"}, {"text": "Hm.", "xi_api_key": "wrong"}):
                async with socket(server, multi()) as client:
                    await client.say(message, {"text": "Hm.", "context_id": "b", "flush": True})
                    heard = await client.hear_until()
                    assert "key" in heard[0]["error"]
                    assert not audio_of(heard)
                    assert client.closed == 1000

    run(speak())


@pytest.mark.parametrize("path", ["stream-input", "multi-stream-input"])
def test_who_waits_too_long_for_a_turn_is_told_and_the_socket_is_closed_as_usual(path: str) -> None:
    settings = dataclasses.replace(SETTINGS, max_concurrency=1, max_queue_wait_ms=50)

    async def speak() -> None:
        async with serving("slow", settings) as server, socket(server, f"{SPEAK}/{path}") as client:
            first = asyncio.create_task(server.speak("Some words. " * 20))
            await until(lambda: server.has("sonoro_requests_in_flight", 1))
            await client.say({"text": TEXT, "context_id": "one"}, {"text": "", "flush": True, "context_id": "one"})
            told = await client.hear()
            assert "no request ended within" in told["error"]
            if path == "multi-stream-input":
                assert (await client.hear())["isFinal"]
                await client.say({"close_socket": True})
            assert await client.hear_until() == []
            assert client.closed == 1000
            first.cancel()
            await until(server.is_idle)

    run(speak())
