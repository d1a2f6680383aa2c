"""The files that build and run containers name only what exists: stages, paths, flags, routes, configuration."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from sonoro.cli.main import app
from sonoro.core.config import EngineConfig
from sonoro.ops.device import CARDS
from sonoro.server.app import create_app
from sonoro.server.config import ServerConfig, read_sections
from sonoro.transport.fleet import Fleet
from sonoro.transport.messages import WorkerSettings

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
STAGES = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


def plain(text: str) -> str:
    """`text` of the compose file with the defaults of its variables."""
    return DEFAULT.sub(r"\1", text)


def arguments_of(command: list[str]) -> dict[str, object]:
    """What `sonoro` makes of `command`; it refuses what it does not know."""
    name, *rest = map(plain, command)
    context = typer.main.get_command(app).commands[name].make_context(name, rest)
    return context.params


def routes() -> set[str]:
    """The paths that a server answers."""
    return set(create_app(Fleet(WorkerSettings(), ("auto",)), ServerConfig().resolve(1)).openapi()["paths"])


def asked(command: list[str]) -> str:
    """The path that a health check asks for, on the port that is exposed."""
    (port, path) = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[-1]).groups()
    assert re.search(rf"^EXPOSE {port}$", DOCKERFILE, re.MULTILINE)
    compile(command[-1], "healthcheck", "exec")
    return path


def test_the_image_is_built_from_what_there_is() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    copied = [path for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for path in line.split()]
    bound = re.findall(r"--mount=type=bind,source=(\S+?),", DOCKERFILE)
    for path in {*copied, *bound}:
        assert (ROOT / path).exists(), path
        assert f"!{path}" in ignored, f"{path} is not sent to the builder"
    assert set(re.findall(r"--mount=type=bind,from=(\w+),", DOCKERFILE)) <= set(STAGES)
    assert re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_image_starts_a_server_that_is_asked_for_its_health() -> None:
    command = json.loads(re.search(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)[1])
    given = arguments_of(command)
    assert given["host"] == "0.0.0.0"
    assert f"EXPOSE {given['port']}" in DOCKERFILE
    check = json.loads(re.search(r"^HEALTHCHECK .*?CMD (.+)$", DOCKERFILE, re.MULTILINE)[1])
    assert asked(check) in routes()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_runs_a_stage_that_exists_and_is_asked_whether_it_is_ready(name: str) -> None:
    service = SERVICES[name]
    assert service["build"]["target"] in STAGES
    given = arguments_of(service["command"])
    assert given["model"] == "builtin"
    assert asked(service["healthcheck"]["test"]) in routes()
    targets = {}
    for volume in service["volumes"]:
        source, target = volume.split(":")[:2]
        targets[target] = source
        # Docker makes a new volume the user's who owns the folder in the image.
        assert source.startswith("./") or (source in COMPOSE["volumes"] and target in DOCKERFILE), volume
    _, server = read_sections(ROOT / targets[str(given["config"])])
    assert server.host == "0.0.0.0"
    assert plain(service["ports"][0]) == f"127.0.0.1:{server.port}:{server.port}"
    assert float(service["stop_grace_period"].removesuffix("s")) > server.shutdown_timeout_s


def test_the_image_compiles_kernels_by_a_command_that_exists_for_a_card_that_is_known() -> None:
    given = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', DOCKERFILE, re.MULTILINE)) | {"model": "fish-s2-pro"}
    command = re.search(r"; do sonoro (.+?) \|\|", DOCKERFILE)[1]
    asked = arguments_of(shlex.split(re.sub(r"\$(\w+)", lambda name: given[name[1]], command)))
    assert asked["device_name"] in CARDS
    assert asked["slots"] == EngineConfig().slots


def test_the_service_for_a_gpu_reserves_one() -> None:
    (device,) = SERVICES["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert "deploy" not in SERVICES["cpu"]
