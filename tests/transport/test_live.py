"""Live text over the link to an engine process: in order, lost nowhere, and ended whatever becomes of either side."""

import asyncio
import contextlib
import os
import signal

import pytest
from sine_engines import CONFIG, alone, engines, gather, launch, nothing_left, run, until

from sonoro.core.errors import EngineCrashed, InvalidRequest
from sonoro.core.types import Finished, SpeechRequest
from sonoro.transport.client import EngineClient, RequestStream

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

TEXT = "A text that comes in pieces, a word at a time, while it is being spoken to the end. "


def live(name: str, text: str = "", **fields: object) -> SpeechRequest:
    return SpeechRequest(id=name, text=text, is_live=True, **fields)


async def first_audio(answer: RequestStream) -> bytes:
    event = await anext(answer)
    assert not isinstance(event, Finished)
    return event.pcm


async def is_idle(client: EngineClient) -> bool:
    stats = await client.stats()
    return (stats.running, stats.waiting, stats.paused, stats.free_slots) == (0, 0, 0, CONFIG.slots)


async def feed(answer: RequestStream, text: str) -> None:
    """A word at a time, each in a turn of the loop of its own."""
    for word in text.split(" ")[:-1]:
        answer.append_text(word + " ")
        await asyncio.sleep(0.002)
    answer.end_text()


def test_pieces_from_several_sides_give_the_answers_of_whole_texts() -> None:
    async def speak() -> None:
        async with launch("live") as client:
            texts = {str(number): TEXT * (1 + number % 3) for number in range(12)}
            answers = [await client.open(live(name, seed=int(name))) for name in texts]
            feeding = [asyncio.create_task(feed(*item)) for item in zip(answers, texts.values(), strict=True)]
            heard = await asyncio.gather(*map(gather, answers))
            await asyncio.gather(*feeding)
            for (name, text), (pcm, finished) in zip(texts.items(), heard, strict=True):
                assert (finished.reason, finished.characters) == ("stop", len(text))
                assert pcm == alone(SpeechRequest(id=name, text=text, seed=int(name))), name
            assert await is_idle(client)

    run(speak())


def test_what_is_no_text_is_refused_at_once_and_harms_nobody() -> None:
    async def speak() -> None:
        async with launch("live") as client:
            async with contextlib.aclosing(await client.open(live("a", "Hello "))) as answer:
                for wrong in ("\ud83d", b"bytes", None, 5):
                    with pytest.raises(InvalidRequest) as refusal:
                        answer.append_text(wrong)
                    assert refusal.value.field == "text"
                answer.append_text("there.")
                answer.end_text()
                pcm, finished = await gather(answer)
            assert (pcm, finished.reason) == (alone(SpeechRequest(id="a", text="Hello there.")), "stop")
            answer.append_text("It has ended.")
            answer.end_text()
            for texts, reason in (([TEXT * 4, None, "More."], "already ended"), ([" ... ", None], "can be spoken")):
                answer = await client.open(live("a"))
                for text in texts:
                    answer.end_text() if text is None else answer.append_text(text)
                with pytest.raises(InvalidRequest, match=reason):
                    await gather(answer)
            assert await is_idle(client)

    run(speak())


def test_a_request_that_waits_for_text_can_be_cancelled_and_left() -> None:
    async def leave() -> None:
        async with launch("live") as client:
            answer = await client.open(live("a", "Hello there"))
            heard = await first_audio(answer)
            answer.cancel()
            rest, finished = await gather_rest(answer)
            assert finished.reason == "cancelled"
            # A frame is 80 samples of 16 bits, and lasts 10 ms; ordinary speech has 15 letters a second. Where all
            # frames of the text are made by then, its share of them counts, which is less.
            assert len(heard + rest) == finished.frames * 160
            assert 0 <= finished.characters <= int(finished.frames * 0.01 * 15)
            for text in ("", "Hello there"):
                answer = await client.open(live("a", text))
                await answer.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(answer)
            await until(lambda: is_idle(client))
            launches = (await client.stats()).launches
            async with contextlib.aclosing(await client.open(live("b", "Waits"))):
                await until(lambda: frames_made(client, launches["frame"]["eager"] + 4))
                made = (await client.stats()).launches
                await asyncio.sleep(0.1)
                assert (await client.stats()).launches == made

    run(leave())


async def frames_made(client: EngineClient, count: int) -> bool:
    return (await client.stats()).launches["frame"]["eager"] >= count


async def gather_rest(answer: RequestStream) -> tuple[bytes, Finished]:
    events = [event async for event in answer]
    assert isinstance(events[-1], Finished)
    return b"".join(event.pcm for event in events[:-1]), events[-1]


def test_a_killed_engine_fails_live_requests_and_the_next_one_serves() -> None:
    async def kill() -> None:
        async with launch("live") as client:
            speaking = await client.open(live("a", "Hello there"))
            silent = await client.open(live("b"))
            await first_audio(speaking)
            (engine,) = engines()
            os.kill(engine, signal.SIGKILL)
            for answer in (speaking, silent):
                with pytest.raises(EngineCrashed):
                    await gather_rest(answer)
            speaking.append_text("Nobody hears it.")
            silent.end_text()
            answer = await client.open(live("a", "Hello "))
            await feed(answer, "to all of you. ")
            pcm, _ = await gather(answer)
            assert pcm == alone(SpeechRequest(id="a", text="Hello to all of you."))

    run(kill())
