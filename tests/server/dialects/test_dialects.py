"""What holds for all dialects: how large they may be, who knows of them, and that each can be switched off."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from servers import SETTINGS, serving
from sine_engines import launch_fleet, nothing_left, run

import sonoro
from sonoro.core.errors import ConfigError
from sonoro.core.types import Markup
from sonoro.server.app import create_app
from sonoro.server.dialects import DIALECTS

__all__ = ["nothing_left"]

PACKAGE = Path(sonoro.__file__).parent
FOLDER = PACKAGE / "server" / "dialects"
SYNTAXES = PACKAGE / "text" / "script"
MOST_LINES = 1920
TEXT = "Some words, which are spoken."


def test_the_folder_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.rglob("*.py")) <= MOST_LINES


def test_nobody_else_knows_a_dialect() -> None:
    """But for the line that registers them all, and the API of the server's own that is OpenAI's. A syntax of text may
    be named after the service that it is from: in the folder of their readers, and as a value of `markup`."""
    names = re.compile(r"eleven_?labs|cartesia|deepgram", re.IGNORECASE)
    syntaxes = re.compile("|".join(f'"{name}"' for name in get_args(Markup)))
    outside = [path for path in PACKAGE.rglob("*.py") if FOLDER not in path.parents]
    others = [path for path in outside if SYNTAXES not in path.parents]
    assert [path.name for path in others if names.search(syntaxes.sub("", path.read_text()))] == []
    assert {path.name for path in outside if "server.dialects" in path.read_text()} <= {"app.py", "serve.py"}


@pytest.mark.usefixtures("nothing_left")
def test_each_can_be_switched_off() -> None:
    settings = dataclasses.replace(SETTINGS, dialects_off=("cartesia",))

    async def ask() -> None:
        async with serving(settings=settings) as server:
            assert (await server.http.post("/tts/bytes", json={"transcript": "Hm."})).status_code == 404
            assert (await server.http.post("/v1/speak", json={"text": "Hm."})).status_code == 200

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_a_bit_rate_is_honoured_and_one_that_cannot_be_is_refused() -> None:
    """The same text as mp3 of 32 and of 128 kbit/s, and of 1 Mbit/s; frames of both are as many."""

    def asked(bits: int) -> list[tuple[str, dict[str, Any]]]:
        mp3 = {"container": "mp3", "sample_rate": 44100, "bit_rate": bits}
        return [
            ("/v1/audio/speech", {"input": TEXT, "sample_rate": 44100, "bit_rate": bits}),
            (f"/v1/text-to-speech/any?output_format=mp3_44100_{bits // 1000}", {"text": TEXT}),
            ("/tts/bytes", {"transcript": TEXT, "output_format": mp3}),
            (f"/v1/speak?encoding=mp3&sample_rate=44100&bit_rate={bits}", {"text": TEXT}),
        ]

    async def ask() -> None:
        async with serving() as server:
            for less, more, wrong in zip(*map(asked, (32_000, 128_000, 1_000_000)), strict=True):
                sizes = [len((await server.http.post(path, json=body)).content) for path, body in (less, more)]
                assert 3.9 < sizes[1] / sizes[0] < 4.1, less
                refused = await server.http.post(wrong[0], json=wrong[1])
                assert refused.status_code == 400
                assert "bit_rate" in refused.text

    run(ask())


def test_one_that_is_not_there_cannot_be() -> None:
    with pytest.raises(ConfigError, match="klingon"):
        create_app(launch_fleet(count=1), dataclasses.replace(SETTINGS, dialects_off=("klingon",)))
    assert {"elevenlabs", "cartesia", "deepgram"} <= set(DIALECTS)
