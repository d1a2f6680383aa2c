"""The usage of keys is exact: over front processes and their deaths, batches and restarts, in file and metrics."""

import asyncio
import dataclasses
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest
import servers
from front_servers import BODY, Server, pids, serving
from processes import GUARD_S
from sine_engines import nothing_left, run, until

from sonoro.core.errors import ConfigError
from sonoro.server.config import ServerConfig
from sonoro.server.quotas.counts import Quotas, Used, quota_columns
from sonoro.server.quotas.limits import key_name, owner_of
from sonoro.server.quotas.usage_file import UsageFile
from sonoro.server.shared import Shared
from sonoro.transport.table import Table

__all__ = ["nothing_left"]

SETTINGS = dataclasses.replace(servers.SETTINGS, api_keys=("one", "three"), admin_keys=("root",))
NAMES = {key: key_name(key) for key in ("one", "three")}
TEXT = "Some words."


def client(server: Server, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=server.url, timeout=GUARD_S, trust_env=False, headers={"Authorization": f"Bearer {key}"}
    )


async def counted(server: Server) -> dict[str, tuple[int, int]]:
    """Requests and characters of each key, as an admin sees them; the same as the metrics have."""
    async with client(server, "root") as http:
        found = (await http.get("/v1/usage")).json()["data"]
    used = {one["key"]: (one["requests"]["total"], one["characters"]["total"]) for one in found}
    for at, kind in enumerate(("requests", "characters")):
        for name, counts in used.items():
            assert await server.metric(f'sonoro_key_{kind}_total{{key="{name}"}}') == counts[at]
    return used


def in_file(path: Path) -> dict[str, tuple[int, int]]:
    file = sqlite3.connect(path)
    rows = file.execute("SELECT key, sum(requests), sum(characters) FROM usage GROUP BY key").fetchall()
    file.close()
    return {key: (requests, characters) for key, requests, characters in rows}


async def speak(server: Server, key: str, count: int) -> None:
    """So many texts, a part of them in batches, over four connections, each of some front."""
    batch = 32

    async def ask(texts: int) -> None:
        async with client(server, key) as http:
            items: dict[str, Any] = {**BODY, "max_new_tokens": 1, "items": [{"input": TEXT}] * batch}
            del items["input"]
            for _ in range(texts // (2 * batch)):
                answer = (await http.post("/v1/audio/speech/batch", json=items)).json()
                assert answer["succeeded"] == batch, answer
            for _ in range(texts - texts // (2 * batch) * batch):
                assert (await http.post("/v1/audio/speech", json={**BODY, "max_new_tokens": 1})).status_code == 200

    await asyncio.gather(*(ask(count // 4) for _ in range(4)))


@pytest.mark.usefixtures("nothing_left")
def test_two_thousand_requests_are_counted_exactly(tmp_path: Path) -> None:
    """Over three starts of a server of two fronts, one of which is killed each time."""
    file, texts = tmp_path / "usage.sqlite", {"one": 248, "three": 420}
    config = dataclasses.replace(SETTINGS, usage_file=str(file))

    async def ask() -> None:
        for start in range(1, 4):
            expected = {NAMES[key]: (start * count, start * count * len(TEXT)) for key, count in texts.items()}
            async with serving(model="sine", config=config) as server:
                await asyncio.gather(*(speak(server, key, count) for key, count in texts.items()))
                assert expected.items() <= (await counted(server)).items()
                killed = min(pids())
                os.kill(killed, signal.SIGKILL)
                await until(lambda killed=killed: len(pids()) == 2 and killed not in pids())
                assert expected.items() <= (await counted(server)).items()
            assert in_file(file) == expected

    run(ask(), 4 * GUARD_S)


@pytest.mark.usefixtures("nothing_left")
def test_the_requests_of_a_killed_front_count_and_hold_nothing() -> None:
    """A key that may have two requests at once has two again."""
    config = dataclasses.replace(SETTINGS, quotas={"one": {"concurrent_requests": 2}}).resolve(8)
    long = {**BODY, "max_new_tokens": 400, "ignore_eos": True}

    async def listen(server: Server, begun: "asyncio.Queue[None]") -> str:
        try:
            async with client(server, "one") as http, http.stream("POST", "/v1/audio/speech", json=long) as answer:
                async for _ in answer.aiter_raw():
                    begun.put_nowait(None)
        except httpx.TransportError:
            return "broken"
        return "whole"

    async def kill() -> None:
        async with serving(config=config) as server:
            begun = asyncio.Queue[None]()
            listening = [asyncio.create_task(listen(server, begun)) for _ in range(2)]
            for _ in listening:
                await begun.get()
            async with client(server, "one") as http:
                assert (await http.post("/v1/audio/speech", json=BODY)).status_code == 429
            for front in pids():
                os.kill(front, signal.SIGKILL)
            await asyncio.gather(*listening)
            async with client(server, "one") as http:

                async def is_spoken() -> bool:
                    try:
                        return (await http.post("/v1/audio/speech", json=BODY)).status_code == 200
                    except httpx.TransportError:  # of a front that is not replaced yet
                        return False

                await until(is_spoken)
            assert (await counted(server))[NAMES["one"]] == (3, 3 * len(TEXT))

    run(kill())


@pytest.mark.usefixtures("nothing_left")
def test_both_keys_of_a_full_server_of_two_fronts_are_served_and_counted() -> None:
    """Weights 1 and 3, whose clients always ask. Their shares are in test_quotas.py and benchmarks/usage.py: here the
    machine decides whether both always wait."""
    config = dataclasses.replace(SETTINGS, quotas={"three": {"weight": 3}}, max_concurrency=8)

    async def ask() -> None:
        async with serving(model="sine", config=config.resolve(8)) as server:
            served, least = dict.fromkeys(NAMES, 0), 400

            async def keep_asking(key: str) -> None:
                async with client(server, key) as http:
                    while sum(served.values()) < least:
                        assert (await http.post("/v1/audio/speech", json=BODY)).status_code == 200
                        # Who still waits at the end is served too, whatever its weight.
                        served[key] += sum(served.values()) < least

            await asyncio.gather(*(keep_asking(key) for key in NAMES for _ in range(16)))
            assert served["one"] > 0
            used = await counted(server)
            assert sum(used[NAMES[key]][0] for key in NAMES) >= sum(served.values()) == least

    run(ask())


def opened(config: ServerConfig) -> tuple[Quotas, UsageFile]:
    quotas = Shared.of(config, 1).quotas
    assert quotas is not None
    file = UsageFile.of(config, quotas)
    assert file is not None
    return quotas, file


def test_the_day_goes_on_after_a_restart(tmp_path: Path) -> None:
    config = dataclasses.replace(
        SETTINGS, usage_file=str(tmp_path / "usage"), quotas={"one": {"characters_per_day": 9}}
    )
    one = owner_of("one")

    async def count() -> None:
        for start in range(3):
            quotas, file = opened(config)
            assert quotas.used(one, "characters") == Used(3 * start, 3 * start)
            file.start()
            quotas.admit(one, 3, 0)
            await file.close()
        # As of another day.
        with sqlite3.connect(config.usage_file) as written:
            written.execute("UPDATE usage SET day = '2001-01-01'")
        written.close()
        quotas, file = opened(config)
        assert quotas.used(one, "characters") == Used(0, 9)
        await file.close()

    run(count())


def test_what_is_counted_before_midnight_is_of_the_day_that_ends(tmp_path: Path) -> None:
    """Though it is written after, with what the new day has already."""
    path, one, midnight_s = str(tmp_path / "usage"), owner_of("one"), 20_000 * 86_400.0
    now_s = midnight_s - 0.5

    def opened_then() -> tuple[Quotas, UsageFile]:
        quotas = Quotas(SETTINGS, Table(quota_columns(SETTINGS)), now_s=lambda: now_s)
        return quotas, UsageFile(path, quotas)

    def days() -> list[tuple[str, int, int]]:
        written = sqlite3.connect(path)
        rows = written.execute("SELECT day, requests, characters FROM usage ORDER BY day").fetchall()
        written.close()
        return rows

    quotas, file = opened_then()
    quotas.admit(one, 3, 0)
    now_s += 1
    quotas.append(one, 4)
    run(file.close())
    assert days() == [("2024-10-03", 1, 3), ("2024-10-04", 0, 4)]
    quotas, file = opened_then()
    assert quotas.used(one, "characters") == Used(4, 7)
    now_s += 86_399
    quotas.admit(one, 5, 0)
    now_s += 1
    run(file.close())
    assert days() == [("2024-10-03", 1, 3), ("2024-10-04", 1, 9)]


def test_servers_may_share_a_file(tmp_path: Path) -> None:
    """Each adds what it counts."""
    config = dataclasses.replace(SETTINGS, usage_file=str(tmp_path / "usage"))

    async def count() -> None:
        both = [opened(config) for _ in range(2)]
        for quotas, file in both:
            quotas.admit(owner_of("one"), 4, 0)
            await file.close()
        assert in_file(tmp_path / "usage") == {NAMES["one"]: (2, 8)}

    run(count())


def test_what_cannot_be_written_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(SETTINGS, usage_file=str(tmp_path / "usage"))
    quotas, file = opened(config)
    quotas.admit(owner_of("one"), 4, 0)
    with sqlite3.connect(config.usage_file) as other:
        other.execute("ALTER TABLE usage RENAME TO taken")
        other.commit()
        file._write(quotas.all_used(), quotas.today)
        assert "usage_not_written" in caplog.text
        other.execute("ALTER TABLE taken RENAME TO usage")
    other.close()
    run(file.close())
    assert in_file(tmp_path / "usage") == {NAMES["one"]: (1, 4)}


@pytest.mark.parametrize("name", ["no/folder/usage", "text", ""])
def test_a_file_that_cannot_be_used_is_told_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "text").write_text("This is no database, but a text of some length. " * 99)
    with pytest.raises(ConfigError, match=r"usage_file.*must be a SQLite file"):
        opened(dataclasses.replace(SETTINGS, usage_file=str(tmp_path / name)))
