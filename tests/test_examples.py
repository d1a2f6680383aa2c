"""What the README and the examples tell people to run does run, as printed but for the address of the server."""

import ast
import asyncio
import base64
import dataclasses
import json
import os
import re
import runpy
import sys
import wave
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
from processes import GUARD_S
from servers import SETTINGS, Server, serving
from sine_engines import alone, nothing_left, run, until
from websockets.asyncio.client import connect

from sonoro.core.config import EngineConfig
from sonoro.core.types import SpeechRequest
from sonoro.transport.fleet import Fleet
from sonoro.transport.messages import WorkerSettings

__all__ = ["nothing_left"]

ROOT = Path(__file__).parents[1]
TEXT = "The birch canoe slid on the smooth planks. "
STOPPED = "the turn is over"


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
    pages = "README.md", "docs/live.md", "docs/clients.md", "docs/markup.md"
    commands = [command for page in pages for command in curls(ROOT / page)]
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
        builtin = Fleet(WorkerSettings(config=EngineConfig(slots=1)), ("cpu",))
        async with serving(engine=builtin) as server:
            await follow(server)

    run(serve())
    assert soundfile.info(tmp_path / "morning.mp3").duration > 0.5
    with wave.open(str(tmp_path / "live.wav")) as file:
        assert file.getframerate() == 24000
        assert file.getnframes() > 24000


class Frames:
    """What the agent asks of Pipecat's service, which collects what it is given."""

    def __init__(self, settings: SimpleNamespace, **_: object) -> None:
        self._settings, self.sample_rate = settings, 24000
        self.frames: list[object] = []
        self.tasks: list[asyncio.Task[None]] = []

    def create_task(self, work: Coroutine[object, object, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    def audio_context_available(self, context_id: str) -> bool:
        return True

    async def append_to_audio_context(self, context_id: str, frame: object) -> None:
        self.frames.append(frame)

    async def remove_audio_context(self, context_id: str) -> None:
        pass

    async def push_error(self, error_msg: str) -> None:
        self.frames.append(error_msg)

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        pass


def agent(monkeypatch: pytest.MonkeyPatch) -> type[Frames]:
    """The agent's service over `Frames`; a frame is what it holds."""

    frames = SimpleNamespace(
        Frame=object,
        ErrorFrame=lambda error: error,
        TTSAudioRawFrame=lambda audio, rate, channels, context_id: audio,
        TTSStoppedFrame=lambda context_id: STOPPED,
    )
    modes = SimpleNamespace(TOKEN="token")
    modules = {
        "pipecat.frames.frames": frames,
        "pipecat.services.settings": SimpleNamespace(TTSSettings=SimpleNamespace),
        "pipecat.services.tts_service": SimpleNamespace(TextAggregationMode=modes, TTSService=Frames),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return runpy.run_path(str(ROOT / "examples" / "agent_pipecat.py"))["SonoroTTS"]


def test_an_agent_speaks_its_turns_and_tells_of_every_failure(
    monkeypatch: pytest.MonkeyPatch, nothing_left: Path
) -> None:
    async def turn(service: Frames, name: str, *pieces: str) -> list[object]:
        return [frame for piece in pieces async for frame in service.run_tts(piece, name) if frame is not None]

    async def follow() -> None:
        make, settings = agent(monkeypatch), dataclasses.replace(SETTINGS, api_keys=("hush",))
        async with serving("slow_live", settings) as server:
            (refused,) = await turn(make(server.url), "refused", "Hello.")
            assert "401" in refused
            service = make(server.url, api_key="hush")
            assert await turn(service, "one", "Some ", "words.") == []
            await service.flush_audio("one")
            await asyncio.gather(*service.tasks)
            assert service.frames.pop() == STOPPED
            expected = len(alone(SpeechRequest(id="a", text="Some words."))) * 24000 // 8000
            assert abs(len(b"".join(service.frames)) - expected) < 0.01 * expected
            service = make(server.url, api_key="hush")
            await turn(service, "two", TEXT * 5)
            await until(lambda: service.frames)
            (connection,) = service._turns.values()
            connection.transport.abort()
            await asyncio.gather(*service.tasks)
            assert "gone" in service.frames[-2]
            assert service.frames[-1] == STOPPED
            await until(server.is_idle)

    run(follow())


def test_an_agent_says_only_what_a_session_understands() -> None:
    tree = ast.parse((ROOT / "examples" / "agent_pipecat.py").read_text(encoding="utf-8"))
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    kinds = {word for word in said if re.fullmatch(r"(session|input|response)\.\w+", word)}
    table = re.findall(r"^- `(\w+\.\w+)`:", (ROOT / "docs" / "live.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert kinds
    assert kinds <= set(table)


def test_a_call_is_greeted_and_interrupted_by_a_key(nothing_left: Path) -> None:
    """What Twilio sends, in its order; it is told to drop what it has not played before anything else is said."""

    async def call(server: Server) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, ROOT / "examples" / "twilio_call.py", server.url, "0"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "SONORO_API_KEY": "hush"},
        )
        try:
            port = int((await process.stdout.readline()).split()[-1])
            async with connect(f"ws://127.0.0.1:{port}/", proxy=None) as phone:

                async def say(event: str, **fields: object) -> None:
                    await phone.send(json.dumps({"event": event, **fields}))

                async def hear(last: str) -> list[dict[str, Any]]:
                    heard: list[dict[str, Any]] = []
                    while not heard or heard[-1]["event"] != last:
                        heard.append(json.loads(await asyncio.wait_for(phone.recv(), GUARD_S)))
                        assert heard[-1]["streamSid"] == "MZ1"
                    return heard

                await say("connected", protocol="Call", version="1.0.0")
                await say("start", streamSid="MZ1", start={"streamSid": "MZ1", "callSid": "CA1"})
                heard = await hear("media")
                await say("dtmf", streamSid="MZ1", dtmf={"track": "inbound_track", "digit": "7"})
                assert "mark" not in {event["event"] for event in (*heard, *await hear("clear"))}
                media = await hear("mark")
                assert {event["event"] for event in media[:-1]} == {"media"}
                assert b"".join(base64.b64decode(event["media"]["payload"]) for event in media[:-1])
                await say("stop", streamSid="MZ1", stop={"callSid": "CA1"})
            await until(server.is_idle)
        finally:
            process.terminate()
            await process.wait()

    async def follow() -> None:
        async with serving("slow_live", dataclasses.replace(SETTINGS, api_keys=("hush",))) as server:
            await call(server)

    run(follow())
