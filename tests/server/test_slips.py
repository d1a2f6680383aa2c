"""What a newcomer gets wrong in requests: each slip is answered with what to do."""

import asyncio

import pytest
from servers import serving
from sine_engines import nothing_left

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_slips_in_requests_are_answered_with_what_to_do() -> None:
    async def main() -> None:
        async with serving() as server:
            speech = "/v1/audio/speech"
            for answer, wanted in (
                (await server.http.get(speech), "use POST"),
                (await server.http.get("/v1/say"), "/docs lists what is here"),
                (await server.http.post(speech, json={}), "input: nothing was given"),
                (await server.http.post(speech, json={"text": "Hi"}), "did you mean input in place of text?"),
                (await server.http.post(speech, content=b"Hi"), "JSON"),
                (await server.http.post(speech, json={"input": ""}), "give at least one"),
                (
                    await server.http.post(speech, json={"input": "Hi " * 2000}),
                    "6000 characters; it must have at most 4096",
                ),
                (await server.http.post(speech, json={"input": "Hi", "voice": "bob"}), "known voices: "),
                (await server.http.post(speech, json={"input": "Hi", "model": "x"}), "known models: "),
                (await server.http.post(speech, json={"input": "Hi", "response_format": "m4a"}), "mp3"),
            ):
                assert answer.status_code in (400, 404, 405), answer.text
                assert wanted in answer.json()["error"]["message"]

    asyncio.run(main())


def test_fields_that_nothing_knows_are_named_in_a_header() -> None:
    """Clients of other servers send fields of those: they are heard, and told."""

    async def main() -> None:
        async with serving() as server:
            plain = await server.speak(stream_format="audio", response_format="pcm", strength=20)
            assert "x-sonoro-ignored" not in plain.headers
            answer = await server.speak(voise="low", emotion="sad", **{"schön": 1, "x" * 200: None})
            assert answer.status_code == 200
            assert answer.headers["x-sonoro-ignored"] == "emotion, sch%C3%B6n, voise"

    asyncio.run(main())
