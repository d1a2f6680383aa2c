"""The gate before the engine: who enters next, and that no place is lost whatever those who wait do."""

import asyncio
import contextlib
import random

import pytest

from engine_processes import run
from sonoro.server.errors import TooManyRequests
from sonoro.server.stream import Gate


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_came_first_enters_first() -> None:
    async def queue() -> None:
        gate, entered = Gate(1, max_waiting=9, wait_s=60), []

        async def enter(name: int) -> None:
            async with gate.place():
                entered.append(name)

        async with gate.place():
            assert gate.longest_wait_s == 0
            waiting = [asyncio.create_task(enter(name)) for name in range(4)]
            await settle()
            assert gate.waiting == 4
            await asyncio.sleep(0.05)
            assert 0.04 < gate.longest_wait_s < 60
        await asyncio.gather(*waiting)
        assert entered == [0, 1, 2, 3]
        assert (gate.waiting, gate.longest_wait_s) == (0, 0)

    run(queue())


def test_who_waits_enters_when_told_that_there_are_more_places() -> None:
    async def queue() -> None:
        share = 0.5
        gate, is_over = Gate(4, max_waiting=9, wait_s=60, share=lambda: share), asyncio.Event()
        inside = 0

        async def enter() -> None:
            nonlocal inside
            async with gate.place():
                inside += 1
                await is_over.wait()

        visits = [asyncio.create_task(enter()) for _ in range(5)]
        await settle()
        assert (inside, gate.waiting) == (2, 3)
        share = 1.0
        gate.admit()
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
            async with gate.place():
                entered.append(name)
                await asyncio.sleep(0)

        waiting = []
        async with gate.place():
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
                async with gate.place():
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
                await places.enter_async_context(gate.place())
            with pytest.raises(TooManyRequests):
                await places.enter_async_context(gate.place())

    for seed in range(10):
        run(crowd(seed))
