"""Requests that nobody would think of, made from the server's own description: no failure of it, and no silence."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from servers import SETTINGS, serving
from sine_engines import nothing_left, run

__all__ = ["nothing_left"]

# The folder of a test is made before that of its links, which must be empty at the end.
pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
)


@pytest.mark.parametrize("keys", [(), ("first-key",)])
def test_every_answer_is_one_that_the_description_names(keys: tuple[str, ...], tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, api_keys=keys)
    options = {
        "--checks": ",".join(CHECKS),
        "--max-examples": "25",
        "--seed": "7",
        "--request-timeout": "10",
        "--generation-database": "none",
    }
    arguments = [word for pair in options.items() for word in pair]
    header = ["--header", "Authorization: Bearer first-key"] if keys else []

    async def fuzz() -> None:
        async with serving(settings=settings) as server:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *arguments, *header),
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            printed, _ = await process.communicate()
            assert process.returncode == 0, printed.decode()[-8000:]
            paths = (await server.http.get("/openapi.json")).json()["paths"]
            count = sum(map(len, paths.values()))
            assert f"{count} selected / {count} total" in printed.decode()
            assert server.engine.replicas[0].restarts == 0
            assert await server.is_idle()
            answer = await server.http.post(
                "/v1/audio/speech", json={"input": "Some words."}, headers={"authorization": "Bearer first-key"}
            )
            assert answer.status_code == 200

    run(fuzz())


def test_the_description_stands_by_itself() -> None:
    """Every operation says what it takes and answers, refusals included, and refers to nothing elsewhere."""

    async def read() -> None:
        async with serving(waits=False) as server:
            document = (await server.http.get("/openapi.json")).json()
            assert "$ref" not in json.dumps([path.get("post") for path in document["paths"].values()])
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    assert operation["description"], path
                    answers = operation["responses"]
                    assert all(answer["content"] for answer in answers.values()), (path, method)
                    assert ({"401", "403"} <= set(answers)) == path.startswith("/v1"), path
                    if method == "post":
                        (body,) = operation["requestBody"]["content"].values()
                        assert body["schema"]["properties"]
            statuses = set(document["paths"]["/v1/audio/speech"]["post"]["responses"])
            assert statuses == {"200", "400", "401", "403", "404", "408", "413", "429", "503"}

    run(read())
