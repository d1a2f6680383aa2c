"""Voices registered in an engine process: seen by its client, kept when it dies, and nobody waits for them."""

import asyncio
import dataclasses
import os
import signal
from tempfile import TemporaryDirectory

import pytest

from engine_processes import CONFIG, LONG, engines, gather, launch, nothing_left, run, until
from listening import reference
from sonoro.core.errors import EngineClosed, EngineCrashed, InvalidRequest, UnknownVoice, VoiceExists
from sonoro.core.types import AudioChunk, Reference, SpeechRequest
from sonoro.transport.client import EngineClient

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")


def said(text: str) -> tuple[Reference, ...]:
    made = reference()
    return (Reference(pcm=made.pcm, sample_rate=made.sample_rate, text=text),)


def names(client: EngineClient) -> list[str]:
    return [facts.name for facts in client.voices]


async def pcm_of(client: EngineClient, **fields: object) -> bytes:
    pcm, finished = await gather(client.stream(SpeechRequest(id="a", text="Some words.", **fields)))
    assert finished.reason == "stop"
    return pcm


def test_voices_are_added_listed_spoken_and_deleted() -> None:
    async def talk() -> None:
        async with launch() as client:
            assert client.voices == ()
            facts, other = await asyncio.gather(
                client.add_voice("Bert", said("hm"), "he agreed"), client.add_voice("anna", (reference("reference"),))
            )
            assert client.voices == (other, facts)
            assert (facts.name, facts.use, facts.transcript, facts.consent) == ("bert", "prompt", "hm", "he agreed")
            assert await pcm_of(client, voice="bert") == await pcm_of(client, references=said("hm"))
            for name, kind in (("bert", VoiceExists), ("../bert", InvalidRequest), ("high", InvalidRequest)):
                with pytest.raises(kind) as refusal:
                    await client.add_voice(name, said("hm"))
                assert (type(refusal.value), refusal.value.field) == (kind, "name")
            with pytest.raises(InvalidRequest, match="every field must be of its type"):
                await client.add_voice("carl", ("a.wav",))
            await client.delete_voice("BERT")
            assert names(client) == ["anna"]
            for unknown in (client.delete_voice("bert"), pcm_of(client, voice="bert")):
                with pytest.raises(UnknownVoice):
                    await unknown

    run(talk())


def test_a_process_that_is_killed_is_replaced_by_one_with_the_same_voices() -> None:
    async def kill(folder: str) -> None:
        async with launch(config=dataclasses.replace(CONFIG, voices_folder=folder)) as client:
            for name in ("anna", "bert", "carl"):
                await client.add_voice(name, said(name))
            await client.delete_voice("bert")
            before, pcm = client.voices, await pcm_of(client, voice="carl")
            [pid] = engines()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: client.restarts == 1 and client.is_ready)
            assert client.voices == before
            assert names(client) == ["anna", "carl"]
            assert await pcm_of(client, voice="carl") == pcm
            assert client.closed_reason is None
        assert client.closed_reason == "the engine was closed"
        with pytest.raises(EngineClosed):
            await client.add_voice("late", said("hm"))

    with TemporaryDirectory() as folder:
        run(kill(folder))


def test_without_a_folder_voices_are_gone_with_the_process() -> None:
    async def kill() -> None:
        async with launch("slow voices") as client:
            await client.add_voice("anna", said("hm"))
            with pytest.raises(EngineCrashed):
                await client.add_voice("bert", said("die"))
            await until(lambda: client.restarts == 1 and client.is_ready)
            assert client.voices == ()

    run(kill())


def test_a_stream_goes_on_while_a_voice_is_encoded() -> None:
    """Which takes half a second, in which the stream makes a frame in 5 ms: it is heard before the voice is there."""

    async def talk() -> None:
        async with launch("slow voices", dataclasses.replace(CONFIG, chunk_frames=(1,))) as client:
            stream = client.stream(SpeechRequest(id="steady", text=LONG, ignore_eos=True, max_frames=500))
            await anext(stream)
            adding = asyncio.create_task(client.add_voice("anna", said("hm")))
            cloning = asyncio.create_task(pcm_of(client, references=said("another")))
            heard = 0
            async for event in stream:
                if adding.done():
                    break
                heard += isinstance(event, AudioChunk)
            assert heard >= 3
            assert (await adding).name == "anna"
            await cloning
            await stream.aclose()

    run(talk())


def test_one_who_leaves_before_the_voice_is_there_harms_nobody() -> None:
    async def leave() -> None:
        async with launch("slow voices") as client:
            adding = asyncio.create_task(client.add_voice("anna", said("hm")))
            cloning = asyncio.create_task(pcm_of(client, references=said("another")))
            await asyncio.sleep(0.1)
            for task in (adding, cloning):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda: names(client) == ["anna"])
            assert await pcm_of(client, voice="anna")
            stats = await client.stats()
            assert (stats.running, stats.waiting, stats.free_slots) == (0, 0, CONFIG.slots)

    run(leave())
