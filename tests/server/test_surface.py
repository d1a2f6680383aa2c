"""What clients of many kinds ask beside speech: HEAD, methods, single models, nulls, the reference of the API."""

import asyncio
import dataclasses
import json

import openai
import pytest
from servers import SETTINGS, check_error, serving, sound
from sine_engines import nothing_left, run

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

SPEECH = "/v1/audio/speech"


def test_head_answers_wherever_get_does_and_allow_names_every_method() -> None:
    async def ask() -> None:
        async with serving() as server:
            paths = (await server.http.get("/openapi.json")).json()["paths"]
            readable = [path for path, operations in paths.items() if "get" in operations and "{" not in path]
            assert len(readable) >= 5
            for path in (*readable, "/", "/docs", "/openapi.json", "/v1/models/tts-1"):
                whole, head = await server.http.get(path), await server.http.head(path)
                assert (head.status_code, head.content) == (whole.status_code, b""), path
                assert head.headers["content-type"] == whole.headers["content-type"]
            for path, operations in paths.items():
                methods = {method.upper() for method in operations} | ({"HEAD"} if "get" in operations else set())
                for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - methods:
                    answer = await server.http.request(method, path.replace("{name}", "x"))
                    assert answer.status_code == 405, (method, path)
                    assert set(answer.headers["allow"].split(", ")) == methods, (method, path)

    run(ask())


def test_the_names_of_the_model_are_listed_to_whom_comes_without_a_key() -> None:
    async def ask() -> None:
        async with serving(settings=dataclasses.replace(SETTINGS, api_keys=("hush",))) as server:
            listed = (await server.http.get("/v1/audio/models")).json()["models"]
            assert {"id": "tts-1", "name": "tts-1"} in listed
            check_error(await server.http.get("/v1/audio/models", headers={"authorization": "Bearer loud"}), 401)

    run(ask())


def test_a_model_is_told_of_by_each_of_its_names() -> None:
    async def ask() -> None:
        async with serving() as server:
            listed = (await server.http.get("/v1/models")).json()["data"]
            for model in listed:
                assert (await server.http.get(f"/v1/models/{model['id']}")).json() == model
            for name in ("gpt-9", "some/folder", "TTS-1"):
                check_error(await server.http.get(f"/v1/models/{name}"), 404, "model")

            def retrieve() -> None:
                with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
                    assert client.models.retrieve("tts-1").id == "tts-1"
                    with pytest.raises(openai.NotFoundError):
                        client.models.retrieve("gpt-9")

            await asyncio.to_thread(retrieve)

    run(ask())


def test_null_is_the_default_of_every_field() -> None:
    async def ask() -> None:
        async with serving() as server:
            plain = await server.http.post(SPEECH, json={"input": "Some words."})
            document = (await server.http.get("/openapi.json")).json()["paths"][SPEECH]["post"]
            (content,) = document["requestBody"]["content"].values()
            fields = content["schema"]["properties"].keys() - {"input"}
            for name in fields:
                answer = await server.http.post(SPEECH, json={"input": "Some words.", name: None})
                assert (answer.status_code, answer.content) == (200, plain.content), name
                assert answer.headers["content-type"] == "audio/mpeg"
            batch = {"items": [{"input": "Some words.", "speed": None}], "response_format": None, "stream_format": None}
            results = (await server.http.post(f"{SPEECH}/batch", json=batch)).json()["results"]
            assert [result["media_type"] for result in results] == ["audio/mpeg"]
            # And the description lets a client that checks itself send it.
            for name in fields:
                assert "null" in json.dumps(content["schema"]["properties"][name]), name

    run(ask())


def test_without_a_key_the_voices_of_the_model_are_listed_and_no_others() -> None:
    """As Open WebUI asks, which shows `name` and sends `id`, and has no key here."""
    settings = dataclasses.replace(SETTINGS, api_keys=("hush",), admin_keys=("loud",))
    path, own = "/v1/audio/voices", [{"id": "low", "name": "low"}, {"id": "high", "name": "high"}]

    async def ask() -> None:
        async with serving(settings=settings) as server:
            for name, key in (("anna", "hush"), ("everybodys", "loud")):
                fields, files = {"name": name, "ref_text": "A tone."}, {"audio": ("a.wav", sound(), "audio/wav")}
                headers = {"authorization": f"Bearer {key}"}
                assert (await server.http.post(path, data=fields, files=files, headers=headers)).status_code == 201
            listed = (await server.http.get(path)).json()
            assert (listed["voices"], listed["uploaded_voices"]) == (own, [])
            with_key = (await server.http.get(path, headers={"authorization": "Bearer hush"})).json()
            uploaded = [{"id": "anna", "name": "anna"}, {"id": "everybodys", "name": "everybodys"}]
            assert with_key["voices"] == own + uploaded
            check_error(await server.http.get(path, headers={"authorization": "Bearer wrong"}), 401)
            check_error(await server.http.post(path, data={"name": "b"}, files={"audio": b""}), 401)
            check_error(await server.http.delete(f"{path}/everybodys"), 401)
            for voice in own:
                answer = await server.http.post(
                    SPEECH,
                    json={"input": "Some words.", "voice": voice["id"]},
                    headers={"authorization": "Bearer hush"},
                )
                assert answer.status_code == 200

    run(ask())


def test_the_reference_names_every_path_and_field_and_no_other_host() -> None:
    async def ask() -> None:
        async with serving(waits=False) as server:
            page = await server.http.get("/docs")
            assert page.status_code == 200
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "http://" not in page.text
            assert "https://" not in page.text
            for path, operations in (await server.http.get("/openapi.json")).json()["paths"].items():
                assert path in page.text
                for operation in operations.values():
                    for body in operation.get("requestBody", {}).get("content", {}).values():
                        assert all(f"<code>{field}</code>" in page.text for field in body["schema"]["properties"])

    run(ask())
