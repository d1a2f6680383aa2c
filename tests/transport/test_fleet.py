"""Several engines as one: who gets a request, what a crash takes with it, and voices that all of them know."""

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import pytest

from engine_processes import CONFIG, LONG, alone, engines, gather, launch_fleet, nothing_left, run, until
from guard import GUARD_S
from listening import reference
from sonoro.core.errors import (
    CheckpointNotFound,
    ConfigError,
    EngineClosed,
    EngineCrashed,
    InvalidRequest,
    UnknownVoice,
)
from sonoro.core.types import Finished, Reference, SpeechRequest
from sonoro.transport.answer import Answer
from sonoro.transport.client import EngineClient
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


def names(client: EngineClient | Fleet) -> list[str]:
    return [facts.name for facts in client.voices]


async def hear(fleet: Fleet, made: SpeechRequest) -> tuple[bytes, Finished]:
    return await gather(await fleet.open(made))


async def place_of(fleet: Fleet, made: SpeechRequest) -> int:
    """Which engine is given a request; it is cancelled then."""
    answer = await fleet.open(made)
    (place,) = (at for at, client in enumerate(fleet.replicas) if client.holds(made.id))
    fleet.cancel(made.id)
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
            opened: list[Answer] = []
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
            await fleet.add_voice("anna", said("of hers"))
            for cloned in ({"references": said("hm")}, {"voice": "Anna"}):
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
            for made in live[:3]:
                for piece in pieces:
                    fleet.append(made.id, piece)
                fleet.end_text(made.id)
            fleet.cancel("3")
            fleet.cancel("of nobody")
            fleet.append("of nobody", "Words.")
            reasons = [(await gather(answer))[1].reason for answer in answers]
            assert reasons == ["stop", "stop", "stop", "cancelled"]
            with pytest.raises(InvalidRequest, match="text"):
                fleet.append("of nobody", "\ud800")

    run(talk())


def test_an_engine_that_is_killed_takes_its_own_requests_alone_and_comes_back() -> None:
    async def kill() -> None:
        async with launch_fleet("slow") as fleet:
            made = [endless(str(number), seed=number) for number in range(6)]
            answers = [await fleet.open(one) for one in made]
            homes = [next(at for at, client in enumerate(fleet.replicas) if client.holds(one.id)) for one in made]
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
            assert (fleet.restarts, fleet.replicas[lost].restarts) == (1, 1)
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
            facts = await fleet.add_voice("anna", said("hm"))
            assert fleet.voices == (facts,)
            for process in engines():
                os.kill(process, signal.SIGKILL)
            await until(lambda: fleet.closed_reason is not None)
            assert fleet.ready_share == 1.0, "nobody waits for what will not come"
            for refused in (fleet.open(request("a")), fleet.delete_voice("anna")):
                with pytest.raises(EngineClosed):
                    await refused

    run(kill())


@pytest.mark.parametrize("place", ["{folder}", "file://{folder}", ""], ids=["folder", "bucket", "no folder"])
def test_every_engine_knows_every_voice(place: str, tmp_path: Path) -> None:
    async def talk() -> None:
        config = dataclasses.replace(CONFIG, voices_folder=place.format(folder=tmp_path))
        async with launch_fleet(config=config) as fleet:
            facts = await fleet.add_voice("Anna", said("hm"), "she agreed")
            other = await fleet.add_voice("bert", (reference("reference"),))
            for client in (fleet, *fleet.replicas):
                assert client.voices == (facts, other)
            spoken = {(await gather(client.stream(request("a", voice="anna"))))[0] for client in fleet.replicas}
            assert len(spoken) == 1
            lost = await kill_one(fleet)
            late = await fleet.add_voice("carl", said("while one is away"))
            await fleet.delete_voice("BERT")
            for number in range(3):
                await hear(fleet, request(str(number), "Some words.", voice="carl"))
            await until(lambda: fleet.replicas[lost].voices == (facts, late))
            assert {(await gather(fleet.replicas[lost].stream(request("a", voice="anna"))))[0]} == spoken
            # Another voice of the same name is another voice.
            await fleet.delete_voice("carl")
            await fleet.add_voice("carl", said("hm"))
            for client in fleet.replicas:
                assert {(await gather(client.stream(request("a", voice="carl"))))[0]} == spoken
            with pytest.raises(UnknownVoice):
                await hear(fleet, request("a", voice="bert"))
        assert sorted(path.stem for path in tmp_path.iterdir()) == (["anna", "carl"] if place else [])

    run(talk())


def test_an_engine_that_dies_while_it_is_told_of_a_voice_is_not_waited_for() -> None:
    async def kill() -> None:
        async with launch_fleet() as fleet:
            keeper, other = fleet.replicas
            process = await stop(other, of=fleet)
            adding = asyncio.create_task(fleet.add_voice("anna", said("hm")))
            await until(lambda: names(keeper) == ["anna"])
            os.kill(process, signal.SIGKILL)
            await adding
            assert not other.is_ready
            await until(lambda: names(other) == ["anna"])

    run(kill())


async def stop(wanted: EngineClient, of: Fleet) -> int:
    """Stop the process of one of the engines, which then says nothing; its id."""
    for process in engines():
        os.kill(process, signal.SIGSTOP)
        asked = {asyncio.create_task(client.stats()): client for client in of.replicas}
        said, silent = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert len(said) == 1
        for task in silent:
            task.cancel()
        if asked[silent.pop()] is wanted:
            return process
        os.kill(process, signal.SIGCONT)
    raise AssertionError("no process was that of the engine")


def test_many_who_look_for_voices_at_once_look_together(tmp_path: Path) -> None:
    async def look() -> None:
        config = dataclasses.replace(CONFIG, voices_folder=str(tmp_path))
        async with launch_fleet(config=config, count=1) as fleet, launch_fleet(config=config, count=1) as other:
            (client,) = fleet.replicas
            refresh, looks = client.refresh_voices, 0

            async def counted() -> None:
                nonlocal looks
                looks += 1
                await refresh()

            client.refresh_voices = counted
            first = [asyncio.create_task(fleet.refresh_voices()) for _ in range(20)]
            await until(lambda: looks == 1)
            await other.add_voice("anna", said("hm"))
            later = [asyncio.create_task(fleet.refresh_voices()) for _ in range(20)]
            later.pop().cancel()
            await asyncio.gather(*first, *later)
            assert names(fleet) == ["anna"]
            assert looks <= 3
            await other.delete_voice("anna")
            await fleet.refresh_voices()
            assert names(fleet) == []

    run(look())


def test_a_voice_kept_by_an_engine_that_then_died_is_found_by_the_others() -> None:
    async def kill() -> None:
        async with launch_fleet() as fleet:
            keeper, other = fleet.replicas
            # As if it had died with its answer: nobody is told.
            await keeper.add_voice("anna", said("hm"))
            assert names(other) == []
            await fleet.refresh_voices()
            assert names(other) == names(fleet) == ["anna"]

    run(kill())


def test_a_voice_whose_sender_leaves_is_registered_everywhere() -> None:
    async def leave() -> None:
        async with launch_fleet("slow voices") as fleet:
            adding = asyncio.create_task(fleet.add_voice("anna", said("hm")))
            await asyncio.sleep(0.1)
            adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding
            await until(lambda: [names(client) for client in fleet.replicas] == [["anna"]] * 2)

    run(leave())


def test_closing_fails_what_is_running_and_what_is_registered() -> None:
    async def close() -> None:
        fleet = launch_fleet("slow voices")
        async with fleet:
            heard = [asyncio.create_task(hear(fleet, endless(str(number)))) for number in range(4)]
            adding = asyncio.create_task(fleet.add_voice("anna", said("hm")))
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
