"""Voices encoded in an engine process, and given to it by digest: nobody else waits for them."""

import asyncio
import dataclasses
import os
import signal

import pytest
from sine_engines import CONFIG, LONG, engines, gather, launch, nothing_left, reference, run, until

from sonoro.core.errors import EngineClosed, EngineCrashed, InvalidRequest, UnknownVoice
from sonoro.core.types import AudioChunk, Reference, SpeechRequest
from sonoro.transport.client import EngineClient

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")


def said(text: str) -> tuple[Reference, ...]:
    made = reference()
    return (Reference(pcm=made.pcm, sample_rate=made.sample_rate, text=text),)


def named(name: str, digest: str) -> SpeechRequest:
    """A request for a registered voice, as a server resolves it."""
    return SpeechRequest(id=name, text="Some words.", voice="anna", voice_digest=digest)


async def pcm_of(client: EngineClient, **fields: object) -> bytes:
    return await pcm(client, SpeechRequest(id="a", text="Some words.", **fields))


async def pcm(client: EngineClient, made: SpeechRequest) -> bytes:
    heard, finished = await gather(client.stream(made))
    assert finished.reason == "stop"
    return heard


def test_a_voice_is_encoded_and_spoken_by_its_digest() -> None:
    async def talk() -> None:
        async with launch() as client:
            voice, other = await asyncio.gather(
                client.encode_voice(said("hm")), client.encode_voice((reference("reference"),))
            )
            assert voice.digest != other.digest
            assert await pcm(client, named("a", voice.digest)) == await pcm_of(client, references=said("hm"))
            assert await pcm(client, named("a", other.digest)) == await pcm_of(
                client, references=(reference("reference"),)
            )
            with pytest.raises(InvalidRequest, match="every field must be of its type"):
                await client.encode_voice(("a.wav",))
            with pytest.raises(UnknownVoice, match="no voices are stored here"):
                await pcm(client, named("a", "0af3"))

    run(talk())


def test_a_process_that_replaces_another_is_given_the_voices_it_is_asked_for() -> None:
    async def kill() -> None:
        async with launch() as client:
            voice, asked = await client.encode_voice(said("hm")), []

            async def source(digest: str) -> bytes:
                asked.append(digest)
                if digest != voice.digest:
                    raise UnknownVoice("voice", "anna", "it has just been deleted")
                return voice.data

            client.voice_source = source
            before = await pcm(client, named("a", voice.digest))
            assert asked == [], "whoever encoded it has it"
            [pid] = engines()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: client.restarts == 1 and client.is_ready)
            made = [pcm(client, named(str(number), voice.digest)) for number in range(3)]
            assert set(await asyncio.gather(*made)) == {before}
            assert asked == [voice.digest]
            with pytest.raises(UnknownVoice, match="just been deleted"):
                await pcm(client, named("a", "0af3"))
            assert client.closed_reason is None
        assert client.closed_reason == "the engine was closed"
        with pytest.raises(EngineClosed):
            await client.encode_voice(said("hm"))

    run(kill())


def test_who_waits_for_a_voice_hears_that_its_process_died() -> None:
    async def kill() -> None:
        async with launch("slow voices") as client:
            with pytest.raises(EngineCrashed):
                await client.encode_voice(said("die"))

    run(kill())


def test_a_stream_goes_on_while_a_voice_is_encoded() -> None:
    """Which takes half a second, in which the stream makes a frame in 5 ms: it is heard before the voice is there."""

    async def talk() -> None:
        async with launch("slow voices", dataclasses.replace(CONFIG, chunk_frames=(1,))) as client:
            stream = client.stream(SpeechRequest(id="steady", text=LONG, ignore_eos=True, max_frames=500))
            await anext(stream)
            adding = asyncio.create_task(client.encode_voice(said("hm")))
            cloning = asyncio.create_task(pcm_of(client, references=said("another")))
            heard = 0
            async for event in stream:
                if adding.done():
                    break
                heard += isinstance(event, AudioChunk)
            assert heard >= 3
            assert (await adding).data
            await cloning
            await stream.aclose()

    run(talk())


def test_one_who_leaves_before_the_voice_is_there_harms_nobody() -> None:
    async def leave() -> None:
        async with launch("slow voices") as client:
            adding = asyncio.create_task(client.encode_voice(said("hm")))
            cloning = asyncio.create_task(pcm_of(client, references=said("another")))
            await asyncio.sleep(0.1)
            for task in (adding, cloning):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await pcm_of(client, references=said("hm"))
            stats = await client.stats()
            assert (stats.running, stats.waiting, stats.free_slots) == (0, 0, CONFIG.slots)

    run(leave())
