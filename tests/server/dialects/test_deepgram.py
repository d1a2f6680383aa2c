"""What Deepgram's clients send, as recorded from them, and what they need to be answered."""

import dataclasses
import io

import pytest
import soundfile
from servers import SETTINGS, serving
from sessions import TEXT, audio_of, socket, whole
from sine_engines import LONG, nothing_left, run, until
from websockets.exceptions import InvalidStatus

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

SPEAK = "/v1/speak"
RAW = {"model": "aura-2-thalia-en", "encoding": "linear16", "sample_rate": "8000", "container": "none"}
SOCKET = "/v1/speak?model=aura-2-andromeda-en&encoding=linear16&sample_rate=8000&mip_opt_out=false"


def test_a_text_is_spoken_in_its_encodings_and_containers() -> None:
    async def speak() -> None:
        async with serving() as server:
            answer = await server.http.post(SPEAK, params=RAW, json={"text": TEXT})
            assert answer.content == whole()
            assert answer.headers["dg-request-id"]
            wav = await server.http.post(SPEAK, params={**RAW, "container": "wav"}, json={"text": TEXT})
            assert wav.content[44:] == whole()
            for encoding, kind in (("mp3", "mpeg"), ("opus", "ogg"), ("flac", "flac"), ("aac", "aac"), (None, "mpeg")):
                params = {"encoding": encoding} if encoding else {}
                answer = await server.http.post(SPEAK, params=params, json={"text": TEXT})
                assert kind in answer.headers["content-type"]
            law = {**RAW, "encoding": "mulaw", "container": "wav"}
            heard, rate = soundfile.read(
                io.BytesIO((await server.http.post(SPEAK, params=law, json={"text": TEXT})).content)
            )
            assert (len(heard), rate) == (len(whole()) / 2, 8000)
            faster = await server.http.post(SPEAK, params={**RAW, "speed": "1.5"}, json={"text": TEXT})
            assert len(faster.content) == pytest.approx(len(whole()) / 1.5, rel=0.05)

    run(speak())


def test_models_are_voices_and_refusals_are_in_the_clients_words() -> None:
    settings = dataclasses.replace(SETTINGS, api_keys=("a-key",))

    async def ask() -> None:
        async with serving(settings=settings) as server:
            mine = {"authorization": "Token a-key"}
            models = (await server.http.get("/v1/models", headers=mine)).json()
            assert [model["canonical_name"] for model in models["tts"]] == list(server.service.speech.spec().voices)
            answer = await server.http.post(SPEAK, params=RAW, json={"text": TEXT}, headers=mine)
            assert answer.content == whole()
            refused = await server.http.post(SPEAK, json={"text": TEXT}, headers={"authorization": "Token no"})
            assert (refused.status_code, refused.json()["err_code"]) == (401, "INVALID_API_KEY")
            for params, body in ((RAW, {"txt": 1}), ({**RAW, "encoding": "mp7"}, {"text": "Hm."}), (RAW, {"text": ""})):
                refused = await server.http.post(SPEAK, params=params, json=body, headers=mine)
                assert refused.status_code == 400
                assert set(refused.json()) == {"err_code", "err_msg", "request_id"}
            for path, headers in ((SOCKET, {}), (SOCKET.replace("linear16", "mp3"), mine)):
                with pytest.raises(InvalidStatus) as caught:
                    async with socket(server, path, additional_headers=headers):
                        pass
                assert caught.value.response.headers["dg-error"]
            # A browser has no headers to give.
            async with socket(server, SOCKET, subprotocols=["token", "a-key"]) as client:
                assert (await client.hear())["type"] == "Metadata"
                assert client.connection.subprotocol == "token"

    run(ask())


def test_text_is_spoken_flush_by_flush() -> None:
    async def speak() -> None:
        async with serving("live") as server, socket(server, SOCKET) as client:
            metadata = await client.hear()
            assert set(metadata) == {"type", "request_id", "model_name", "model_version", "model_uuid"}
            for number, text in enumerate((TEXT, "Another text.")):
                for word in text.split(" "):
                    await client.say({"type": "Speak", "text": word if text.endswith(word) else f"{word} "})
                await client.say({"type": "Flush"})
                heard = await client.hear_until(type="Flushed")
                assert audio_of(heard[:-1]) == whole(text)
                assert heard[-1]["sequence_id"] == number
            await client.say({"type": "Flush"})
            assert await client.hear() == {"type": "Flushed", "sequence_id": 2}
            await client.say({"type": "Speak", "text": "And the last."}, {"type": "Close"})
            assert audio_of(await client.hear_until()) == whole("And the last.")
            assert client.closed == 1000
            await until(server.is_idle)

    run(speak())


def test_nothing_is_heard_after_it_was_cleared() -> None:
    async def speak() -> None:
        async with serving("slow_live") as server, socket(server, SOCKET) as client:
            await client.hear()
            await client.say({"type": "Speak", "text": LONG}, {"type": "Flush"})
            heard = [await client.hear() for _ in range(3)]
            await client.say({"type": "Clear"}, {"type": "Clear"})
            heard += await client.hear_until(type="Cleared")
            assert 0 < len(audio_of(heard[:-1])) < len(whole(LONG)) / 2
            assert (await client.hear())["type"] == "Cleared"
            await client.say({"type": "Speak", "text": "What then?"}, {"type": "Flush"})
            heard = await client.hear_until(type="Flushed")
            assert audio_of(heard[:-1]) == whole("What then?")
            await until(server.is_idle)
            name = 'sonoro_requests_total{dialect="deepgram",model="sine",reason="cancelled"}'
            assert await server.metric(name) == 1

    run(speak())


def test_what_is_wrong_is_told_and_the_socket_goes_on() -> None:
    async def speak() -> None:
        async with serving("live") as server, socket(server, SOCKET) as client:
            await client.hear()
            for message in (
                {"type": "Speak"},
                {"type": "Sing"},
                "no JSON",
                b"\x00",
                {"type": "Speak", "text": "x" * 5000},
            ):
                await client.say(message)
                error = (await client.hear_until(type="Error"))[-1]
                assert error["description"]
                assert error["code"] == "INVALID_REQUEST"
            await client.say({"type": "Speak", "text": "Still here."}, {"type": "Flush"})
            assert audio_of((await client.hear_until(type="Flushed"))[:-1]) == whole("Still here.")

    run(speak())


def test_a_flush_is_answered_although_its_text_fails() -> None:
    async def speak() -> None:
        async with serving("live") as server, socket(server, SOCKET) as client:
            await client.hear()
            await client.say({"type": "Speak", "text": "Hi there, "})
            while not isinstance(await client.hear(), bytes):
                pass
            await client.say({"type": "Speak", "text": "\N{SKULL AND CROSSBONES} and on."}, {"type": "Flush"})
            heard = await client.hear_until(type="Flushed")
            assert [message["type"] for message in heard if not isinstance(message, bytes)] == ["Error", "Flushed"]
            await client.say({"type": "Speak", "text": "Still here."}, {"type": "Flush"})
            assert audio_of((await client.hear_until(type="Flushed"))[:-1]) == whole("Still here.")

    run(speak())
