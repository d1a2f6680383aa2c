"""Live text over the WebSocket against the same text whole, and barge-in: `sonoro bench live`.

One request at a time. docs/live.md defines the messages, docs/benchmark.md the metrics."""

import asyncio
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from sonoro.bench.client import SpeechClient, Target
from sonoro.bench.dataset import Prompt, prompts
from sonoro.bench.level import Ask, asks
from sonoro.bench.load import LoadBench, facts_of_server
from sonoro.bench.metrics import Exchange, spread
from sonoro.bench.report import Report
from sonoro.core.errors import ConfigError, EngineError

_STREAM = "/audio/speech/stream"
_AUDIO = "audio"
_Part = Callable[[ClientConnection], Awaitable[None]]

_BARGE_IN_TEXTS = 8
"""Texts joined for a request that is cancelled, so that it is not over before."""


@dataclass(frozen=True)
class LiveBench(LoadBench):
    """The options of `sonoro bench live`. Texts are sent whole over HTTP and live, in turn; then longer ones are
    cancelled at their first audio. Raises `ConfigError`."""

    requests: int = 50
    barge_ins: int = 20
    warm_up: int = 3
    word_ms: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("requests", 1), ("barge_ins", 0), ("warm_up", 0)):
            value = getattr(self, name)
            ConfigError.unless(value >= least, name, value, f"it must be at least {least}")
        ConfigError.unless(0 <= self.word_ms < math.inf, "word_ms", self.word_ms, "it must be at least 0")


class _Refused(Exception):
    """The server sent an error event."""


@dataclass
class _BargeIn:
    """Times from sending `response.cancel` to its confirmation, and to the last audio (0 if none followed)."""

    answered_ms: float = 0.0
    last_audio_ms: float = 0.0
    error: str | None = None


def run(bench: LiveBench) -> dict[str, Any]:
    """Measure, print the results, and return the contents of the results file.
    Raises `EngineError` if the server cannot be reached, or, at the end, if no request of a kind succeeded."""
    texts = tuple(Prompt(prompt.text) for prompt in prompts(bench.dataset))
    return asyncio.run(_run(bench, texts))


async def _run(bench: LiveBench, texts: tuple[Prompt, ...]) -> dict[str, Any]:
    async with SpeechClient(bench.target) as http:
        listed = await http.listed() if bench.target.model is None else {"id": bench.target.model}
        top = {"bench": "live", "model": listed["id"], **facts_of_server(bench.target, listed, bench.facts)}
        report = Report(top, settings=bench.settings, commit=bench.commit, out=bench.out)
        whole, live = await _in_turns(bench, http, listed["id"], texts)
    for row in (rows := [_row("whole", whole), _row("live", live)]):
        report.add(row)
    report.note("added_ttfp_ms", _added(*rows))
    if bench.barge_ins:
        answers = [await _barge_in(bench.target, body) for body in _long(bench, texts, listed["id"])]
        report.add(_barge_in_row(answers[bench.warm_up :]))
    values = report.finish(f"{top['model']} at {bench.target.url}")
    if missing := [row["mode"] for row in values["rows"] if not row["succeeded"]]:
        raise EngineError(f"every request failed: {', '.join(missing)}")
    return values


async def _in_turns(
    bench: LiveBench, http: SpeechClient, model: str, texts: tuple[Prompt, ...]
) -> tuple[list[Exchange], list[Exchange]]:
    """Speak the same texts whole and live, in turn."""
    whole, live = [], []
    drawn = asks(texts, bench.frames, f"{bench.seed}/live")
    for number, ask in enumerate(islice(drawn, bench.warm_up + bench.requests)):
        body = ask.body(model, bench.target)
        # The order alternates, as the second of a pair may profit from the first.
        for is_live in (number % 2 == 0, number % 2 == 1):
            if is_live:
                live.append(await _speak_live(bench, body))
            else:
                whole.append(await http.speak(body, time.perf_counter()))
    return whole[bench.warm_up :], live[bench.warm_up :]


def _added(whole: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, float | None]:
    """Additional TTFP of live text, in ms."""
    pairs = {part: (live[f"ttfp_{part}_ms"], whole[f"ttfp_{part}_ms"]) for part in ("p50", "p95")}
    return {part: None if None in pair else pair[0] - pair[1] for part, pair in pairs.items()}


def _long(bench: LiveBench, texts: tuple[Prompt, ...], model: str) -> Iterator[dict[str, Any]]:
    """Yield the bodies of the requests to be cancelled."""
    drawn = asks(texts, bench.frames, f"{bench.seed}/barge-in")
    for _ in range(bench.barge_ins + bench.warm_up):
        parts = list(islice(drawn, _BARGE_IN_TEXTS))
        frames = sum(part.frames for part in parts if part.frames is not None)
        text = " ".join(part.prompt.text for part in parts)
        yield Ask(Prompt(text), frames or None).body(model, bench.target)


@contextlib.asynccontextmanager
async def _session(target: Target, body: Mapping[str, Any]) -> AsyncIterator[ClientConnection]:
    """A context with a session configured by the fields of `body`, except its text."""
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    url = "ws" + target.api.removeprefix("http") + _STREAM
    # Without compression and proxy, which must not be measured.
    async with connect(url, additional_headers=headers, compression=None, proxy=None, max_size=None) as socket:
        await _send(socket, "session.config", **{name: value for name, value in body.items() if name != "input"})
        while (await _receive(socket))["type"] != "session.configured":
            pass
        yield socket


async def _send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def _receive(socket: ClientConnection) -> dict[str, Any]:
    """The next event; binary audio has the type "audio". Raises `_Refused` for an error event."""
    message = await socket.recv()
    if isinstance(message, bytes):
        return {"type": _AUDIO, "data": message}
    event = json.loads(message)
    if event["type"] == "error":
        raise _Refused(f"error {event['error']['code']}")
    return dict(event)


async def _in_session(target: Target, body: Mapping[str, Any], feed: _Part, listen: _Part) -> str | None:
    """Run `feed` and `listen` in a session of their own, until `listen` returns; returns the error, if any."""
    try:
        async with asyncio.timeout(target.timeout_s), _session(target, body) as socket:
            feeding = asyncio.ensure_future(feed(socket))
            try:
                await listen(socket)
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
    except TimeoutError:
        return "timeout"
    except _Refused as error:
        return str(error)
    except (OSError, WebSocketException, ValueError, LookupError, TypeError) as error:
        return type(error).__name__
    return None


async def _speak_live(bench: LiveBench, body: Mapping[str, Any]) -> Exchange:
    """Send a text word by word and receive its audio; time zero is the first word, in an open session."""
    exchange, words = Exchange(time.perf_counter()), body["input"].split(" ")

    async def feed(socket: ClientConnection) -> None:
        exchange.sent_s = time.perf_counter()
        for number, word in enumerate(words):
            due_s = exchange.sent_s + number * bench.word_ms / 1000
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            await _send(socket, "input.text", text=word if number == len(words) - 1 else word + " ")
        await _send(socket, "input.done")

    async def listen(socket: ClientConnection) -> None:
        while (event := await _receive(socket))["type"] != "audio.done":
            if event["type"] == "audio.start":
                exchange.sample_rate = int(event["sample_rate"])
            elif event["type"] == _AUDIO:
                if not exchange.sample_rate:
                    raise _Refused("audio before audio.start")
                exchange.take(event["data"], time.perf_counter())

    exchange.error = await _in_session(bench.target, body, feed, listen)
    exchange.end(time.perf_counter())
    return exchange


async def _barge_in(target: Target, body: Mapping[str, Any]) -> _BargeIn:
    """Cancel a response at its first audio."""
    result = _BargeIn()

    async def feed(socket: ClientConnection) -> None:
        await _send(socket, "input.text", text=body["input"])
        await _send(socket, "input.done")

    async def listen(socket: ClientConnection) -> None:
        while (await _receive(socket))["type"] != _AUDIO:
            pass
        cancelled_s, is_answered = time.perf_counter(), False
        await _send(socket, "response.cancel")
        while (event := await _receive(socket))["type"] != "session.done":
            after_ms = 1000 * (time.perf_counter() - cancelled_s)
            if event["type"] == _AUDIO:
                result.last_audio_ms = after_ms
            elif event["type"] in ("response.cancelled", "audio.done") and not is_answered:
                if event["type"] == "audio.done" and event["finish_reason"] != "cancelled":
                    raise _Refused("over before it was cancelled")
                result.answered_ms, is_answered = after_ms, True
                await _send(socket, "session.close")

    result.error = await _in_session(target, body, feed, listen)
    return result


def _row(kind: str, exchanges: Sequence[Exchange]) -> dict[str, Any]:
    succeeded = [one for one in exchanges if one.error is None]
    ttfp_ms = [1000 * (one.arrivals[0][0] - (one.sent_s or one.due_s)) for one in succeeded]
    return {
        **_counts(f"{kind} text", [one.error for one in exchanges]),
        **spread("ttfp", "_ms", ttfp_ms, "mean", "p50", "p95", "max"),
        **spread("audio_s", "", [one.audio_s for one in succeeded], "mean", "p50"),
        "underruns": sum(len(one.playback.gaps_s) for one in succeeded),
    }


def _barge_in_row(answers: Sequence[_BargeIn]) -> dict[str, Any]:
    succeeded = [one for one in answers if one.error is None]
    return {
        **_counts("barge-in", [one.error for one in answers]),
        **spread("answered", "_ms", [one.answered_ms for one in succeeded], "p50", "p95", "max"),
        **spread("last_audio", "_ms", [one.last_audio_ms for one in succeeded], "p50", "p95", "max"),
    }


def _counts(mode: str, errors: Sequence[str | None]) -> dict[str, Any]:
    causes = Counter(error for error in errors if error is not None)
    row = {"mode": mode, "requests": len(errors), "succeeded": len(errors) - causes.total(), "failed": causes.total()}
    return row | ({"errors": dict(causes.most_common())} if causes else {})
