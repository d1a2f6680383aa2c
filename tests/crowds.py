"""Clients who ask a server again and again, and what became of each of their requests."""

import asyncio
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


class Crowd:
    """Eight clients, who ask until the block ends; `begun` of their answers are under way."""

    def __init__(self, server: Server, speaker: Speaker) -> None:
        self._server, self._text, self._speaker = server, speaker.long_text, speaker
        self.ended, self.begun, self._is_over = list[Ended](), 0, False

    async def __aenter__(self) -> Self:
        self._clients = [asyncio.create_task(self._ask(seed)) for seed in 2 * self._speaker.seeds[:4]]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._clients)

    async def _ask(self, seed: int) -> None:
        expected, clock = self._speaker.spoken(self._text, seed=seed), asyncio.get_running_loop().time
        while not self._is_over:
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
