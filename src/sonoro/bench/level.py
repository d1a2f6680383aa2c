"""One level of load, or a share of it. The requests do not depend on how many processes send them.

A `Level` consists of plain values, so that it can be sent to another process on this machine, which has the same clock.
"""

import asyncio
import gc
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sonoro.bench.client import SpeechClient, Target
from sonoro.bench.dataset import Prompt, shuffled
from sonoro.bench.metrics import Exchange, Window

_AFTER_FAILURE_S = 0.25
"""Wait of a closed-loop client after a failure: refusals are fast, and would be repeated as fast."""


@dataclass(frozen=True)
class Ask:
    """Content of a request: its text and voice, and its number of frames if that is fixed."""

    prompt: Prompt
    frames: int | None

    def body(self, model: str, target: Target) -> dict[str, Any]:
        """The request's JSON: OpenAI's fields, ours for voice and length, overridden by `target.extra`."""
        body: dict[str, Any] = {"model": model, "input": self.prompt.text, "voice": target.voice}
        body["response_format"] = "pcm"
        if self.prompt.recording is not None:
            body |= self.prompt.recording.fields
        if self.frames is not None:
            body |= {"max_new_tokens": self.frames, "ignore_eos": True}
        return {name: value for name, value in {**body, **target.extra}.items() if value is not None}


def arrivals(rate: float, duration_s: float, seed: str) -> Iterator[float]:
    """Arrival times before `duration_s` of a Poisson process of `rate` per second, determined by `seed`."""
    draw, at_s = random.Random(seed), 0.0
    while (at_s := at_s + draw.expovariate(rate)) < duration_s:
        yield at_s


def asks(texts: tuple[Prompt, ...], frames: tuple[int, int] | None, seed: str) -> Iterator[Ask]:
    """Yield requests endlessly, determined by `seed`."""
    draw = random.Random(f"{seed}/frames")
    for text in shuffled(texts, f"{seed}/texts"):
        yield Ask(text, draw.randint(*frames) if frames else None)


@dataclass(frozen=True)
class Level:
    """A load from `begin_s` on: `warm_up_s` that do not count, then `duration_s` that do. `load` is the rate per second
    of an open loop, or the number of clients of a closed loop. `speaker` is the client class for `target`."""

    speaker: type[SpeechClient]
    target: Target
    model: str
    texts: tuple[Prompt, ...]
    frames: tuple[int, int] | None
    is_open: bool
    load: float
    warm_up_s: float
    duration_s: float
    seed: str
    begin_s: float

    @property
    def window(self) -> Window:
        """The time that counts."""
        begin_s = self.begin_s + self.warm_up_s
        return Window(begin_s, begin_s + self.duration_s)

    def exchanges(self, share: int = 0, shares: int = 1) -> list[Exchange]:
        """Send share number `share` of `shares` equal shares of the load; returns its exchanges once all have ended."""
        # A garbage collection that walks all imported objects would delay every client of this process.
        gc.collect()
        gc.freeze()
        return asyncio.run(_Sender(self).send(share, shares))


class _Sender:
    """Sends a share of a level. The number of a request determines its content."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._asks, self._drawn = asks(level.texts, level.frames, level.seed), list[Ask]()
        self._exchanges: list[Exchange] = []

    async def send(self, share: int, shares: int) -> list[Exchange]:
        async with self._level.speaker(self._level.target) as self._client:
            await (self._at_random(share, shares) if self._level.is_open else self._in_turn(share, shares))
        return self._exchanges

    async def _at_random(self, share: int, shares: int) -> None:
        """Open loop: requests are sent at their arrival times."""
        level = self._level
        warm_up = arrivals(level.load, level.warm_up_s, f"{level.seed}/warm-up")
        counted = arrivals(level.load, level.duration_s, f"{level.seed}/arrivals")
        times = [level.begin_s + at_s for at_s in warm_up] + [level.window.begin_s + at_s for at_s in counted]
        async with asyncio.TaskGroup() as requests:
            for number in range(share, len(times), shares):
                await asyncio.sleep(max(0.0, times[number] - time.perf_counter()))
                requests.create_task(self._speak(number, times[number]))

    async def _in_turn(self, share: int, shares: int) -> None:
        """Closed loop: each client sends its next request when the one before has ended."""
        clients, end_s = int(self._level.load), self._level.window.end_s

        async def listen(client: int) -> None:
            await asyncio.sleep(max(0.0, self._level.begin_s - time.perf_counter()))
            for number in itertools.count(client, clients):
                if (now_s := time.perf_counter()) >= end_s:
                    return
                if (await self._speak(number, now_s)).error is not None:
                    await asyncio.sleep(_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as tasks:
            for client in range(share, clients, shares):
                tasks.create_task(listen(client))

    async def _speak(self, number: int, due_s: float) -> Exchange:
        while len(self._drawn) <= number:
            self._drawn.append(next(self._asks))
        exchange = await self._client.speak(self._drawn[number].body(self._level.model, self._level.target), due_s)
        self._exchanges.append(exchange)
        return exchange
