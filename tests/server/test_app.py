"""The speech API as its clients see it: what is answered, what is refused and how, while the server serves on."""

import dataclasses
import json
from pathlib import Path

import pytest
from servers import SETTINGS, check_error, recording, serving, sound
from sine_engines import LONG, alone, nothing_left, run, until
from sine_models import VoicedSineModel

from sonoro.core.types import SamplingParams, SpeechRequest
from sonoro.server.config import ServerConfig
from sonoro.server.schemas import SpeechBody, parse, speech_request

__all__ = ["nothing_left"]

# The folder of a test is made before that of its links, which must be empty at the end.
pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")

SPEECH = "/v1/audio/speech"


def spoken(text: str = "Some words.", seed: int = 0, voice: str = "low", strength: int = 50) -> bytes:
    """The PCM16 that a request should be answered with."""
    return alone(SpeechRequest(id="a", text=text, seed=seed, voice=voice, options={"strength": strength}))


def test_the_fields_of_a_request_reach_the_engine(tmp_path: Path) -> None:
    cloned = {"ref_audio": recording(), "voice": "alloy"}
    (tmp_path / "tone.wav").write_bytes(sound())
    settings = dataclasses.replace(SETTINGS, reference_folder=str(tmp_path))

    async def ask() -> None:
        async with serving(settings=settings) as server:
            for fields, expected in (
                ({}, spoken()),
                ({"model": "tts-1", "voice": "alloy"}, spoken()),
                ({"model": "gpt-4o-mini-tts", "voice": "ash", "unheard_of": {"a": [1]}}, spoken(voice="high")),
                ({"model": "sine", "voice": {"id": "HIGH"}, "instructions": ""}, spoken(voice="high")),
                ({"speaker": "high", "seed": 3, "language": "English"}, spoken(voice="high", seed=3)),
                ({"attempts": 3}, spoken()),
                ({"on_fault": "retry"}, spoken()),
                ({"on_fault": "continue", "attempts": 3}, spoken()),
                ({"strength": 20, "temperature": 0, "top_k": 5, "top_p": 0.5}, spoken(strength=20)),
            ):
                answer = await server.speak(**fields)
                assert answer.content == expected, fields
                assert answer.headers["x-sample-rate"] == "8000"
            cut = await server.speak(LONG, max_new_tokens=7)
            assert cut.content == spoken(LONG)[: 7 * 160]
            longer = await server.speak(max_new_tokens=40, ignore_eos=True)
            assert len(longer.content) == 40 * 160
            assert "attempts: 11" in (await server.speak(attempts=11)).text
            assert "at least 2" in (await server.speak(attempts=1, on_fault="retry")).text
            assert "on_fault" in (await server.speak(on_fault="stop")).text
            timbre = await server.speak(**cloned, x_vector_only_mode=True)
            continued = await server.speak(**cloned, ref_text="A tone.")
            assert timbre.status_code == continued.status_code == 200
            assert len({timbre.content, continued.content, spoken()}) == 3
            given = [{"audio": cloned["ref_audio"], "text": "A tone."}]
            named = await server.speak(references=given, task_type="Base", voice="alloy")
            opened = await server.speak(ref_audio="file:tone.wav", ref_text="A tone.", stream=False)
            assert named.content == opened.content == continued.content
            told = await server.speak(voice="high", task_type="CustomVoice", initial_codec_chunk_frames=4, stream=True)
            assert told.content == spoken(voice="high")
            slower = await server.speak(speed=0.5)
            assert len(slower.content) == pytest.approx(2 * len(spoken()), rel=0.03)
            higher = await server.speak(sample_rate=16000)
            assert (len(higher.content), higher.headers["x-sample-rate"]) == (2 * len(spoken()), "16000")

    run(ask())


def test_models_voices_and_the_schema_are_listed() -> None:
    settings = dataclasses.replace(SETTINGS, voice_aliases={"Alloy": "high", "anna": "low"}, model_aliases=("voice",))

    async def ask() -> None:
        async with serving(settings=settings) as server:
            models = (await server.http.get("/v1/models")).json()
            assert [model["id"] for model in models["data"]] == ["sine", "voice"]
            assert models["data"][1]["root"] == "sine"
            voices = (await server.http.get("/v1/audio/voices")).json()
            assert voices["voices"] == [{"id": "low", "name": "low"}, {"id": "high", "name": "high"}]
            assert (voices["aliases"]["alloy"], voices["aliases"]["anna"]) == ("high", "low")
            assert (await server.speak(voice="alloy")).content == spoken(voice="high")
            schema = (await server.http.get("/openapi.json")).json()
            body = schema["paths"][SPEECH]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert body["required"] == ["input"]
            assert "$ref" not in json.dumps(body)

    run(ask())


def test_logs_have_ids_and_nothing_of_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with serving() as server:
            spoken = await server.speak("A confidential word.", ref_secret="confidential")
            refused = await server.speak("A confidential word.", voice="confidential")
            gone = await server.speak("A confidential and unspeakable word.")
            for answer in (spoken, refused, gone):
                # The end of a request is noted after the last byte has gone.
                await until(lambda answer=answer: answer.headers["x-request-id"] in caplog.text)
            assert "ref_secret" in caplog.text
            assert "confidential" not in caplog.text

    with caplog.at_level("DEBUG", logger="sonoro"):
        run(ask())


def test_only_who_has_a_key_is_served() -> None:
    settings = dataclasses.replace(SETTINGS, api_keys=("first-key", "clé"))

    async def ask() -> None:
        async with serving(settings=settings) as server:
            for header in (None, "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-keyx"):
                headers = {} if header is None else {"authorization": header}
                for path in (SPEECH, "/v1/models", "/v1/audio/voices"):
                    if header is None and path == "/v1/audio/voices":
                        continue
                    answer = await server.http.request("POST" if path == SPEECH else "GET", path, headers=headers)
                    check_error(answer, 401)
                    assert answer.headers["www-authenticate"] == "Bearer"
            for key in ("first-key", "clé"):
                headers = {"authorization": b"Bearer " + key.encode()}
                assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
            for path in ("/health", "/ready", "/metrics"):
                assert (await server.http.get(path)).status_code == 200

    run(ask())


def test_browsers_of_the_named_origins_may_call() -> None:
    settings = dataclasses.replace(SETTINGS, cors_origins=("https://here.example",))

    async def ask() -> None:
        async with serving(settings=settings) as server:
            for origin, is_allowed in (("https://here.example", True), ("https://there.example", False)):
                answer = await server.http.get("/v1/models", headers={"origin": origin})
                assert ("access-control-allow-origin" in answer.headers) == is_allowed

    run(ask())


def test_no_page_of_another_site_makes_a_browser_post() -> None:
    """A form or a text needs no permission of CORS to be sent, only to be read. What a browser says of the site makes
    no difference: an old one says nothing."""
    hosts = ("speech.example",)
    settings = dataclasses.replace(SETTINGS, cors_origins=("https://here.example",), allowed_hosts=hosts)

    async def ask() -> None:
        async with serving(settings=settings) as server:
            for origin, status in (
                ("https://there.example", 403),
                ("null", 403),
                ("http://[", 403),
                ("http://127.0.0.1:1", 403),
                ("http://localhost", 403),
                ("https://here.example", 200),
                ("https://speech.example", 200),
                (server.url, 200),
            ):
                for site in ({"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-origin"}, {}):
                    headers = {"origin": origin, "content-type": "text/plain", **site}
                    text = b'{"input": "Some words.", "response_format": "pcm"}'
                    answer = await server.http.post("/v1/audio/speech", content=text, headers=headers)
                    assert answer.status_code == status, origin
                    form = {"data": {"name": "x", "x_vector_only_mode": "true"}, "files": {"audio": b"none"}}
                    del headers["content-type"]
                    answer = await server.http.post("/v1/audio/voices", headers=headers, **form)
                    assert (answer.status_code == 403) == (status == 403)

    run(ask())


def test_health_comes_before_the_engine_and_requests_are_told_to_wait() -> None:
    async def ask() -> None:
        async with serving("lasting", waits=False) as server:
            await until(lambda: server.process.started)
            assert (await server.http.get("/health")).json() == {"status": "alive"}
            for answer in (
                await server.http.get("/ready"),
                await server.speak(),
                await server.http.get("/v1/models"),
            ):
                check_error(answer, 503)
                assert "started" in answer.json()["error"]["message"]
            assert await server.metric("sonoro_engine_up") == 0

    run(ask())


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        ("missing", SETTINGS, "no folder 'missing'"),
        ("dying", SETTINGS, "this is why it died"),
        ("sine", dataclasses.replace(SETTINGS, voice_aliases={"anna": "nobody"}), "voice_aliases.anna"),
    ],
)
def test_an_engine_that_cannot_be_started_is_told_of(model: str, settings: ServerConfig, reason: str) -> None:
    async def ask() -> None:
        async with serving(model, settings, waits=False) as server:
            await until(lambda: server.failures)
            assert reason in str(server.failures[0])
            answer = await server.http.get("/ready")
            check_error(answer, 503)
            assert reason in answer.json()["error"]["message"]
            check_error(await server.speak(), 503)

    run(ask())


def test_the_defaults_of_sampling_stay_the_models() -> None:
    """Left out and null mean the same; what is given is kept."""
    spec = VoicedSineModel().spec
    for payload, expected in (
        (b'{"input": "a"}', spec.sampling),
        (b'{"input": "a", "temperature": null, "top_k": null, "seed": null}', spec.sampling),
        (b'{"input": "a", "temperature": 0, "top_k": 3}', SamplingParams(temperature=0, top_k=3).over(spec.sampling)),
    ):
        made = speech_request(parse(SpeechBody, payload), "a", spec, {})
        assert (made.sampling, made.seed, made.voice) == (expected, 0, "low")
