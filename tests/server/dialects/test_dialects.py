"""What holds for all dialects: how large they may be, who knows of them, and that each can be switched off."""

import dataclasses
import re
from pathlib import Path

import pytest

import sonoro
from engine_processes import launch_fleet, nothing_left, run
from server_processes import SETTINGS, serving
from sonoro.core.errors import ConfigError
from sonoro.server.app import create_app
from sonoro.server.dialects import DIALECTS

__all__ = ["nothing_left"]

PACKAGE = Path(sonoro.__file__).parent
FOLDER = PACKAGE / "server" / "dialects"
MOST_LINES = 1600


def test_the_folder_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.rglob("*.py")) <= MOST_LINES


def test_nobody_else_knows_a_dialect() -> None:
    """But for the line that registers them all, and the API of the server's own that is OpenAI's."""
    names = re.compile(r"eleven_?labs|cartesia|deepgram", re.IGNORECASE)
    outside = [path for path in PACKAGE.rglob("*.py") if FOLDER not in path.parents]
    assert [path.name for path in outside if names.search(path.read_text())] == []
    assert {path.name for path in outside if "server.dialects" in path.read_text()} <= {"app.py", "cli_serve.py"}


@pytest.mark.usefixtures("nothing_left")
def test_each_can_be_switched_off() -> None:
    settings = dataclasses.replace(SETTINGS, dialects_off=("cartesia",))

    async def ask() -> None:
        async with serving(settings=settings) as server:
            assert (await server.http.post("/tts/bytes", json={"transcript": "Hm."})).status_code == 404
            assert (await server.http.post("/v1/speak", json={"text": "Hm."})).status_code == 200

    run(ask())


def test_one_that_is_not_there_cannot_be() -> None:
    with pytest.raises(ConfigError, match="klingon"):
        create_app(launch_fleet(count=1), dataclasses.replace(SETTINGS, dialects_off=("klingon",)))
    assert {"elevenlabs", "cartesia", "deepgram"} <= set(DIALECTS)
