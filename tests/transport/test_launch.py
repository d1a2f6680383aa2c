"""Engine processes that fail to start, die, hang, or lose their parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import GUARD_S
from sine_engines import (
    FACTORY,
    LONG,
    alone,
    engines,
    gather,
    launch,
    nothing_left,
    parent_of,
    quick_successors,
    run,
    until,
    whole_starts,
)

from sonoro.core.errors import CheckpointNotFound, ConfigError, EngineClosed, EngineCrashed, EngineError
from sonoro.core.types import SpeechRequest
from sonoro.transport.channel import WorkerLink
from sonoro.transport.client import EngineClient
from sonoro.transport.launch import Limits
from sonoro.transport.messages import Pong, WorkerSettings
from sonoro.transport.process import EngineProcess

__all__ = ["nothing_left", "quick_successors", "whole_starts"]

pytestmark = pytest.mark.usefixtures("nothing_left")


def the_child() -> int:
    [pid] = engines()
    return pid


def request(name: str, text: str = LONG) -> SpeechRequest:
    return SpeechRequest(id=name, text=text)


@pytest.mark.usefixtures("whole_starts")
@pytest.mark.parametrize(
    ("client", "error", "words"),
    [
        (lambda: launch("missing"), CheckpointNotFound, "there is no folder 'missing'"),
        (
            lambda: EngineClient(WorkerSettings(device="abacus")),
            ConfigError,
            "device: 'abacus' is not allowed; it must be auto",
        ),
        (lambda: EngineClient(WorkerSettings(factory="no.such.module:load")), ConfigError, "found in the import path"),
        (lambda: launch("dying"), EngineCrashed, "exit code 3: this is why it died"),
    ],
)
def test_an_engine_that_cannot_start_says_why(client: object, error: type, words: str) -> None:
    async def start() -> None:
        with pytest.raises(error) as refusal:
            async with client():
                pytest.fail("it started")
        assert type(refusal.value) is error
        assert words in str(refusal.value)
        if error is ConfigError:
            assert refusal.value.field in ("device", "factory")
            assert refusal.value.limit.startswith("it must be")

    run(start())


@pytest.mark.usefixtures("whole_starts")
def test_an_engine_that_is_not_ready_in_time_is_given_up() -> None:
    async def start() -> None:
        with pytest.raises(EngineError, match=r"was not ready after \d s; it may take 1 s"):
            async with launch("lasting", ready_timeout_s=1.0):
                pytest.fail("it started")

    run(start())


@pytest.mark.usefixtures("whole_starts")
def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    async def start() -> None:
        task = asyncio.create_task(launch("lasting").start())
        await until(engines)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(start())


def test_a_process_that_is_killed_fails_what_it_held_and_is_replaced() -> None:
    async def kill() -> None:
        # Nobody's silence is waited for: that the process has ended is what tells them.
        async with launch("slow", answer_timeout_s=1e6) as client:
            waiting = [asyncio.create_task(gather(client.stream(request(str(index))))) for index in range(8)]
            await anext(listened := client.stream(request("listened")))
            first = the_child()
            os.kill(first, signal.SIGKILL)
            for answer in await asyncio.gather(*waiting, gather(listened), return_exceptions=True):
                assert isinstance(answer, EngineCrashed)
                assert "SIGKILL" in str(answer)
            # This one waits for the successor; ids that were lost can be used again.
            pcm, _ = await gather(client.stream(request("0", "Hello again.")))
            assert pcm == alone(request("0", "Hello again."))
            assert (client.restarts, client.is_ready) == (1, True)
            assert the_child() != first

    run(kill())


@pytest.mark.usefixtures("whole_starts")
def test_an_exception_out_of_a_tick_ends_the_process_and_is_told() -> None:
    async def break_it() -> None:
        async with launch("breaking") as client:
            with pytest.raises(EngineCrashed, match=r"exit code 1: NotImplementedError$"):
                await gather(client.stream(request("a")))
            assert client.restarts <= 1

    run(break_it())


def test_a_process_that_hangs_is_found_out_and_replaced() -> None:
    async def hang() -> None:
        async with launch(answer_timeout_s=1.5) as client:
            os.kill(the_child(), signal.SIGSTOP)
            with pytest.raises(EngineCrashed, match="SIGKILL"):
                await gather(client.stream(request("a")))
            pcm, _ = await gather(client.stream(request("a")))
            assert pcm == alone(request("a"))

    run(hang())


def test_an_end_is_noticed_that_comes_together_with_the_last_message() -> None:
    class Ended:
        returncode = -signal.SIGKILL

        async def wait(self) -> int:
            return await ending

    async def serve() -> None:
        nonlocal ending
        ending, taken = asyncio.get_running_loop().create_future(), []
        process = EngineProcess()
        process._process = Ended()
        process._socket.bind(process.endpoint)
        with contextlib.closing(WorkerLink(process.endpoint)) as link:
            serving = asyncio.create_task(process.serve(taken.append))
            await asyncio.sleep(0.1)
            link.send([Pong()])
            time.sleep(0.2)  # until the message is there: the loop learns of both at once
            ending.set_result(0)
            assert "SIGKILL" in str(await serving)
        assert taken == [Pong()]
        await process.stop(0)

    ending: asyncio.Future[int]
    run(serve())


def test_a_successor_that_takes_too_long_fails_new_requests() -> None:
    async def wait() -> None:
        async with launch(accept_timeout_s=0.1) as client:
            os.kill(the_child(), signal.SIGKILL)
            await until(lambda: not client.is_ready)
            with pytest.raises(EngineCrashed, match=r"not ready in 0\.1 s"):
                await gather(client.stream(request("a")))

    run(wait())


@pytest.mark.usefixtures("quick_successors")
@pytest.mark.parametrize(("limits", "times"), [({"max_restarts": 1}, 2), ({}, 4)])
def test_more_crashes_than_may_be_in_a_time_close_the_engine(limits: dict[str, float], times: int) -> None:
    async def crash() -> None:
        async with launch("slow", **limits) as client:
            # An answer in between forgives nothing.
            for name in map(str, range(times)):
                await gather(client.stream(request(name, "Fine.")))
                with pytest.raises(EngineCrashed, match="exit code 7: it was asked to die"):
                    await gather(client.stream(request(name, "die")))
            with pytest.raises(EngineClosed, match=rf"{times} times within 600 s: .*asked to die"):
                await gather(client.stream(request("c", "Fine.")))
            assert (client.restarts, client.is_ready) == (times - 1, False)

    run(crash())


@pytest.mark.usefixtures("quick_successors")
def test_crashes_that_are_long_ago_are_forgiven() -> None:
    async def crash() -> None:
        async with launch("slow", max_restarts=1, restart_window_s=1e-3) as client:
            for name in "abc":
                with pytest.raises(EngineCrashed, match="exit code 7: it was asked to die"):
                    await gather(client.stream(request(name, "die")))
            await gather(client.stream(request("d", "Fine.")))
            assert (client.restarts, client.closed_reason) == (3, None)

    run(crash())


def test_a_process_that_hangs_is_not_ready_and_is_again_once_it_answers() -> None:
    async def hang() -> None:
        async with launch(ping_interval_s=0.1, hang_s=1.0) as client:
            os.kill(the_child(), signal.SIGSTOP)
            await until(lambda: not client.is_ready)
            waiting = asyncio.create_task(gather(client.stream(request("a"))))
            os.kill(the_child(), signal.SIGCONT)
            assert (await waiting)[0] == alone(request("a"))
            assert (client.is_ready, client.restarts) == (True, 0)

    run(hang())


def test_a_time_in_which_all_were_suspended_is_no_silence() -> None:
    """As by Ctrl-Z and `fg`, or a laptop's lid."""

    async def suspend() -> None:
        async with launch(answer_timeout_s=6.0) as client:
            os.kill(the_child(), signal.SIGSTOP)
            await asyncio.sleep(0.5)
            time.sleep(7.0)  # this process does nothing either
            await asyncio.sleep(0.5)
            os.kill(the_child(), signal.SIGCONT)
            assert (await gather(client.stream(request("a"))))[0] == alone(request("a"))
            await asyncio.sleep(1.6)  # a ping later
            assert (client.is_ready, client.restarts) == (True, 0)

    run(suspend())


def test_a_signal_to_all_cuts_no_stream() -> None:
    async def signal_all() -> None:
        async with launch("slow") as client:
            await anext(stream := client.stream(request("a")))
            os.kill(the_child(), signal.SIGTERM)
            rest = [event async for event in stream]
            assert rest[-1].reason == "stop"
            assert client.restarts == 0

    run(signal_all())


def test_the_death_of_the_parent_ends_the_process(nothing_left: Path) -> None:
    script = f"""
import asyncio, os
from sonoro.core.config import EngineConfig
from sonoro.transport.client import EngineClient
from sonoro.transport.messages import WorkerSettings
async def main():
    async with EngineClient(WorkerSettings(model="slow", factory={FACTORY!r}, config=EngineConfig(slots=2))):
        print("ready", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    environment = {**os.environ, "TMPDIR": str(nothing_left)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout.readline() == b"ready\n"
        [worker] = [int(path.name) for path in Path("/proc").glob("[0-9]*") if parent_of(int(path.name)) == parent.pid]
        parent.kill()
    deadline_s = time.monotonic() + GUARD_S
    while parent_of(worker) is not None:
        assert time.monotonic() < deadline_s, "the worker outlives its parent"
        time.sleep(0.05)


def test_while_an_engine_runs_nothing_of_its_link_is_on_the_disk(nothing_left: Path) -> None:
    """So nothing is left there if both are killed, the engine first."""

    async def look() -> None:
        async with launch() as client:
            assert list(nothing_left.iterdir()) == []
            assert (await gather(client.stream(request("a"))))[0] == alone(request("a"))

    run(look())


@pytest.mark.parametrize("field", ["ready_timeout_s", "queue_s", "max_restarts", "restart_window_s", "hang_s"])
def test_limits_that_are_none_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="at least") as refusal:
        Limits(**{field: -1})
    assert refusal.value.field == field


def test_from_the_moment_that_a_process_ends_nothing_more_is_given_to_it() -> None:
    """Its last messages are still waited for; whoever comes meanwhile gets the next engine, and nobody spins."""

    async def kill() -> None:
        async with launch() as client:
            os.kill(the_child(), signal.SIGKILL)
            while client.is_ready:
                await asyncio.sleep(0)
            assert client.restarts == 0
            pcm, _ = await gather(client.stream(request("a")))
            assert (pcm, client.restarts) == (alone(request("a")), 1)

    run(kill())
