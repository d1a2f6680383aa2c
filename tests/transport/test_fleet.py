"""Several engines as one: who gets a request, what a crash takes with it, and voices that all of them speak."""

import asyncio
import dataclasses
import os
import signal

import pytest
from processes import GUARD_S
from sine_engines import CONFIG, LONG, alone, engines, gather, launch_fleet, nothing_left, reference, run, until

from sonoro.core.errors import (
    CheckpointNotFound,
    ConfigError,
    EngineClosed,
    EngineCrashed,
    InvalidRequest,
)
from sonoro.core.types import Finished, Reference, SpeechRequest
from sonoro.transport.client import RequestStream
from sonoro.transport.fleet import Fleet, device_list

__all__ = ["nothing_left"]

# The folder of a test is made before that of its links, which must be empty at the end.
pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")


def request(name: str, text: str = LONG, **fields: object) -> SpeechRequest:
    return SpeechRequest(id=name, text=text, **fields)


def endless(name: str, **fields: object) -> SpeechRequest:
    """Two and a half seconds of the slow model."""
    return request(name, ignore_eos=True, max_frames=500, **fields)


def said(text: str) -> tuple[Reference, ...]:
    made = reference()
    return (Reference(pcm=made.pcm, sample_rate=made.sample_rate, text=text),)


def counts(fleet: Fleet) -> list[int]:
    return [client.open_requests for client in fleet.replicas]


async def hear(fleet: Fleet, made: SpeechRequest) -> tuple[bytes, Finished]:
    return await gather(await fleet.open(made))


async def place_of(fleet: Fleet, made: SpeechRequest) -> int:
    """Which engine is given a request; it is cancelled then."""
    answer = await fleet.open(made)
    (place,) = (at for at, client in enumerate(fleet.replicas) if client.has_request(made.id))
    answer.cancel()
    await gather(answer)
    return place


async def kill_one(fleet: Fleet) -> int:
    """Kill an engine; which of them it was, once that has been noticed."""
    os.kill(min(engines()), signal.SIGKILL)
    await until(lambda: not all(client.is_ready for client in fleet.replicas))
    (place,) = (at for at, client in enumerate(fleet.replicas) if not client.is_ready)
    return place


async def is_whole(fleet: Fleet) -> bool:
    return all(client.is_ready for client in fleet.replicas)


def test_requests_go_where_there_is_least_to_do_and_are_answered_as_by_one() -> None:
    async def ask() -> None:
        async with launch_fleet("slow") as fleet:
            assert (fleet.is_ready, fleet.spec.name, fleet.closed_reason) == (True, "sine", None)
            opened: list[RequestStream] = []
            for number in range(2 * CONFIG.slots):
                opened.append(await fleet.open(request(str(number), seed=number)))
                assert max(counts(fleet)) - min(counts(fleet)) <= 2
            assert counts(fleet) == [CONFIG.slots] * 2, "no slot is free while a request waits"
            for number, answer in enumerate(opened):
                pcm, finished = await gather(answer)
                assert (pcm, finished.request_id) == (alone(request(str(number), seed=number)), str(number))
            assert counts(fleet) == [0, 0]

    run(ask())


def test_a_voice_is_spoken_where_it_was_unless_that_engine_is_busier() -> None:
    async def ask() -> None:
        async with launch_fleet("slow") as fleet:
            low, high = (
                await place_of(fleet, request("a", voice="low")),
                await place_of(fleet, request("b", voice="high")),
            )
            assert {low, high} == {0, 1}
            for number in range(3):
                assert await place_of(fleet, request(str(number), voice="LOW")) == low
                assert await place_of(fleet, request(str(number), voice="high")) == high
            digest = (await fleet.encode_voice(said("of hers"))).digest
            for cloned in ({"references": said("hm")}, {"voice": "anna", "voice_digest": digest}):
                place = await place_of(fleet, request("c", **cloned))
                await place_of(fleet, request("d", references=said("another")))
                assert await place_of(fleet, request("c", **cloned)) == place
                busy = [await fleet.open(endless(f"e{number}", **cloned)) for number in range(2)]
                assert counts(fleet)[place] == 2, "one request more is no reason to fetch a voice"
                assert await place_of(fleet, request("f", **cloned)) != place
                for answer in busy:
                    await answer.aclose()
                await until(lambda: counts(fleet) == [0, 0])

    run(ask())


def test_a_voice_of_the_model_is_at_hand_everywhere() -> None:
    async def ask() -> None:
        # To fetch a voice counts as two requests here.
        async with launch_fleet("slow", config=dataclasses.replace(CONFIG, slots=16)) as fleet:
            for voice in ({"voice": "low"}, {"speaker_embedding": (3.0, 4.0)}, {}):
                await place_of(fleet, request("a", **voice))
                busy = [await fleet.open(endless(str(number), **voice)) for number in range(4)]
                assert counts(fleet) == [2, 2]
                for answer in busy:
                    await answer.aclose()
                await until(lambda: counts(fleet) == [0, 0])

    run(ask())


def test_what_is_said_of_a_request_goes_where_it_is() -> None:
    async def talk() -> None:
        async with launch_fleet("slow_live") as fleet:
            pieces = ["These are the words of all of them. ", "And these come later."]
            live = [request(str(number), "", is_live=True, seed=number) for number in range(4)]
            answers = [await fleet.open(made) for made in live]
            assert counts(fleet) == [2, 2]
            with pytest.raises(InvalidRequest, match="still running"):
                await fleet.open(live[3])
            for answer in answers[:3]:
                for piece in pieces:
                    answer.append_text(piece)
                answer.end_text()
            answers[3].cancel()
            reasons = [(await gather(answer))[1].reason for answer in answers]
            assert reasons == ["stop", "stop", "stop", "cancelled"]

    run(talk())


def test_an_engine_that_is_killed_takes_its_own_requests_alone_and_comes_back() -> None:
    async def kill() -> None:
        async with launch_fleet("slow") as fleet:
            made = [endless(str(number), seed=number) for number in range(6)]
            answers = [await fleet.open(one) for one in made]
            homes = [next(at for at, client in enumerate(fleet.replicas) if client.has_request(one.id)) for one in made]
            heard = [asyncio.create_task(gather(answer)) for answer in answers]
            await asyncio.sleep(0.2)
            lost = await kill_one(fleet)
            assert (fleet.is_ready, fleet.ready_share, fleet.closed_reason) == (True, 0.5, None)
            async with asyncio.timeout(GUARD_S):
                for task in (task for task, home in zip(heard, homes, strict=True) if home == lost):
                    with pytest.raises(EngineCrashed):
                        await task
            while not await is_whole(fleet):
                assert (await hear(fleet, request("new", "Some words.")))[1].reason == "stop"
            for one, task, home in zip(made, heard, homes, strict=True):
                if home != lost:
                    assert (await task)[0] == alone(one)
            assert [client.restarts for client in fleet.replicas] == [int(at == lost) for at in range(2)]
            again = [await fleet.open(endless(f"again {number}")) for number in range(2 * CONFIG.slots)]
            assert counts(fleet) == [CONFIG.slots] * 2
            for answer in again:
                await answer.aclose()

    run(kill())


def test_while_no_engine_runs_a_request_waits_for_the_first() -> None:
    async def kill() -> None:
        async with launch_fleet() as fleet:
            for process in engines():
                os.kill(process, signal.SIGKILL)
            await until(lambda: not fleet.is_ready)
            assert fleet.ready_share == 0.0, "whoever waits for a place has none to wait for yet"
            pcm, _ = await hear(fleet, request("a"))
            assert pcm == alone(request("a"))

    run(kill())


def test_an_engine_that_is_given_up_leaves_the_others() -> None:
    async def kill() -> None:
        async with launch_fleet(max_restarts=0) as fleet:
            lost = await kill_one(fleet)
            await until(lambda: fleet.replicas[lost].closed_reason is not None)
            assert fleet.closed_reason is None
            for number in range(3):
                assert (await hear(fleet, request(str(number), "Some words.")))[1].reason == "stop"
            assert (await fleet.encode_voice(said("hm"))).data
            for process in engines():
                os.kill(process, signal.SIGKILL)
            await until(lambda: fleet.closed_reason is not None)
            assert fleet.ready_share == 1.0, "nobody waits for what will not come"
            for refused in (fleet.open(request("a")), fleet.encode_voice(said("hm"))):
                with pytest.raises(EngineClosed):
                    await refused

    run(kill())


def test_every_engine_speaks_every_voice_whichever_encoded_it() -> None:
    async def talk() -> None:
        async with launch_fleet() as fleet:
            voice, asked = await fleet.encode_voice(said("hm")), []

            async def source(digest: str) -> bytes:
                asked.append(digest)
                return voice.data

            fleet.set_voice_source(source)
            made = request("a", voice="anna", voice_digest=voice.digest)
            spoken = {(await gather(client.stream(made)))[0] for client in fleet.replicas}
            assert len(spoken) == 1
            assert asked == [voice.digest], "of two engines one has it"
            lost = await kill_one(fleet)
            await hear(fleet, made)
            await until(lambda: is_whole(fleet))
            assert {(await gather(fleet.replicas[lost].stream(made)))[0]} == spoken

    run(talk())


def test_a_voice_is_first_spoken_where_it_was_encoded() -> None:
    async def talk() -> None:
        async with launch_fleet() as fleet:
            fleet.set_voice_source(never)
            for text in ("one", "another", "a third"):
                voice = await fleet.encode_voice(said(text))
                await hear(fleet, request("a", voice="anna", voice_digest=voice.digest))

    async def never(digest: str) -> bytes:
        raise AssertionError(digest)

    run(talk())


def test_closing_fails_what_is_running_and_what_is_registered() -> None:
    async def close() -> None:
        fleet = launch_fleet("slow voices")
        async with fleet:
            heard = [asyncio.create_task(hear(fleet, endless(str(number)))) for number in range(4)]
            adding = asyncio.create_task(fleet.encode_voice(said("hm")))
            await until(lambda: counts(fleet) == [2, 2])
        for task in (*heard, adding):
            with pytest.raises(EngineClosed):
                await task
        assert not fleet.is_ready

    run(close())


def test_a_fleet_that_cannot_start_says_why() -> None:
    async def start() -> None:
        with pytest.raises(CheckpointNotFound, match="no folder 'missing'"):
            async with launch_fleet("missing"):
                pytest.fail("it started")

    run(start())


def test_devices_are_numbers_of_gpus_or_cpus() -> None:
    assert device_list("0,1, cuda:3") == ("cuda:0", "cuda:1", "cuda:3")
    assert device_list("cpu,cpu") == ("cpu", "cpu")
    for text, words in (
        ("0,0", "cuda:0 is named twice"),
        ("1,cpu,cuda:1", "cuda:1 is named twice"),
        ("0,tpu:1", "'tpu:1'"),
        ("auto", "'auto'"),
        ("0,", "''"),
        ("-1", "'-1'"),
        ("", "''"),
    ):
        with pytest.raises(ConfigError, match=words) as refusal:
            device_list(text)
        assert refusal.value.field == "devices"
