"""The application on a Ray of this machine: the same to its clients, whoever of its replicas dies or is replaced."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from servers import BUILTIN, SINE, Crowd, Server
from sessions import check_all
from sine_engines import command_of, parent_of, until

from sonoro.core.errors import ConfigError
from sonoro.scale import ByPredictedWait, app

pytestmark = pytest.mark.long

TESTS, ROOT = Path(__file__).parents[1:3]

RAY_GUARD_S = 600
"""How long a test waits for Ray before it says that something hangs: a deployment takes a minute of a core."""


class Cluster:
    """Replicas on a Ray of their own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, server: Server) -> None:
        self._process, self._log, self.server = process, log, server

    async def tell(self, line: str) -> str:
        """What the cluster answers to a line."""
        self._process.stdin.write(f"{line}\n".encode())
        return await answer_of(self._process, self._log)

    async def is_whole(self) -> bool:
        # Asking all the time would take a core from Ray.
        await asyncio.sleep(0.25)
        return await self.tell("replicas") == "RUNNING 2"

    async def is_not_whole(self) -> bool:
        return not await self.is_whole()

    def engines(self) -> list[int]:
        """The engine processes below it."""
        found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        engines = [pid for pid in found if b"sonoro.engine_process" in command_of(pid)]
        return [pid for pid in engines if self._process.pid in ancestors(pid)]


async def answer_of(process: asyncio.subprocess.Process, log: Path) -> str:
    """The next line that is an answer; Ray prints others."""
    while line := (await process.stdout.readline()).decode():
        if line.startswith("answer "):
            return line.removeprefix("answer ").strip()
    raise AssertionError(log.read_text()[-3000:])


def ancestors(pid: int | None) -> Iterator[int]:
    while pid := parent_of(pid):
        yield pid


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    # Ray makes Unix sockets in it, whose paths may have 107 letters.
    with TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder, Path(folder, "log").open("w+") as log:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]),
        }
        environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": folder}
        # It would kill replicas for what others on this machine hold.
        environment |= {"RAY_memory_monitor_refresh_ms": "0"}
        # It would give up processes that a busy machine keeps waiting.
        environment |= {"RAY_health_check_timeout_ms": "600000", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "600"}
        # It would let everything else on this machine run before them, and look for what has changed all the time.
        environment |= {"RAY_worker_niceness": "0", "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, Path(__file__).with_name("ray_cluster.py"), folder),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            url = await answer_of(process, Path(folder, "log"))
            limits = httpx.Limits(max_connections=100)
            async with httpx.AsyncClient(base_url=url, timeout=RAY_GUARD_S, limits=limits, trust_env=False) as http:
                yield Cluster(process, Path(folder, "log"), Server(http, url, None, None, []))
        finally:
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), RAY_GUARD_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()


@pytest.mark.timeout(4 * RAY_GUARD_S)
def test_on_a_local_ray_clients_notice_no_redeploy_and_a_death_only_where_it_spoke_to_them() -> None:
    """The built-in voice is heard, and a replica of sines, which gets another as clients wait; then there are always
    two. The waits are for slow machines."""

    async def ask() -> None:
        clock = asyncio.get_running_loop().time
        async with cluster() as ray:
            await ray.tell("deploy builtin")
            assert BUILTIN.is_same((await ray.server.speak()).content, BUILTIN.spoken())
            await ray.tell("deploy scaled")
            assert not await ray.is_whole()
            async with Crowd(ray.server, SINE) as crowd:
                # It has four slots for eight clients: the others wait for longer than they should.
                await until(ray.is_whole, RAY_GUARD_S)
            assert {ended.how for ended in crowd.ended} == {"whole"}
            await ray.tell("deploy sine")
            await until(ray.is_whole, RAY_GUARD_S)
            await check_all(ray.server, SINE)
            async with Crowd(ray.server, SINE) as crowd:
                await until(lambda: crowd.begun > 4, RAY_GUARD_S)
                await ray.tell("deploy sine")
                redeployed_s = clock()
                await until(lambda: len(crowd.sent_since(redeployed_s)) >= 4, RAY_GUARD_S)
            assert {ended.how for ended in crowd.ended} == {"whole"}
            await until(ray.is_whole, RAY_GUARD_S)
            async with Crowd(ray.server, SINE) as crowd:
                # A replica has four slots: both speak.
                await until(lambda: crowd.begun > 4, RAY_GUARD_S)
                # A replica ends with its engine.
                # One that was replaced is no replica any more.
                await until(lambda: len(ray.engines()) == 2, RAY_GUARD_S)
                os.kill(ray.engines()[0], signal.SIGKILL)
                killed_s = clock()
                await until(ray.is_not_whole, RAY_GUARD_S)
                # Until Ray has noticed, its proxy sends requests to the dead.
                noticed_s = clock()
                await until(ray.is_whole, RAY_GUARD_S)
                healed_s = clock()
                await until(lambda: len(crowd.sent_since(healed_s)) >= 4, RAY_GUARD_S)
            crowd.check_lost(killed_s, noticed_s, healed_s, most=8)

    asyncio.run(ask())


def test_what_is_wrong_with_the_arguments_is_refused_by_name() -> None:
    for arguments, kind, words in (
        ({"modell": "x"}, ValidationError, "modell"),
        ({"gpus": -1}, ValidationError, "gpus"),
        ({"max_replicas": "many"}, ValidationError, "max_replicas"),
        ({"engine": {"slot": 4}}, ConfigError, "slot: 4 is not allowed"),
        ({"server": {"max_waiting": -1}}, ConfigError, "max_waiting"),
        ({"target_wait_ms": 0}, ValidationError, "target_wait_ms\n.*greater than 0.*input_value=0"),
        ({"target_wait_ms": 700_000}, ValidationError, "target_wait_ms\n.*less than or equal to 600000.*=700000"),
        ({"max_replicas": 2, "target_wait_ms": 6000}, ConfigError, "target_wait_ms: 6000.*at most.*5000"),
    ):
        with pytest.raises(kind, match=words):
            app(arguments)


def test_ray_queues_nothing_that_the_gate_would(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    deployment = serve.deployment

    def note(**options: Any) -> Any:
        asked.append(options)
        return deployment(**options)

    monkeypatch.setattr(serve, "deployment", note)
    for arguments, most in (
        ({"engine": {"slots": 64}}, 64),
        ({"engine": {"slots": 64}, "gpus": 2}, 128),
        ({"engine": {"slots": 64}, "server": {"max_concurrency": 10}}, 10),
        ({"engine": {"slots": 64}, "server": {"max_concurrency": 100}, "target_wait_ms": 50}, 100),
    ):
        app(arguments)
        options = asked.pop()
        policy = options["autoscaling_config"]["policy"]
        assert policy["policy_kwargs"]["target_wait_s"] == arguments.get("target_wait_ms", 100) / 1000
        waiting_and_sessions = 2 * 1024
        assert options["max_ongoing_requests"] == most + waiting_and_sessions


@pytest.mark.parametrize(
    ("first_packets_s", "wanted"),
    [({}, 2), ({"a": 0.02, "b": 0.02}, 1), ({"a": 0.02, "b": 0.12}, 1), ({"a": 0.1, "b": 0.15}, 4)],
    ids=["nothing told yet", "one would do", "by the mean", "late"],
)
def test_replicas_are_added_by_the_wait_that_they_tell(first_packets_s: dict[str, float], wanted: int) -> None:
    """Two replicas of 256 slots, whose times do not grow."""
    told = {"running": 40.0, "waiting": 0.0, "capacity": 256.0, "held_s": 0.4, "growth": 0.0, "least_growth": 0.0}
    metrics = {name: dict.fromkeys(first_packets_s, value) for name, value in told.items()}
    fields = dict.fromkeys(signature(AutoscalingContext).parameters) | {
        "current_num_replicas": 2,
        "target_num_replicas": 2,
        "aggregated_metrics": {**metrics, "first_packet_s": first_packets_s, "predicted_wait_s": {}},
        "config": AutoscalingConfig(),
    }
    assert ByPredictedWait(0.1)(AutoscalingContext(**fields))[0] == wanted
    metrics["running"]["of the version before"] = 1000.0
    assert ByPredictedWait(0.1)(AutoscalingContext(**fields))[0] == wanted
    fields["aggregated_metrics"] = {"queue_wait_s": {"a": 3.0}}
    assert ByPredictedWait(0.1)(AutoscalingContext(**fields))[0] == 2


def test_the_manifest_describes_an_application_and_the_ray_that_is_pinned() -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "rayservice.yaml").read_text(encoding="utf-8"))["spec"]
    (described,) = yaml.safe_load(manifest["serveConfigV2"])["applications"]
    assert described["import_path"] == f"{app.__module__}:{app.__name__}"
    assert app(described["args"])
    cluster, arguments = manifest["rayClusterConfig"], described["args"]
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["enableInTreeAutoscaling"], "nobody would start the pods that replicas wait for"
    assert (group["minReplicas"], group["maxReplicas"]) == (arguments["min_replicas"], arguments["max_replicas"])
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == arguments["gpus"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert arguments["engine"]["voices_folder"] in mounts
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={manifest['rayClusterConfig']['rayVersion']}" in pins
