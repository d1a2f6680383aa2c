"""Quotas of keys: limits that hold for the whole server, shares by weight, and what is counted."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import SETTINGS, Server, serving
from sessions import session
from sine_engines import Clock, nothing_left, run
from sine_models import STOPPED

from sonoro.cli.serve import _quotas as read_option
from sonoro.core.errors import ConfigError, EngineCrashed
from sonoro.server.config import ServerConfig
from sonoro.server.errors import TooManyRequests
from sonoro.server.gate import Gate
from sonoro.server.keys import ANONYMOUS
from sonoro.server.quotas.counts import OverQuota, Quotas, Used, usage_columns
from sonoro.server.quotas.limits import key_name, owner_of
from sonoro.server.shared import Shared, columns
from sonoro.transport.table import Table

__all__ = ["nothing_left"]

KEYS = ("one", "three")
ONE, THREE = map(owner_of, KEYS)
DAY_S = 24 * 3600


def config_of(**quotas: dict[str, int]) -> ServerConfig:
    """A server with two keys and an admin, and `quotas`."""
    return dataclasses.replace(SETTINGS, api_keys=KEYS, admin_keys=("root",), quotas=quotas).resolve(4)


class Counter:
    """Quotas on a clock that stands still; a request holds nothing."""

    def __init__(self, **quotas: dict[str, int]) -> None:
        self.clock, config = Clock(), config_of(**quotas)
        table, clock = Table(columns(config, 1)), self.clock
        self.quotas = Quotas(config, table, clock_ns=lambda: round(1e9 * clock()), now_s=clock)

    def passed(self, characters: int = 1, tries: int = 1000, owner: str = ONE) -> int:
        """How many of so many requests pass at once."""
        for number in range(tries):
            try:
                self.quotas.admit(owner, characters, 0)
            except OverQuota:
                return number
        return tries

    def headers(self, owner: str = ONE) -> dict[str, str]:
        return self.quotas.headers(owner)

    def refused(self, characters: int = 1, held: int = 0) -> OverQuota:
        with pytest.raises(OverQuota) as caught:
            self.quotas.admit(ONE, characters, held)
        return caught.value


@pytest.mark.parametrize("most", [1, 7, 60, 999])
def test_a_minute_has_as_many_requests_as_it_may(most: int) -> None:
    """All at once, and then evenly."""
    counter = Counter(default={"requests_per_minute": most})
    assert counter.passed() == most
    assert counter.refused().headers["Retry-After"] == str(-(-60 // most))
    counter.clock.now_s += 60 / most + 1e-6
    assert counter.passed() == 1
    counter.clock.now_s += 30 + 1e-6
    assert counter.passed() == most // 2
    counter.clock.now_s += 600
    assert counter.passed() == most


def test_a_day_has_as_many_characters_as_it_may() -> None:
    counter = Counter(default={"characters_per_day": 1000})
    counter.clock.now_s = 20 * DAY_S - 100.0
    assert counter.passed(300) == 3
    refused = counter.refused(101)
    assert refused.headers["Retry-After"] == "100"
    assert "characters_per_day" in str(refused)
    assert "900 of 1000" in str(refused)
    assert counter.passed(100) == 1
    counter.clock.now_s += 100
    assert counter.quotas.used(ONE, "characters") == Used(0, 1000)
    assert counter.passed(300) == 3
    assert counter.quotas.used(ONE, "characters") == Used(900, 1900)


def test_headers_tell_what_is_left() -> None:
    counter = Counter(default={"requests_per_minute": 60, "characters_per_day": 1000})
    counter.clock.now_s = 5 * DAY_S + DAY_S / 2
    for _ in range(3):
        counter.quotas.admit(ONE, 10, 0)
    assert counter.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "57",
        "x-ratelimit-reset-requests": "3s",
        "x-ratelimit-limit-characters": "1000",
        "x-ratelimit-remaining-characters": "970",
        "x-ratelimit-reset-characters": "43200s",
        "ratelimit-policy": '"requests";q=60;w=60, "characters";q=1000;w=86400',
        "ratelimit": '"requests";r=57;t=3, "characters";r=970;t=43200',
    }
    assert counter.passed(0) == 57
    assert counter.headers()["x-ratelimit-remaining-requests"] == "0"
    assert counter.headers(owner="") == {}


def test_what_is_taken_back_was_never_there() -> None:
    counter = Counter(default={"requests_per_minute": 5, "characters_per_day": 50})
    for _ in range(20):
        counter.quotas.admit(ONE, 50, 0)
        counter.quotas.take_back(ONE, 50)
    assert counter.quotas.used(ONE, "requests") == Used(0, 0)
    assert counter.passed(10) == 5


def test_a_refused_request_uses_nothing() -> None:
    counter = Counter(default={"requests_per_minute": 2, "characters_per_day": 50, "concurrent_requests": 3})
    assert "concurrent_requests" in str(counter.refused(held=3))
    assert counter.refused(characters=51).code == "quota_exceeded"
    assert counter.passed(10) == 2
    assert counter.quotas.used(ONE, "characters") == Used(20, 20)


def test_a_key_has_the_default_but_for_its_own_and_admins_have_no_limit() -> None:
    quotas = {"default": {"requests_per_minute": 2, "weight": 2}, key_name("three"): {"requests_per_minute": 6}}
    counter = Counter(**quotas)
    assert [counter.passed(owner=owner) for owner in (ONE, THREE, "", "stranger")] == [2, 6, 1000, 2]
    assert [counter.quotas.limits[owner].weight for owner in (ONE, THREE, "")] == [2, 2, 1]


@pytest.mark.parametrize(
    ("quotas", "words"),
    [
        ({"default": {"requests_per_minute": -1}}, ["quotas.default.requests_per_minute", "-1", "at least 0"]),
        ({"default": {"weight": 0}}, ["quotas.default.weight", "0", "at least 1 and at most 1000"]),
        ({"default": {"requests": 3}}, ["quotas.default.requests", "3", "no such key", "requests_per_minute"]),
        ({"default": {"weight": 1.5}}, ["quotas", "whole numbers"]),
        ({"two": {"weight": 2}}, [f"quotas.{key_name('two')}", key_name("one"), "default"]),
    ],
)
def test_a_wrong_quota_is_told_at_the_start(quotas: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**quotas)
    for word in words:
        assert word in str(caught.value)


def test_quotas_may_name_keys_and_show_none() -> None:
    config = config_of(one={"weight": 3})
    assert dict(config.quotas) == {key_name("one"): {"weight": 3}}
    assert "one" not in str(config.shown["quotas"])
    assert "quotas" not in config.public
    assert ServerConfig.from_mapping(config.values) == config


def test_the_option_is_read() -> None:
    read = read_option(["default=requests_per_minute:60,weight:2", "a=b=weight:3"])
    assert read == {"default": {"requests_per_minute": 60, "weight": 2}, "a=b": {"weight": 3}}
    for wrong in ("secret", "=weight:3", "secret=weight", "secret=weight:x", "secret=weight:3,"):
        with pytest.raises(ConfigError) as caught:
            read_option([wrong])
        assert "secret" not in str(caught.value)


@contextlib.contextmanager
def gates_of(config: ServerConfig, folder: Path, fronts: int) -> Iterator[list[Gate]]:
    """The gates of so many fronts of one server. Needs a running event loop."""
    Table.create(columns(config, 1), fronts, folder)
    shared = [Shared.of(config, 1, fronts, number, folder) for number in range(fronts)]
    made = [
        Gate(config.max_concurrency, 1000, 60, weights=one.weights, table=one.table, quotas=one.quotas)
        for one in shared
    ]
    try:
        for gate in made:
            gate.listen()
        yield made
    finally:
        for one in shared:
            one.table.close()


@pytest.mark.parametrize("permits", [1, 2, 3, 8])
def test_a_full_server_of_several_fronts_is_shared_by_weight(permits: int, tmp_path: Path) -> None:
    """All callers without a key together as one key."""
    shares, entered = {ONE: 1, THREE: 3, ANONYMOUS.owner: 1}, list[str]()

    async def ask(gate: Gate, owner: str) -> None:
        while len(entered) < 2000:
            async with gate.acquire(owner, 10):
                entered.append(owner)
                await asyncio.sleep(0)

    async def share() -> None:
        config = dataclasses.replace(config_of(three={"weight": 3}), max_concurrency=permits)
        with gates_of(config, tmp_path, 3) as gates:
            await asyncio.gather(*(ask(gate, owner) for owner in shares for gate in gates for _ in range(14)))
            assert {(gate.running, gate.waiting) for gate in gates} == {(0, 0)}
            served = {owner: entered.count(owner) for owner in shares}
            for gate in gates:
                assert gate._quotas is not None
                assert {owner: gate._quotas.used(owner, "requests").total for owner in served} == served
                assert gate._quotas.used(ONE, "characters").total == 10 * served[ONE]

    run(share())
    got = [entered[:2000].count(owner) / weight for owner, weight in shares.items()]
    assert 0.9 * max(got) < min(got), got


@pytest.mark.parametrize("crowd", [(11, 5), (4, 20, 8)])
@pytest.mark.parametrize("permits", [2, 6])
def test_no_front_starves_beside_one_where_more_ask(crowd: tuple[int, ...], permits: int, tmp_path: Path) -> None:
    """Clients that always ask are served alike, whichever front they have got."""
    served = [0] * len(crowd)

    async def ask(gate: Gate, front: int) -> None:
        while sum(served) < 3000:
            async with gate.acquire(ONE):
                served[front] += 1
                await asyncio.sleep(0)

    async def share() -> None:
        config = dataclasses.replace(config_of(), max_concurrency=permits)
        with gates_of(config, tmp_path, len(crowd)) as gates:
            await asyncio.gather(*(ask(gates[front], front) for front, count in enumerate(crowd) for _ in range(count)))

    run(share())
    each = [count / clients for count, clients in zip(served, crowd, strict=True)]
    assert max(each) < 1.2 * min(each), served


def test_limits_are_those_of_all_fronts(tmp_path: Path) -> None:
    """However requests fall on them."""
    config = config_of(one={"concurrent_requests": 3}, three={"requests_per_minute": 5})

    async def ask() -> None:
        with gates_of(config, tmp_path, 3) as gates:
            async with contextlib.AsyncExitStack() as held:
                for number in range(3):
                    await held.enter_async_context(gates[number % 2].acquire(ONE))
                for gate in gates:
                    with pytest.raises(OverQuota, match="concurrent_requests: this key has 3 at once"):
                        await held.enter_async_context(gate.acquire(ONE))
            for number in range(5):
                async with gates[number % 3].acquire(THREE):
                    pass
            for gate in gates:
                with pytest.raises(OverQuota, match="requests_per_minute"):
                    async with gate.acquire(THREE):
                        pass

    run(ask())


def test_what_a_dead_front_held_is_free_and_what_it_counted_stays(tmp_path: Path) -> None:
    config = config_of(one={"concurrent_requests": 1})

    async def ask() -> None:
        with gates_of(config, tmp_path, 2) as gates:
            async with gates[1].acquire(ONE, 7):
                parent = Shared.of(config, 1, 2, 0, tmp_path)
                parent.table.clear(1, usage_columns(config))
                async with gates[0].acquire(ONE, 5):
                    assert parent.quotas is not None
                    assert parent.quotas.used(ONE, "requests").total == 2
                    assert parent.quotas.used(ONE, "characters") == Used(12, 12)

    run(ask())


def test_a_request_counts_unless_it_fails_before_its_audio() -> None:
    config = config_of(default={"characters_per_day": 100})
    shared = Shared.of(config, 1)
    assert shared.quotas is not None
    used = shared.quotas.used

    async def ask() -> None:
        gate = Gate(1, 1, 0.01, weights=shared.weights, table=shared.table, quotas=shared.quotas)
        with pytest.raises(EngineCrashed):
            async with gate.acquire(ONE, 10):
                raise EngineCrashed("it ended")
        assert used(ONE, "requests").total == 0
        async with gate.acquire(ONE, 10) as permit:
            permit.append(5)
            with pytest.raises(TooManyRequests, match="no request ended"):
                async with gate.acquire(ONE, 10):
                    pass
            with pytest.raises(OverQuota):
                permit.append(86)
        with contextlib.suppress(asyncio.CancelledError):
            async with gate.acquire(ONE, 10):
                raise asyncio.CancelledError  # the client is gone
        assert used(ONE, "requests").total == 2
        assert used(ONE, "characters").total == 25

    run(ask())


def post(server: Server, key: str, path: str = "/v1/audio/speech", **body: object) -> Any:
    body = body or {"input": "Some words.", "response_format": "pcm"}
    headers = {"Authorization": f"Bearer {key}", "xi-api-key": key, "X-API-Key": key, "Cartesia-Version": "2025-04-16"}
    return server.http.post(path, json=body, headers=headers)


@pytest.mark.usefixtures("nothing_left")
def test_each_dialect_refuses_in_its_form() -> None:
    """With the same headers."""
    settings = dataclasses.replace(config_of(one={"requests_per_minute": 1}), max_concurrency=0)
    cartesia = {
        "transcript": "Some words.",
        "model_id": "any",
        "voice": {"mode": "id", "id": "low"},
        "output_format": {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 8000},
    }

    async def ask() -> None:
        async with serving(settings=settings) as server:
            spoken = await post(server, "one")
            assert spoken.status_code == 200
            assert spoken.headers["x-ratelimit-remaining-requests"] == "0"
            refused = {
                "native": await post(server, "one"),
                "elevenlabs": await post(server, "one", "/v1/text-to-speech/low", text="Some words."),
                "deepgram": await post(server, "one", "/v1/speak", text="Some words."),
                "cartesia": await post(server, "one", "/tts/bytes", **cartesia),
            }
            for answer in refused.values():
                assert answer.status_code == 429, answer.text
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert answer.headers["x-ratelimit-limit-requests"] == "1"
                assert answer.headers["ratelimit-policy"] == '"requests";q=1;w=60'
            assert refused["native"].json()["error"]["code"] == "rate_limit_exceeded"
            assert refused["native"].json()["error"]["type"] == "rate_limit_error"
            assert refused["elevenlabs"].json()["detail"]["status"] == "rate_limit_exceeded"
            assert refused["deepgram"].json()["err_code"] == "RATE_LIMIT_EXCEEDED"
            assert "requests_per_minute" in refused["cartesia"].text
            assert (await post(server, "three")).status_code == 200
            assert "x-ratelimit-limit-requests" not in (await post(server, "root")).headers

    run(ask())


async def usage(server: Server, key: str) -> list[dict[str, Any]]:
    answer = await server.http.get("/v1/usage", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


@pytest.mark.usefixtures("nothing_left")
def test_each_key_sees_its_own_usage_and_an_admin_all() -> None:
    """Batches and live text included, each text as a request; silence is none."""
    settings = dataclasses.replace(config_of(one={"characters_per_day": 100, "stored_voices": 7}), max_concurrency=0)

    async def ask() -> None:
        async with serving("live", settings) as server:
            await post(server, "one")
            batch = await post(server, "one", "/v1/audio/speech/batch", items=[{"input": "Words."}] * 3)
            assert batch.json()["succeeded"] == 3
            await post(server, "one", input="!")
            bad = await post(server, "one", input="Words.", voice="nobody")
            assert bad.status_code == 404
            async with session(server, additional_headers={"Authorization": "Bearer one"}) as client:
                await client.speak("Some ", "words.")
                # In one piece: of two, the first might be heard, and so be counted, before the second is refused.
                await client.speak("Some words that are too many for this day, after the others of before.")
            [mine] = await usage(server, "one")
            assert mine["key"] == key_name("one")
            assert mine["requests"] == {"today": 5, "total": 5}
            assert mine["characters"] == {"today": 11 + 18 + 11, "total": 40}
            assert (mine["concurrent_requests"], mine["stored_voices"]) == (0, 0)
            none = dict.fromkeys(("concurrent_requests", "requests_per_minute"))
            assert mine["limits"] == {**none, "characters_per_day": 100, "stored_voices": 7, "weight": 1}
            seen = {one["key"]: one["requests"]["total"] for one in await usage(server, "root")}
            assert seen == {"admin": 0, "anonymous": 0, key_name("one"): 5, key_name("three"): 0}
            text = (await server.http.get("/metrics")).text
            assert f'sonoro_key_requests_total{{key="{key_name("one")}"}} 5.0' in text
            assert f'sonoro_key_characters_total{{key="{key_name("one")}"}} 40.0' in text
            assert (await server.http.get("/v1/usage")).status_code == 401

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_text_beyond_the_day_ends_its_utterance() -> None:
    settings = dataclasses.replace(config_of(one={"characters_per_day": 20}), max_concurrency=0)

    async def speak() -> None:
        async with (
            serving("live", settings) as server,
            session(server, additional_headers={"Authorization": "Bearer one"}) as client,
        ):
            await client.say("input.text", text="Some words come.")
            assert (await client.hear())["type"] == "audio.start"
            await client.say("input.text", text=" And others.")
            _, events = await client.listen()
            assert events[-1]["type"] == "error"
            assert events[-1]["error"]["code"] == "quota_exceeded"
            [mine] = await usage(server, "one")
            assert mine["characters"]["total"] == 16

    run(speak())


@pytest.mark.usefixtures("nothing_left")
def test_a_key_has_as_many_requests_at_once_as_it_may(tmp_path: Path) -> None:
    settings = dataclasses.replace(config_of(default={"concurrent_requests": 2}), max_concurrency=4)

    async def ask() -> None:
        async with serving(f"{STOPPED}{tmp_path / 'go'}", settings) as server:
            running = [asyncio.create_task(post(server, "one")) for _ in range(2)]
            while (await usage(server, "one"))[0]["concurrent_requests"] < 2:
                await asyncio.sleep(0.01)
            refused: httpx.Response = await post(server, "one")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "too_many_concurrent_requests"
            running.append(asyncio.create_task(post(server, "three")))
            (tmp_path / "go").touch()
            assert [(await task).status_code for task in running] == [200] * 3
            assert (await post(server, "one")).status_code == 200

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_without_keys_the_default_is_that_of_all_callers() -> None:
    settings = dataclasses.replace(SETTINGS, quotas={"default": {"requests_per_minute": 2}})

    async def ask() -> None:
        async with serving(settings=settings) as server:
            assert [(await server.speak()).status_code for _ in range(3)] == [200, 200, 429]
            [found] = (await server.http.get("/v1/usage")).json()["data"]
            assert (found["key"], found["requests"]["total"]) == ("all", 2)
        async with serving() as server:
            assert (await server.http.get("/v1/usage")).status_code == 404

    run(ask())
