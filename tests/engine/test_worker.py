"""What the engine process does with each message, and how it ends."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
import torch
from processes import GUARD_S, begin_command
from sine_engines import CONFIG, FACTORY, LONG, Clock, Engine, Peer, alone, audio, nothing_left, resolved, run, speak
from sine_models import ShownSineModel, VoicedSineModel
from without_gpu import FunctionPool

from sonoro.core.config import LOG_LEVEL_VARIABLE, EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.core.types import AudioChunk, Event, Failed, Finished, SpeechRequest
from sonoro.engine.worker import Worker
from sonoro.engine_process import load, on_own_gpus
from sonoro.runtime.ring import Entry
from sonoro.runtime.threads import spare_threads
from sonoro.transport.channel import WorkerLink
from sonoro.transport.messages import (
    Cancel,
    Fatal,
    FromEngine,
    Pause,
    Ready,
    Resume,
    Shutdown,
    Stats,
    StatsRequest,
    Submit,
    ToEngine,
    WorkerSettings,
)
from sonoro.words.heads import WordHeads

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")


def submit(request: SpeechRequest) -> Submit:
    return Submit(resolved(VoicedSineModel().spec, request))


@asynccontextmanager
async def served() -> AsyncIterator[Peer]:
    """The client's end of a link whose other end an engine in a thread of this process serves until `Shutdown`."""
    client = Peer()

    def serve() -> None:
        link = WorkerLink(client.endpoint)
        worker = Worker(Engine(VoicedSineModel(), CONFIG), link, torch.device("cpu"))
        link.send([worker.ready(1.5)])
        worker.serve()
        link.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        [ready] = await client.receive()
        assert isinstance(ready, Ready)
        assert (ready.spec, ready.ready_s) == (VoicedSineModel().spec, 1.5)
        assert ready.report
        yield client
    finally:
        client.send(Shutdown())
        await asyncio.to_thread(thread.join, GUARD_S)
        assert not thread.is_alive()
        client.close()


async def heard(client: Peer, is_last: Callable[[FromEngine], bool]) -> list[FromEngine]:
    """All messages up to the one that `is_last`."""
    messages: list[FromEngine] = []
    while not (messages and is_last(messages[-1])):
        messages += await client.receive()
    return messages


async def stats_of(client: Peer) -> Stats:
    client.send(StatsRequest())
    return (await heard(client, lambda message: isinstance(message, Stats)))[-1]


def pcm_of(messages: list[FromEngine]) -> bytes:
    return b"".join(message.pcm for message in messages if isinstance(message, AudioChunk))


def is_end(message: FromEngine) -> bool:
    return isinstance(message, Finished | Failed)


def test_a_request_is_answered_by_chunks_and_one_end() -> None:
    async def talk() -> None:
        async with served() as client:
            made = SpeechRequest(id="a", text=LONG, seed=3)
            client.send(submit(made))
            messages = await heard(client, is_end)
            assert [is_end(message) for message in messages] == [False] * (len(messages) - 1) + [True]
            assert pcm_of(messages) == alone(made)
            assert (await stats_of(client)).free_slots == CONFIG.slots

    run(talk())


def test_a_refusal_is_a_failure_with_its_code_and_field() -> None:
    async def talk() -> None:
        async with served() as client:
            client.send(submit(SpeechRequest(id="a", text="Hi", max_frames=600)))
            [failed] = await client.receive()
            assert isinstance(failed, Failed)
            assert (failed.request_id, failed.facts.code, failed.facts.field, failed.facts.value) == (
                *("a", "invalid_request", "max_frames"),
                "600",
            )
            assert failed.facts.limit == "at most 512 for this text (512 for each segment)"
            client.send(submit(SpeechRequest(id="b", text="An explosive one.")))
            failed = (await heard(client, is_end))[-1]
            assert (failed.facts.code, failed.facts.message) == ("engine", "RuntimeError: it exploded")

    run(talk())


def test_a_paused_request_stands_still_and_goes_on_where_it_was() -> None:
    async def talk() -> None:
        async with served() as client:
            made = SpeechRequest(id="a", text=LONG)
            client.send(submit(made))
            client.send(Pause("a"))
            client.send(StatsRequest())
            # It may have begun to speak before it was paused.
            before = await heard(client, lambda message: isinstance(message, Stats))
            stats = before[-1]
            assert stats.paused == 1
            assert stats.running + stats.waiting == 1
            client.send(Resume("a"))
            assert pcm_of(before + await heard(client, is_end)) == alone(made)
            # One that has ended is not paused any more, whatever is said about it.
            client.send(Pause("a"))
            client.send(Cancel("a"))
            assert (await stats_of(client)).paused == 0

    run(talk())


def test_a_cancelled_request_ends_though_it_is_paused() -> None:
    async def talk() -> None:
        async with served() as client:
            client.send(submit(SpeechRequest(id="a", text=LONG)))
            client.send(Pause("a"))
            client.send(Cancel("a"))
            assert (await heard(client, is_end))[-1].reason == "cancelled"
            stats = await stats_of(client)
            assert (stats.paused, stats.running, stats.waiting) == (0, 0, 0)

    run(talk())


class _Script:
    """A link whose messages come one after the other, as fast as they are asked for; `sent` are the answers."""

    def __init__(self, talk: Callable[[list[FromEngine]], Iterator[list[ToEngine]]]) -> None:
        self.sent: list[FromEngine] = []
        self._talk = talk(self.sent)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        time.sleep(min(timeout_s, 0.02))
        return next(self._talk)

    def send(self, messages: Sequence[FromEngine]) -> None:
        self.sent.extend(messages)


def test_who_asks_while_the_device_is_busy_is_in_the_next_tick() -> None:
    """A tick begins once no time is to spare, and so takes in whatever has come until then."""
    waits_s: list[float] = []

    def talk(sent: list[FromEngine]) -> Iterator[list[ToEngine]]:
        yield [submit(SpeechRequest(id="a", text=LONG))]
        yield []
        yield [submit(SpeechRequest(id="b", text=LONG))]
        while sum(map(is_end, sent)) < 2:
            yield []
        yield [Shutdown()]

    class Link(_Script):
        def receive(self, timeout_s: float) -> list[ToEngine]:
            waits_s.append(timeout_s)
            return super().receive(timeout_s)

    class Unhurried(Engine):
        spare_s = property(lambda self: 0.015, lambda self, value: None)

    link = Link(talk)
    Worker(Unhurried(VoicedSineModel(), CONFIG), cast("WorkerLink", link), torch.device("cpu")).serve()
    assert sum(map(is_end, link.sent)) == 2
    spared_s = [wait_s for wait_s in waits_s[2:-1] if wait_s]
    assert len(spared_s) > 5
    assert max(spared_s) <= 0.015


def test_late_audio_is_sent_before_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of two requests at once, which comes while the loop waits for messages. The wait for a step is part of its
    tick's time."""
    monkeypatch.setattr("sonoro.engine.engine._LARGE_STEP", 1)
    has_come, clock, late = [True], Clock(), list[Event]()
    monkeypatch.setattr(Entry, "is_ready", property(lambda entry: has_come[0]))

    class Time:
        """Passes a little at each look at it, however slow the machine."""

        def perf_counter(self) -> float:
            clock.now_s += 1e-3
            return clock.now_s

        def sleep(self, seconds: float) -> None:
            clock.now_s += seconds

    monkeypatch.setattr("sonoro.engine.worker.time", Time())

    class Unhurried(Engine):
        spare_s = property(lambda self: 0.015, lambda self, value: None)

        def tick(self) -> list[Event]:
            has_come[0] = False
            return super().tick()

        def take_lengths(self) -> bool:
            has_waited = super().take_lengths()
            clock.now_s += 0.02 * has_waited
            return has_waited

        def late_audio(self) -> list[Event]:
            events = super().late_audio()
            late.extend(events)
            return events

    def talk(sent: list[FromEngine]) -> Iterator[list[ToEngine]]:
        yield [submit(SpeechRequest(id=name, text=LONG, seed=3, max_frames=40)) for name in "ab"]
        while sum(map(is_end, sent)) < 2:
            has_come[0] = True
            yield []
        yield [StatsRequest(), Shutdown()]

    link = _Script(talk)
    engine = Unhurried(VoicedSineModel(), CONFIG, clock, ticks_late=1)
    Worker(engine, cast("WorkerLink", link), torch.device("cpu")).serve()
    assert len(late) > 3
    [stats] = [message for message in link.sent if isinstance(message, Stats)]
    assert stats.tick_ms["p50"] >= 20
    for name in "ab":
        np.testing.assert_array_equal(
            audio(link.sent, name),
            speak(SpeechRequest(id=name, text=LONG, seed=3, max_frames=40), Engine(VoicedSineModel(), CONFIG))[0],
        )


def test_no_graph_is_captured_while_a_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it is spoken nor while it is paused; afterwards all are, and each is told of."""

    def is_captured(message: FromEngine) -> bool:
        return isinstance(message, Ready)

    def talk(sent: list[FromEngine]) -> Iterator[list[ToEngine]]:
        yield [submit(SpeechRequest(id="a", text=LONG))]
        while not any(map(is_end, sent)):
            yield []
        # The next comes at once: that moment is not used either.
        yield [submit(SpeechRequest(id="b", text=LONG)), Pause("b")]
        for _ in range(20):
            yield []
        assert not any(map(is_captured, sent))
        yield [Resume("b")]
        while sum(map(is_end, sent)) < 2:
            yield []
        assert not any(map(is_captured, sent))
        while not any(isinstance(message, Ready) and not message.graphs_to_come for message in sent):
            yield []
        yield [Shutdown()]

    monkeypatch.setattr("sonoro.engine.runner.GraphPool", FunctionPool)
    sizes = {"frame_batches": (1, 2, 4), "prefill_buckets": (16, 512), "codec_batches": (1, 4)}
    link = _Script(talk)
    engine = Engine(VoicedSineModel(), replace(CONFIG, **sizes, is_ready_early=True))
    worker = Worker(engine, cast("WorkerLink", link), torch.device("cpu"))
    ready = worker.ready(1.5, {"weights": 0.5})
    worker.serve()
    told = [message for message in link.sent if isinstance(message, Ready)]
    assert [message.graphs_to_come for message in told] == [*range(ready.graphs_to_come - 1, -1, -1)]
    assert {(message.ready_s, message.phases["weights"]) for message in (ready, *told)} == {(1.5, 0.5)}


def test_durations_are_forgotten_when_that_is_asked() -> None:
    async def talk() -> None:
        async with served() as client:
            client.send(submit(SpeechRequest(id="a", text=LONG)))
            await heard(client, is_end)
            # One more tick collects what the last one launched.
            await asyncio.sleep(0.2)
            client.send(StatsRequest(resets=True))
            [stats] = await client.receive()
            assert 0 < stats.tick_ms["p50"] <= stats.tick_ms["p95"] <= stats.tick_ms["p99"]
            assert stats.frame_ms["p50"] >= stats.tick_ms["p50"] / 2
            stats = await stats_of(client)
            assert stats.tick_ms == stats.frame_ms == {"p50": 0.0, "p95": 0.0, "p99": 0.0}
            assert stats.launches["frame"]["eager"] > 0

    run(talk())


def start(client: Peer, parent: int, **environment: str) -> subprocess.Popen[bytes]:
    """The process as `sonoro.transport.launch` starts it."""
    settings = msgspec.json.encode(WorkerSettings(factory=FACTORY, config=CONFIG)).decode()
    command = [sys.executable, "-m", "sonoro.engine_process", client.endpoint, str(parent), "0", settings]
    return begin_command(command, env={**os.environ, **environment}, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_ends_no_engine_before_its_server_says_so(number: signal.Signals) -> None:
    """systemd signals every process of a service, a terminal every one in the foreground."""

    async def end() -> None:
        client = Peer()
        with start(client, os.getpid()) as process:
            assert isinstance((await client.receive())[0], Ready)
            process.send_signal(number)
            made = SpeechRequest(id="a", text=LONG)
            client.send(submit(made))
            assert pcm_of(await heard(client, is_end)) == alone(made)
            client.send(Shutdown())
            _, err = await asyncio.to_thread(process.communicate, timeout=GUARD_S)
        client.close()
        assert (process.returncode, err) == (0, b"")

    run(end())


def test_a_process_whose_parent_is_gone_ends_and_removes_the_link() -> None:
    async def end() -> None:
        client = Peer()
        # Another than this process is named as its parent.
        with start(client, os.getppid()) as process:
            assert await asyncio.to_thread(process.wait, GUARD_S) == 1
        assert not Path(client.endpoint.removeprefix("ipc://")).exists()
        client.close()

    run(end())


def test_a_wrong_log_level_is_refused_like_any_other_setting() -> None:
    async def end() -> None:
        client = Peer()
        with start(client, os.getpid(), **{LOG_LEVEL_VARIABLE: "loud"}) as process:
            [fatal] = await client.receive()
            assert await asyncio.to_thread(process.wait, GUARD_S) == 2
        client.close()
        assert isinstance(fatal, Fatal)
        error = fatal.facts.error
        assert (type(error), error.field) == (ConfigError, LOG_LEVEL_VARIABLE)

    run(end())


@pytest.mark.parametrize("factory", ["", "load", ":load", "sine_models:", "sine_models:none", "no.such:load"])
def test_a_factory_that_is_not_there_is_refused(factory: str) -> None:
    with pytest.raises(ConfigError, match="module:function") as refusal:
        load(WorkerSettings(factory=factory))
    assert refusal.value.field == "factory"


def test_a_small_model_gets_one_thread_and_a_large_one_keeps_its() -> None:
    threads = torch.get_num_threads()
    try:
        for parameters, expected in ((60_000_000, 2), (1000, 1)):
            torch.set_num_threads(2)
            spare_threads(torch.device("cpu"), parameters)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("device", "codec", "own", "own_codec", "seen"),
    [
        ("cuda:1", "", "cuda", "", "5"),
        ("cuda:2", "", "cuda:2", "", "4,5"),
        ("cuda:x", "", "cuda:x", "", "4,5"),
        ("cuda", "", "cuda", "", "4,5"),
        ("cpu", "", "cpu", "", "4,5"),
        ("auto", "", "auto", "", "4,5"),
        ("cuda:1", "cuda:0", "cuda", "cuda:1", "5,4"),
        ("cuda:1", "cuda:1", "cuda:1", "cuda:1", "4,5"),
        ("cuda:1", "cuda:2", "cuda:1", "cuda:2", "4,5"),
        ("auto", "cuda:1", "auto", "cuda:1", "4,5"),
        ("cpu", "cpu", "cpu", "cpu", "4,5"),
    ],
)
def test_a_process_sees_the_gpus_of_its_settings_alone(  # noqa: PLR0917 (what is asked, and what comes of it)
    device: str, codec: str, own: str, own_codec: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    settings = on_own_gpus(WorkerSettings(device=device, config=EngineConfig(codec_device=codec)))
    assert (settings.device, settings.config.codec_device) == (own, own_codec)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_heads_are_found_in_quiet_and_words_told_from_then_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a model that has no table of them; requests that come meanwhile are spoken at once."""

    def has_words(sent: list[FromEngine], name: str) -> bool:
        return any(isinstance(one, AudioChunk | Finished) and one.request_id == name and one.words for one in sent)

    def talk(sent: list[FromEngine]) -> Iterator[list[ToEngine]]:
        names = (f"r{number}" for number in itertools.count())
        for name in names:
            request = SpeechRequest(id=name, text="Hi you.", with_words=True)
            yield [Submit(resolved(model.spec, request))]
            while not any(is_end(one) and one.request_id == name for one in sent):
                yield []
            if has_words(sent, name):
                break
            for _ in range(30):
                yield []
        yield [Shutdown()]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = ShownSineModel()
    model.word_heads = WordHeads()
    link = _Script(talk)
    worker = Worker(Engine(model, CONFIG), cast("WorkerLink", link), torch.device("cpu"))
    worker.ready(1.5)
    worker.serve()
    ends = [message for message in link.sent if isinstance(message, Finished)]
    assert len(ends) > 1
    assert not has_words(link.sent, "r0")
