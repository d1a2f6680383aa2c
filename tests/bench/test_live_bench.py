"""Live text against a scripted websocket server whose delays are known.

Times are at least those scripted; how much more depends on the machine.
"""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from processes import GUARD_S
from servers import RATE, Answer, served, tone
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from sonoro.bench.client import Target
from sonoro.bench.live_bench import LiveBench, run
from sonoro.core.errors import ConfigError, EngineError


@dataclass
class Script:
    """What sessions sent, and how they are answered: audio 50 ms after the first piece of text, a cancel after 30 ms.

    A text that comes as one piece has no end before it is cancelled, unless `is_over_early`.
    """

    answer_to_config: dict[str, Any] = field(default_factory=lambda: {"type": "session.configured"})
    answer_to_cancel: dict[str, Any] = field(default_factory=lambda: {"type": "response.cancelled", "samples_sent": 1})
    starts: bool = True
    is_over_early: bool = False
    wholes: list[str] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    configs: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    async def whole(self, request: Request) -> Response:
        """The speech endpoint: first audio after 20 ms."""

        async def parts() -> AsyncIterator[bytes]:
            await asyncio.sleep(0.02)
            yield tone(0.5)

        self.wholes.append((await request.json())["input"])
        return StreamingResponse(parts(), headers={"X-Sample-Rate": str(RATE)}, media_type="audio/pcm")

    async def session(self, socket: WebSocket) -> None:
        await socket.accept()
        self.headers.append(socket.headers.get("authorization", ""))
        words: list[str] = []
        self.texts.append(words)
        await socket.send_json({"type": "session.created"})
        with contextlib.suppress(WebSocketDisconnect):
            while (event := await socket.receive_json())["type"] != "session.close":
                await self.answer(socket, event, words)
            await socket.send_json({"type": "session.done"})
            await socket.close()

    async def answer(self, socket: WebSocket, event: dict[str, Any], words: list[str]) -> None:
        match event.pop("type"):
            case "session.config":
                self.configs.append(event)
                await socket.send_json(self.answer_to_config)
            case "input.text":
                words.append(event["text"])
                if len(words) == 1:
                    await asyncio.sleep(0.05)
                    if self.starts:
                        await socket.send_json({"type": "audio.start", "sample_rate": RATE})
                    await socket.send_bytes(tone(0.3))
            case "input.done" if len(words) > 1 or self.is_over_early:
                await socket.send_bytes(tone(0.2))
                await socket.send_json({"type": "audio.done", "finish_reason": "stop"})
            case "response.cancel":
                await asyncio.sleep(0.03)
                await socket.send_bytes(tone(0.1))
                await socket.send_json(self.answer_to_cancel)


@contextlib.contextmanager
def speaking(script: Script) -> Iterator[Target]:
    """`script` on a free port."""
    routes = [
        Route("/v1/audio/speech", script.whole, methods=["POST"]),
        WebSocketRoute("/v1/audio/speech/stream", script.session),
    ]
    config = uvicorn.Config(Starlette(routes=routes), loop="asyncio", ws="websockets-sansio", log_config=None)
    server, sock = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield Target(f"http://127.0.0.1:{sock.getsockname()[1]}", "spoken", timeout_s=GUARD_S, api_key="secret")
    finally:
        server.should_exit = True
        thread.join(GUARD_S)
        sock.close()
        assert not thread.is_alive()


def bench(target: Target, **fields: Any) -> LiveBench:
    return LiveBench(target, **{"requests": 3, "barge_ins": 2, "warm_up": 1, **fields})


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_first_packets_and_cancels_have_the_delays_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    with speaking(script) as target:
        began_s = time.perf_counter()
        values = run(bench(target, out=Path("r.json"), facts={"arm": "graph"}))
        took_ms = 1000 * (time.perf_counter() - began_s)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(Path("r.json").read_text()) == values
    assert (values["bench"], values["model"], values["arm"]) == ("live", "spoken", "graph")
    whole, live, barge_in = values["rows"]
    assert [row["mode"] for row in values["rows"]] == ["whole text", "live text", "barge-in"]
    assert [(row["requests"], row["succeeded"], row["failed"]) for row in values["rows"]] == [(3, 3, 0)] * 2 + [
        (2, 2, 0)
    ]
    assert 20 <= whole["ttfp_p50_ms"] < took_ms
    assert 50 <= live["ttfp_p50_ms"] < took_ms
    assert whole["audio_s_p50"] == live["audio_s_p50"] == 0.5
    for part in ("p50", "p95"):
        added_ms = live[f"ttfp_{part}_ms"] - whole[f"ttfp_{part}_ms"]
        assert values["added_ttfp_ms"][part] == pytest.approx(added_ms, abs=0.1)
    for name in ("answered", "last_audio"):
        assert 30 <= barge_in[f"{name}_p50_ms"] < took_ms
    assert set(script.headers) == {"Bearer secret"}
    assert "secret" not in Path("r.json").read_text()


def test_text_is_sent_word_by_word_and_is_the_whole_text() -> None:
    script = Script()
    with speaking(script) as target:
        run(bench(target, frames=(5, 9), word_ms=1.0, warm_up=0))
    live, cancelled = script.texts[:3], script.texts[3:]
    assert ["".join(words) for words in live] == script.wholes
    assert all(word.endswith(" ") and word.count(" ") == 1 for words in live for word in words[:-1])
    assert all(" " not in words[-1] for words in live)
    assert [len(words) for words in cancelled] == [1, 1]
    assert all(len(words[0]) > 100 for words in cancelled)
    spoken, longer = script.configs[:3], script.configs[3:]
    assert spoken[0] | {"max_new_tokens": 0} == {
        **{"model": "spoken", "voice": "alloy", "response_format": "pcm"},
        **{"max_new_tokens": 0, "ignore_eos": True},
    }
    assert all(5 <= config["max_new_tokens"] <= 9 for config in spoken)
    assert all(8 * 5 <= config["max_new_tokens"] <= 8 * 9 for config in longer)


@pytest.mark.parametrize(
    ("script", "rows"),
    [
        (
            Script(answer_to_config={"type": "error", "error": {"code": "invalid_request"}}),
            {"live text": "error invalid_request", "barge-in": "error invalid_request"},
        ),
        (Script(answer_to_config={"type": "session.created"}), {"live text": "timeout", "barge-in": "timeout"}),
        (Script(starts=False), {"live text": "audio before audio.start"}),
        (Script(answer_to_cancel={"type": "error"}), {"barge-in": "KeyError"}),
        (
            Script(answer_to_cancel={"type": "audio.done", "finish_reason": "stop"}),
            {"barge-in": "over before it was cancelled"},
        ),
        (Script(is_over_early=True), {"barge-in": "over before it was cancelled"}),
    ],
)
def test_what_fails_is_counted_by_its_cause(script: Script, rows: dict[str, str]) -> None:
    timeout_s = 0.5 if "timeout" in rows.values() else GUARD_S
    with speaking(script) as target, pytest.raises(EngineError, match=f"every request failed: {', '.join(rows)}"):
        run(bench(dataclasses.replace(target, timeout_s=timeout_s), requests=1, warm_up=0, out=Path("r.json")))
    made = {row["mode"]: row.get("errors") for row in json.loads(Path("r.json").read_text())["rows"]}
    assert {mode: list(errors) for mode, errors in made.items() if errors} == {
        mode: [cause] for mode, cause in rows.items()
    }


def test_an_answer_to_the_cancel_may_be_the_end_of_the_audio() -> None:
    with speaking(Script(answer_to_cancel={"type": "audio.done", "finish_reason": "cancelled"})) as target:
        assert run(bench(target))["rows"][2]["succeeded"] == 2


def test_a_server_without_live_text_fails_with_what_it_answered() -> None:
    with served(Answer([(0.0, tone(0.2))])) as server:
        target = Target(server.url, model="m", timeout_s=GUARD_S)
        with pytest.raises(EngineError, match="every request failed: live text"):
            run(bench(target, requests=1, barge_ins=0, warm_up=0, out=Path("r.json")))
    assert json.loads(Path("r.json").read_text())["rows"][0]["succeeded"] == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"requests": 0}, "requests: 0 .* at least 1"),
        ({"barge_ins": -1}, "barge_ins"),
        ({"warm_up": -1}, "warm_up"),
        ({"word_ms": float("inf")}, "word_ms"),
        ({"frames": (9, 3)}, "frames: .* ascend"),
        ({"facts": {"weather": "fine"}}, "facts: 'weather'"),
    ],
)
def test_bad_settings_are_refused_by_name(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LiveBench(Target("http://localhost"), **fields)
