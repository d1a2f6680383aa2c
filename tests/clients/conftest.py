"""One server for the tests of unmodified clients: `sonoro serve` with the built-in voice, as anybody starts it.

Runs without torch and without sonoro: the server has an environment of its own, which SONORO names if it is not .venv.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from recorder import Recorder
from websockets.sync.client import connect

ROOT = Path(__file__).parents[2]
GUARD_S = 60
KEY = "a-key-of-this-server"
RATE = 24000

TEXT = "Good morning, everyone."
LONG = "The stale smell of old beer lingers, and it takes heat to bring out the odor. " * 12
"""A minute of speech: enough that a client that stops listening stops before it has been made."""


@dataclasses.dataclass(frozen=True)
class Server:
    """Where a client reaches the server, as `http://HOST:PORT`, and the port of its Wyoming; `own_url` is for the tests
    themselves, of which nothing is recorded."""

    url: str
    wyoming_port: int
    own_url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    def get(self, path: str, **headers: str) -> bytes:
        request = urllib.request.Request(self.own_url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
            return answer.read()

    def whole(self, text: str, **fields: str) -> np.ndarray:
        """What our own API says of a text, as PCM [samples] int16 at 24 kHz."""
        body = json.dumps({"input": text, "response_format": "pcm", **fields}).encode()
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self.own_url}/v1/audio/speech", body, headers)
        with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
            return np.frombuffer(answer.read(), np.int16)

    def live(self, text: str, **fields: str) -> np.ndarray:
        """As `whole`, of a text that is sent in pieces on one of our own sessions."""
        pcm = b""
        headers = {"authorization": f"Bearer {KEY}"}
        with connect(
            f"{self.own_url.replace('http', 'ws', 1)}/v1/audio/speech/stream", additional_headers=headers, proxy=None
        ) as socket:
            messages = [
                {"type": "session.config", **fields},
                {"type": "input.text", "text": text},
                {"type": "input.done"},
            ]
            for message in messages:
                socket.send(json.dumps(message))
            while isinstance(heard := socket.recv(GUARD_S), bytes) or json.loads(heard)["type"] != "audio.done":
                pcm += heard if isinstance(heard, bytes) else b""
        return np.frombuffer(pcm, np.int16)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all of its label sets that have `labels`."""
        total = 0.0
        for found in re.finditer(rf"^{name}(?:\{{(.*)\}})? (\S+)$", self.get("/metrics").decode(), re.MULTILINE):
            has = dict(re.findall(r'(\w+)="([^"]*)"', found[1] or ""))
            if labels.items() <= has.items():
                total += float(found[2])
        return total

    @property
    def is_idle(self) -> bool:
        """Whether nobody is spoken to and every slot is free."""
        held = ("sonoro_requests_in_flight", "sonoro_engine_running", "sonoro_queue_depth")
        return not any(self.metric(name) for name in held)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="folder for what clients and server say, in a file for each client")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that all tests ask, as it is."""
    command = os.environ.get("SONORO", str(ROOT / ".venv" / "bin" / "sonoro")).split()
    port = _free_port()
    options = ("--port", "0", "--wyoming", str(port), "--api-key", KEY, "--slots", "4", "--device", "cpu")
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    with (
        log.open("wb") as errors,
        subprocess.Popen([*command, "serve", *options], stdout=subprocess.PIPE, stderr=errors, env=environment) as made,
    ):
        try:
            assert made.stdout is not None
            listening = re.search(r"http://\S+", made.stdout.readline().decode())
            assert listening, log.read_text()
            server = Server(listening[0], port, listening[0])
            until(lambda: _is_ready(server))
            yield server
        finally:
            made.terminate()
            made.wait(GUARD_S)
            # Whoever reads that a test failed wants to know what the server saw of it.
            print(log.read_text()[-20_000:])


@pytest.fixture(scope="session")
def recorder(shared: Server, pytestconfig: pytest.Config) -> Iterator[tuple[Server, Recorder | None]]:
    """The server as clients reach it: through a recorder, with `--record`."""
    if (folder := pytestconfig.getoption("record")) is None:
        yield shared, None
        return
    made = Recorder(shared.url, shared.wyoming_port, folder)
    with made.running() as (url, wyoming_port):
        yield Server(url, wyoming_port, shared.url), made


@pytest.fixture
def server(
    shared: Server, recorder: tuple[Server, Recorder | None], request: pytest.FixtureRequest
) -> Iterator[Server]:
    """The server; afterwards nobody holds a slot of it, and nothing of the test was an error of its own."""
    failed = shared.metric("sonoro_requests_total", reason="internal")
    reached, recording = recorder
    if recording is not None:
        recording.client, recording.test = _client_of(request.node), request.node.name
    yield reached
    until(lambda: shared.is_idle)
    assert shared.metric("sonoro_requests_total", reason="internal") == failed
    assert shared.metric("sonoro_engine_restarts_total") == 0


class Native:
    """What our own API says of texts, each asked for once: `whole` at once, `live` in pieces."""

    def __init__(self, server: Server) -> None:
        self.whole, self.live = cache(server.whole), cache(server.live)


@pytest.fixture(scope="session")
def native(shared: Server) -> Native:
    return Native(shared)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` comes to; a test that hangs fails."""
    return asyncio.run(asyncio.wait_for(work, GUARD_S))


def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    end_s = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < end_s, "it never came to be"
        time.sleep(0.05)


def is_same(pcm: bytes, expected: np.ndarray) -> bool:
    """Whether PCM16 at 24 kHz is what our own API says. Chunk lengths follow the clock, so that roundings differ."""
    samples = np.frombuffer(pcm, np.int16).astype(int)
    return len(samples) == len(expected) and int(np.abs(samples - expected).max()) <= 8


def pause_of(pcm: bytes) -> int:
    """The samples of the longest silence in PCM16, below -60 dB."""
    audible = np.flatnonzero(np.abs(np.frombuffer(pcm, np.int16).astype(int)) > 32)
    return int(np.diff(audible).max()) - 1


def sounds_like(audio: bytes, expected: np.ndarray) -> bool:
    """Whether an audio file (mp3, wav, ...) is as long and as loud as what our own API says."""
    samples, rate = soundfile.read(io.BytesIO(audio))
    seconds, loudness = len(samples) / rate, float(np.sqrt(np.mean(samples**2)))
    expected_loudness = float(np.sqrt(np.mean((expected / 32768) ** 2)))
    return abs(seconds - len(expected) / RATE) < 0.15 and 0.8 < loudness / expected_loudness < 1.25


def _client_of(test: pytest.Item) -> str:
    """The package that a test is of, and its version."""
    module = test.path.stem.removeprefix("test_")
    if "npm" in test.name:
        return f"openai-npm {json.loads((ROOT / 'tests/clients/package.json').read_text())['dependencies']['openai']}"
    vendor = test.callspec.params["name"] if hasattr(test, "callspec") else "openai"
    names = {"deepgram": "deepgram-sdk", "pipecat": "pipecat-ai", "livekit": f"livekit-plugins-{vendor}"}
    name = names.get(module, module)
    return f"{name} {importlib.metadata.version(name)}"


def _is_ready(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return b"ready" in server.get("/ready")
    return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
