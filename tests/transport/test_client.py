"""Streams from an engine in a process of its own: whole, in step with their readers, and ended when nobody reads."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from sine_engines import CONFIG, LONG, alone, gather, launch, nothing_left, run, until
from sine_models import HELD, SineModel

from sonoro.core.config import Tuning
from sonoro.core.errors import EngineBusy, EngineClosed, EngineCrashed, EngineError, InvalidRequest, UnknownVoice
from sonoro.core.types import AudioChunk, Finished, SpeechRequest
from sonoro.transport.client import EngineClient
from sonoro.transport.messages import FromEngine, Ready, WorkerSettings

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

BYTES_PER_S = 16000
"""Of the sine model: 8000 samples of PCM16."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What a model is held by: until it is there, no request is done before its reader has acted."""
    return tmp_path / "go"


def request(name: str, text: str = LONG, **fields: object) -> SpeechRequest:
    return SpeechRequest(id=name, text=text, **fields)


async def is_idle(client: EngineClient) -> bool:
    stats = await client.stats()
    return (stats.running, stats.waiting, stats.paused, stats.free_slots) == (0, 0, 0, CONFIG.slots)


def test_streams_equal_the_answers_of_an_engine_in_this_process() -> None:
    requests = [
        request(str(number), f"Number {number}. " * (1 + number % 4), seed=number, voice=("low", "high")[number % 2])
        for number in range(50)
    ]

    async def listen() -> None:
        async with launch() as client:
            assert client.is_ready
            assert (client.spec.name, client.restarts) == ("sine", 0)
            assert 0 < client.ready.ready_s < 60
            answers = await asyncio.gather(*(gather(client.stream(made)) for made in requests))
            for made, (pcm, finished) in zip(requests, answers, strict=True):
                assert (finished.request_id, finished.reason) == (made.id, "stop")
                assert pcm == alone(made), made.id
            stats = await client.stats()
            assert stats.launches["frame"]["eager"] > 0
            assert 0 < stats.tick_ms["p50"] <= stats.tick_ms["p99"]
            assert await is_idle(client)

    run(listen())


def test_it_is_said_when_all_graphs_are_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.Event()

    class Process:
        """One whose engine captures a graph, and another, and begins anew with one more."""

        def __init__(self, ready: Ready) -> None:
            self.ready = ready

        async def serve(self, take: Callable[[FromEngine], None]) -> EngineCrashed:
            for left in (1, 0, 0, 1, 0):
                take(msgspec.structs.replace(self.ready, graphs_to_come=left))
            told.set()
            return await asyncio.get_running_loop().create_future()

        def send(self, message: object) -> None:
            pass

        async def stop(self, timeout_s: float) -> None:
            pass

    async def start(*_: object) -> Process:
        shown = {"report": "", "gpu_memory_mib": 0.0, "graph_memory_mib": 0.0}
        return Process(Ready(spec=SineModel().spec, ready_s=1.0, graphs_to_come=2, **shown))

    async def listen() -> None:
        async with EngineClient(WorkerSettings()):
            await told.wait()

    monkeypatch.setattr("sonoro.transport.process.EngineProcess.start", start)
    with caplog.at_level("INFO", "sonoro.transport.process"):
        run(listen())
    assert caplog.messages == ["event=graphs_captured"] * 2


def test_what_cannot_be_spoken_is_refused_by_name_and_harms_nobody() -> None:
    async def ask() -> None:
        async with launch() as client:
            steady = asyncio.create_task(gather(client.stream(request("steady"))))
            speaking = await client.open(request("speaking", "", is_live=True))
            spoken = asyncio.create_task(gather(speaking))
            for bad, kind, field in (
                (request("a", voice="nobody"), UnknownVoice, "voice"),
                (request("b", "It is unspeakable."), InvalidRequest, "text"),
                (request("c", max_frames=5000), InvalidRequest, "max_frames"),
                (request("d", options={"strength": [1]}), InvalidRequest, "strength"),
                (request("e", ignore_eos="yes"), InvalidRequest, "request"),
                (request("speaking"), InvalidRequest, "id"),
            ):
                with pytest.raises(kind) as refusal:
                    await gather(client.stream(bad))
                assert (type(refusal.value), refusal.value.field) == (kind, field)
                assert refusal.value.limit in str(refusal.value)
            with pytest.raises(EngineError, match="RuntimeError: it exploded"):
                await gather(client.stream(request("f", "An explosive one.")))
            pcm, _ = await steady
            assert pcm == alone(request("steady"))
            speaking.append_text(LONG)
            speaking.end_text()
            assert (await spoken)[0]
            assert client.restarts == 0

    run(ask())


def test_a_full_engine_says_that_it_is_busy(file: Path) -> None:
    async def crowd() -> None:
        async with launch(f"{HELD}{file}", dataclasses.replace(CONFIG, slots=1, tuning=Tuning(max_queued=1))) as client:
            tasks = [asyncio.create_task(gather(client.stream(request(str(number))))) for number in range(5)]
            # One is spoken and one waits, unless all had come before the first was begun.
            await until(lambda: sum(task.done() for task in tasks) >= 3)
            file.touch()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, EngineBusy)]
            assert 3 <= len(refused) <= 4
            assert len([answer for answer in answers if isinstance(answer, tuple)]) == 5 - len(refused)

    run(crowd())


def test_a_reader_at_playback_speed_gets_every_sample(file: Path) -> None:
    text = "Fifty frames, half a second of it, and then some. " * 3

    async def play() -> None:
        async with launch(f"{HELD}{file}", queue_s=0.3) as client:
            heard, started_s = b"", None

            async def is_paused() -> bool:
                return (await client.stats()).paused == 1

            async for event in client.stream(request("a", text)):
                if isinstance(event, AudioChunk):
                    if started_s is None:
                        # The engine goes on until as much waits as may.
                        await until(is_paused)
                        file.touch()
                        started_s = time.monotonic()
                    heard += event.pcm
                    # Playback has come to the end of what was heard.
                    await asyncio.sleep(max(0.0, started_s + len(heard) / BYTES_PER_S - time.monotonic()))
            assert heard == alone(request("a", text))

    run(play())


def test_a_reader_that_stops_pauses_its_own_request_and_nothing_else(file: Path) -> None:
    async def stop_reading() -> None:
        async with launch(f"{HELD}{file}", queue_s=0.2) as client:
            stream = client.stream(request("still", ignore_eos=True, max_frames=400))
            first = await anext(stream)

            async def is_paused() -> bool:
                return (await client.stats()).paused == 1

            await until(is_paused)
            file.touch()
            for number in range(10):
                made = request(str(number), seed=number)
                pcm, _ = await gather(client.stream(made))
                assert pcm == alone(made)
            launches = (await client.stats()).launches
            await asyncio.sleep(0.1)
            assert (await client.stats()).launches == launches, "nothing is made while everybody is paused"
            # It goes on where it stopped, and lacks nothing.
            rest, finished = b"", None
            async for event in stream:
                if isinstance(event, Finished):
                    finished = event
                else:
                    rest += event.pcm
            assert finished is not None
            assert (finished.reason, finished.frames) == ("length", 400)
            assert first.pcm + rest == alone(request("still", ignore_eos=True, max_frames=400))

    run(stop_reading())


def test_a_reader_that_never_comes_back_is_cancelled(file: Path) -> None:
    async def forget() -> None:
        async with launch(f"{HELD}{file}", queue_s=0.2, slow_reader_timeout_s=0.3) as client:
            made = request("a", ignore_eos=True, max_frames=400)
            stream = client.stream(made)
            first = await anext(stream)

            async def is_free() -> bool:
                return await is_idle(client)

            await until(is_free)
            rest, finished = b"", None
            async for event in stream:
                if isinstance(event, Finished):
                    finished = event
                else:
                    rest += event.pcm
            assert finished is not None
            assert finished.reason == "cancelled"
            assert alone(made).startswith(first.pcm + rest)
            assert len(first.pcm + rest) == finished.frames * 160

    run(forget())


def test_leaving_a_stream_frees_its_slot(file: Path) -> None:
    made, short = request("a", ignore_eos=True, max_frames=400), request("a", "Short.")

    async def cancel_task(client: EngineClient) -> None:
        task = asyncio.create_task(gather(client.stream(made)))

        async def is_running() -> bool:
            return (await client.stats()).running == 1

        await until(is_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def close(client: EngineClient) -> None:
        await anext(stream := client.stream(made))
        await stream.aclose()

    async def forget(client: EngineClient) -> None:
        async for _ in client.stream(made):
            break
        # Python closes a generator that nobody holds at the next turn of the loop.
        await asyncio.sleep(0.01)

    async def cancel_request(client: EngineClient) -> None:
        await anext(answer := await client.open(made))
        answer.cancel()
        assert [event async for event in answer][-1].reason == "cancelled"
        answer.cancel()

    async def leave() -> None:
        async with launch(f"{HELD}{file}") as client:
            for way in (cancel_task, close, forget, cancel_request):
                await way(client)
                # The id can be used again at once, and nobody gets what was left of the first answer.
                assert (await gather(client.stream(short)))[0] == alone(short)
                assert await is_idle(client), way

    run(leave())


def test_closing_fails_what_is_running(file: Path) -> None:
    async def close() -> None:
        client = launch(f"{HELD}{file}")
        async with client:
            streams = [client.stream(request(str(number))) for number in range(6)]
            tasks = [asyncio.create_task(gather(stream)) for stream in streams]
            await anext(other := client.stream(request("other")))
        for task in tasks:
            with pytest.raises(EngineClosed):
                await task
        with pytest.raises(EngineClosed):
            await gather(other)
        with pytest.raises(EngineClosed):
            await gather(client.stream(request("late")))
        assert not client.is_ready

    run(close())


@pytest.mark.parametrize("turns", range(4))
def test_a_close_that_is_cancelled_leaves_nothing(turns: int) -> None:
    """Whatever it is waiting for then; the fixture looks for what is left."""

    async def close() -> None:
        client = launch()
        await client.start()
        closing = asyncio.create_task(client.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        if not turns:
            await client.close()  # the first had not begun

    run(close())
