"""Clients who ask a server again and again, and what became of each of their requests."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Self

import httpx
from server_processes import Server
from speakers import Speaker


@dataclass
class Ended:
    """A request that ended: `whole`, or however else; sent and over at these times."""

    how: str
    sent_s: float
    over_s: float


LISTENS_S = 2.0
"""How long they listen before they ask again, about as long as an answer lasts; what else runs has the cores then."""


class Crowd:
    """Eight clients, who ask together, again and again until the block ends; `begun` of their answers are under way."""

    def __init__(self, server: Server, speaker: Speaker) -> None:
        self._server, self._text, self._speaker = server, speaker.long_text, speaker
        self.ended, self.begun, self._is_over = list[Ended](), 0, asyncio.Event()

    async def __aenter__(self) -> Self:
        for seed in self._speaker.seeds[:4]:
            self._speaker.spoken(self._text, seed=seed)
        self._asking = asyncio.create_task(self._ask_together())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over.set()
        await self._asking

    async def _ask_together(self) -> None:
        while not self._is_over.is_set():
            await asyncio.gather(*(self._ask(seed) for seed in 2 * self._speaker.seeds[:4]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), LISTENS_S)

    async def _ask(self, seed: int) -> None:
        expected, clock = self._speaker.spoken(self._text, seed=seed), asyncio.get_running_loop().time
        sent_s = clock()
        try:
            status, heard = await self._hear(seed)
            how = "whole" if self._speaker.is_same(heard, expected) else f"{status}, {len(heard)} bytes"
        except httpx.TransportError as error:
            how = f"cut off: {error!r}"
        self.ended.append(Ended(how, sent_s, clock()))

    async def _hear(self, seed: int) -> tuple[int, bytes]:
        body, heard = {"input": self._text, "response_format": "pcm", "seed": seed}, b""
        async with self._server.http.stream("POST", "/v1/audio/speech", json=body) as answer:
            try:
                async for part in answer.aiter_raw():
                    self.begun += not heard
                    heard += part
            finally:
                self.begun -= bool(heard)
        return answer.status_code, heard

    def sent_since(self, time_s: float) -> list[Ended]:
        return [ended for ended in self.ended if ended.sent_s > time_s]

    def check_lost(self, killed_s: float, noticed_s: float, replaced_s: float, most: int) -> None:
        """Something that spoke to at most `most` of them was killed: they, and whoever was sent to it until that was
        noticed, heard of it before it was replaced, and the others of nothing."""
        lost = [ended for ended in self.ended if ended.how != "whole"]
        assert 1 <= len([ended for ended in lost if ended.sent_s < killed_s]) <= most, lost
        assert all(ended.sent_s <= noticed_s for ended in lost), "what came later was lost"
        assert all(ended.over_s < replaced_s for ended in lost), lost
        assert not any(ended.how.startswith("200") for ended in lost), "an answer that was cut off looked whole"
