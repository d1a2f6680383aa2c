"""What the README and the examples tell people to run does run, as printed but for the address of the server."""

import ast
import asyncio
import re
import sys
import wave
from pathlib import Path

import soundfile

from engine_processes import nothing_left, run
from server_processes import Server, serving
from sonoro.core.config import EngineConfig
from sonoro.transport.client import EngineClient

__all__ = ["nothing_left"]

ROOT = Path(__file__).parents[1]
TEXT = "The birch canoe slid on the smooth planks. "


def curls(path: Path) -> list[str]:
    """The curl commands in the shell blocks of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines() if line.startswith("curl")]


async def execute(*command: object, folder: Path, pieces: tuple[str, ...] = ()) -> str:
    """What a command prints, whose input comes in pieces."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=folder,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    for piece in pieces:
        process.stdin.write(piece.encode())
        await process.stdin.drain()
        await asyncio.sleep(0.02)
    printed, _ = await process.communicate(b"")  # which closes its input
    assert process.returncode == 0, printed.decode()
    return printed.decode()


def test_what_is_printed_runs_against_the_built_in_voice(tmp_path: Path, nothing_left: Path) -> None:
    commands = [command for page in ("README.md", "docs/live.md") for command in curls(ROOT / page)]
    assert commands

    async def follow(server: Server) -> None:
        for command in commands:
            assert "localhost:8000" in command
            there = command.replace("localhost:8000", server.url.removeprefix("http://"))
            await execute("sh", "-ec", there, folder=tmp_path)
        printed = await execute(
            *(sys.executable, ROOT / "examples" / "live_text.py", server.url, "live.wav"),
            folder=tmp_path,
            pieces=(*TEXT.split(), TEXT),
        )
        assert [line.split("'")[3] for line in printed.splitlines()] == [
            *("session.created", "session.configured", "audio.start", "audio.done", "session.done")
        ]

    async def serve() -> None:
        builtin = EngineClient.launch(device="cpu", config=EngineConfig(slots=1))
        async with serving(engine=builtin) as server:
            await follow(server)

    run(serve())
    assert soundfile.info(tmp_path / "morning.mp3").duration > 0.5
    with wave.open(str(tmp_path / "live.wav")) as file:
        assert file.getframerate() == 24000
        assert file.getnframes() > 24000


def test_an_agent_says_only_what_a_session_understands() -> None:
    tree = ast.parse((ROOT / "examples" / "agent_pipecat.py").read_text(encoding="utf-8"))
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    kinds = {word for word in said if re.fullmatch(r"(session|input|response)\.\w+", word)}
    table = re.findall(r"^\| `(\w+\.\w+)` \|", (ROOT / "docs" / "live.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert kinds
    assert kinds <= set(table)
