"""Half-written texts on idle sockets: others are spoken to, and they go on when their text does."""

import asyncio
import contextlib
import dataclasses

import pytest
from servers import SETTINGS, serving
from sessions import session
from sine_engines import CONFIG, alone, nothing_left, run, until

from sonoro.core.types import SpeechRequest
from sonoro.server import gate

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

HALF, REST = "Half of a sen", "tence, which goes on."
OTHER = "Somebody else."


def test_they_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "IDLE_PERMIT_S", 0.2)
    settings = dataclasses.replace(SETTINGS, max_queue_wait_ms=20_000)

    async def ask() -> None:
        config = dataclasses.replace(CONFIG, slots=2)
        async with serving("live", settings, config) as server, contextlib.AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(session(server)) for _ in range(2)]
            for each in idle:
                await each.say("input.text", text=HALF)
                while not isinstance(await each.hear(), bytes):
                    pass
            # Of the eight, two at a time are spoken to in the places of the idle.
            others = await asyncio.gather(*(server.speak(OTHER) for _ in range(8)))
            assert {answer.status_code for answer in others} == {200}
            assert {answer.content for answer in others} == {alone(SpeechRequest(id="a", text=OTHER))}
            for each in idle:
                await each.say("input.text", text=REST)
                await each.say("input.done")
                _, events = await each.listen()
                assert events[-1]["type"] == "audio.done"
                assert events[-1]["characters"] == len(HALF + REST)
                assert events[-1]["samples"] == 80 * len(HALF + REST)
            await until(server.is_idle)
            assert await server.metric("sonoro_requests_in_flight") == 0
            assert server.service.speech.gate.running == 0

    run(ask())


def test_a_permit_is_lent_and_taken_back() -> None:
    class Stream:
        is_ended, unread_bytes = False, 0

        def on_done(self, call):
            self.done = call

    async def follow() -> None:
        one, stream = gate.Gate(1, max_waiting=9, wait_s=0.1), Stream()
        async with one.acquire() as permit:
            permit.follow(stream)
            permit.await_text()
            permit.go_on()
            permit.await_text()
            with pytest.raises(gate.TooManyRequests):
                async with one.acquire():
                    pass
            permit._release()
            async with one.acquire():
                permit.go_on()
                assert one.running == 2
            assert one.running == 1
            permit.await_text()
            permit._release()
            permit.await_text()
            stream.is_ended = True
            stream.done()
            permit.await_text()
            permit.go_on()
        assert one.running == 0
        async with one.acquire():
            pass

    run(follow())
