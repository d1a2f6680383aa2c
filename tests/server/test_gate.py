"""The gate before the engine: who enters next, and that no place is lost whatever those who wait do."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sine_engines import LONG, launch_fleet, nothing_left, run, until

from sonoro.audio.encoders import Encoder, Encoding
from sonoro.core.types import Finished, SpeechRequest
from sonoro.server.errors import NotReady, TooManyRequests
from sonoro.server.gate import Gate
from sonoro.server.metrics import Metrics
from sonoro.server.stream import Observation, Speech, encoded_audio
from sonoro.server.turns import LEAST_CHARACTERS
from sonoro.transport.fleet import Fleet

__all__ = ["nothing_left"]


def speaking(fleet: Fleet, gate: Gate, name: str) -> AsyncGenerator[bytes | Finished, None]:
    """The parts of an answer of 3 s, which engine and queue hold whole."""
    request = SpeechRequest(id=name, text=LONG, ignore_eos=True, max_frames=300)
    encoding = Encoding(Encoder("pcm", fleet.spec.sample_rate), ThreadPoolExecutor(1))
    return encoded_audio(Speech(name, request, encoding), fleet, gate, Observation(Metrics(), 8000, 0.0))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("max_unread_bytes", [300 * 160 * 3, 0])
def test_who_does_not_read_keeps_a_place_only_while_the_engine_works(
    max_unread_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonoro.server.gate.MAX_UNREAD_BYTES", max_unread_bytes)

    async def listen() -> None:
        async with launch_fleet(count=1) as fleet:
            gate = Gate(2, max_waiting=0, wait_s=60)
            stalled = [speaking(fleet, gate, name) for name in "ab"]
            for parts in stalled:
                await anext(parts)
            await until(lambda: fleet.replicas[0].open_requests == 0)
            late = speaking(fleet, gate, "c")
            if max_unread_bytes:
                assert b"".join([part async for part in late if isinstance(part, bytes)])
            else:
                # What waits for readers takes as much memory as may be.
                with pytest.raises(TooManyRequests):
                    await anext(late)
            for parts in stalled:
                heard = [part async for part in parts]
                assert isinstance(heard[-1], Finished)
            assert gate.unread_bytes.total == 0
            async with gate.acquire(), gate.acquire():
                pass

    run(listen())


@pytest.mark.usefixtures("nothing_left")
def test_who_leaves_gives_up_the_place_once_the_engine_knows() -> None:
    async def leave() -> None:
        async with launch_fleet("slow", count=1) as fleet:
            gate = Gate(1, max_waiting=1, wait_s=60)
            parts = speaking(fleet, gate, "a")
            await anext(parts)
            await parts.aclose()
            assert fleet.replicas[0].open_requests == 1
            async with gate.acquire():
                assert fleet.replicas[0].open_requests == 0

    run(leave())


def test_without_an_engine_who_waits_is_told_that_there_is_none() -> None:
    async def wait() -> None:
        gate = Gate(4, max_waiting=9, wait_s=0.01, share=lambda: 0.0)
        with pytest.raises(NotReady):
            async with gate.acquire():
                pass

    run(wait())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_came_first_enters_first() -> None:
    async def queue() -> None:
        gate, entered = Gate(1, max_waiting=9, wait_s=60), []

        async def enter(name: int) -> None:
            async with gate.acquire():
                entered.append(name)

        async with gate.acquire():
            waiting = [asyncio.create_task(enter(name)) for name in range(4)]
            await settle()
            assert gate.waiting == 4
        await asyncio.gather(*waiting)
        assert entered == [0, 1, 2, 3]
        assert gate.waiting == 0

    run(queue())


def test_who_waits_enters_when_told_that_there_are_more_places() -> None:
    async def queue() -> None:
        share = 0.5
        gate, is_over = Gate(4, max_waiting=9, wait_s=60, share=lambda: share), asyncio.Event()
        inside = 0

        async def enter() -> None:
            nonlocal inside
            async with gate.acquire():
                inside += 1
                await is_over.wait()

        visits = [asyncio.create_task(enter()) for _ in range(5)]
        await settle()
        assert (inside, gate.waiting) == (2, 3)
        share = 1.0
        gate.wake_waiters()
        await settle()
        assert (inside, gate.waiting) == (4, 1)
        is_over.set()
        await asyncio.gather(*visits)

    run(queue())


def test_under_a_lasting_overload_who_came_last_enters_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def queue() -> None:
        gate, entered, late_s = Gate(1, max_waiting=9, wait_s=60), [], 0.0
        loop = asyncio.get_running_loop()
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + late_s)

        async def enter(name: int) -> None:
            async with gate.acquire():
                entered.append(name)
                await asyncio.sleep(0)

        waiting = []
        async with gate.acquire():
            for name in range(4):
                waiting.append(asyncio.create_task(enter(name)))
                await settle()
                late_s += 12
            # The first has waited for 48 s of 60, the last for 12.
        await asyncio.gather(*waiting)
        assert entered == [3, 2, 1, 0]

    run(queue())


def test_no_place_is_lost_when_those_who_wait_leave_at_any_moment() -> None:
    async def crowd(seed: int) -> None:
        draw, gate, inside = random.Random(seed), Gate(3, max_waiting=20, wait_s=0.004), 0

        async def visit() -> None:
            nonlocal inside
            with contextlib.suppress(TooManyRequests):
                async with gate.acquire():
                    inside += 1
                    assert inside <= 3
                    try:
                        await asyncio.sleep(draw.random() * 0.002)
                    finally:
                        inside -= 1

        visits = []
        for _ in range(150):
            visits.append(asyncio.create_task(visit()))
            if draw.random() < 0.5:
                draw.choice(visits).cancel()
            await asyncio.sleep(0 if draw.random() < 0.7 else draw.random() * 0.002)
        await asyncio.gather(*visits, return_exceptions=True)
        assert all(visit.cancelled() or visit.exception() is None for visit in visits)
        assert gate.waiting == 0
        async with contextlib.AsyncExitStack() as places:
            for _ in range(3):
                await places.enter_async_context(gate.acquire())
            with pytest.raises(TooManyRequests):
                await places.enter_async_context(gate.acquire())

    for seed in range(10):
        run(crowd(seed))


@pytest.mark.parametrize("weights", [(1, 3), (1, 1, 1), (1, 2, 5), (1, 1, 1, 1, 10)])
@pytest.mark.parametrize("permits", [1, 2, 3, 8])
def test_a_full_gate_is_shared_by_weight(permits: int, weights: tuple[int, ...]) -> None:
    """However few permits there are, by the characters of what is asked for."""

    async def share(lengths: tuple[int, int]) -> None:
        owners = {f"key {number}": float(weight) for number, weight in enumerate(weights)}
        gate, left, entered = Gate(permits, max_waiting=1000, wait_s=60, weights=owners), iter(range(2000)), list[str]()

        async def ask(owner: str, length: int) -> None:
            for _ in left:
                async with gate.acquire(owner, length):
                    entered.append(owner)
                    await asyncio.sleep(0)

        sizes = {owner: lengths[number % 2] for number, owner in enumerate(owners)}
        await asyncio.gather(*(ask(owner, size) for owner, size in sizes.items() for _ in range(20)))
        assert (gate.running, gate.waiting) == (0, 0)
        # The first did not wait for their turn, and at the end not all ask.
        served = Counter(entered[100:1800])
        got = [served[owner] * max(size, LEAST_CHARACTERS) / owners[owner] for owner, size in sizes.items()]
        assert 0.9 * max(got) < min(got), served

    for lengths in ((10, 90), (100, 1000), (2000, 200)):
        run(share(lengths))


async def order_of(gate: Gate, *asked: str) -> list[str]:
    """The order in which requests enter of which the owners have `asked`, in turn, while none could run."""
    entered: list[str] = []

    async def enter(owner: str) -> None:
        async with gate.acquire(owner):
            entered.append(owner)
            await asyncio.sleep(0)

    async with gate.acquire(asked[0]):
        waiting = [asyncio.create_task(enter(owner)) for owner in asked]
        await settle()
    await asyncio.gather(*waiting)
    return entered


def test_who_asks_again_has_neither_saved_turns_nor_lost_them() -> None:
    async def queue() -> None:
        gate = Gate(1, max_waiting=1000, wait_s=60, weights={"a": 1.0, "b": 1.0, "c": 2.0})
        assert await order_of(gate, *"a" * 50) == ["a"] * 50
        assert sorted((await order_of(gate, *"aaaabbbb"))[:4]) == [*"aabb"]
        assert sorted((await order_of(gate, *"bbbbbbbbcccccccc"))[:6]) == [*"bbcccc"]

    run(queue())


def test_a_light_key_is_served_however_many_ask_of_a_heavy_one() -> None:
    async def queue() -> None:
        for permits in (1, 2):
            gate = Gate(permits, max_waiting=1000, wait_s=60, weights={"heavy": 99.0, "light": 1.0})
            entered = "".join(owner[0] for owner in await order_of(gate, *["heavy"] * 400, *["light"] * 3))
            # Of 100 turns it has one, and the first of all, as it has had none.
            assert [len(heavy) <= 100 for heavy in entered.split("l")[:3]] == [True] * 3

    run(queue())


def test_under_a_lasting_overload_each_key_has_its_share_and_its_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def queue() -> None:
        gate, entered, late_s = Gate(1, max_waiting=99, wait_s=60, weights={"a": 1.0, "b": 1.0}), list[str](), 0.0
        loop = asyncio.get_running_loop()
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + late_s)

        async def enter(owner: str, number: int) -> None:
            async with gate.acquire(owner):
                entered.append(f"{owner}{number}")
                await asyncio.sleep(0)

        waiting = []
        async with gate.acquire("a"):
            for number in range(4):
                waiting += [asyncio.create_task(enter(owner, number)) for owner in "aaab"]
                await settle()
                late_s += 12
        await asyncio.gather(*waiting)
        assert {"".join(sorted(entered[at][0] + entered[at + 1][0])) for at in range(0, 8, 2)} == {"ab"}
        assert [one for one in entered if one[0] == "b"] == ["b3", "b2", "b1", "b0"]
        assert [one for one in entered if one[0] == "a"] == [f"a{number}" for number in (3, 2, 1, 0) for _ in range(3)]

    run(queue())
