"""`sonoro serve`: the speech server, with engines in processes of their own. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import json
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from sonoro.cli import common
from sonoro.cli.common import fields_of, flag, number
from sonoro.cli.streams import show
from sonoro.core.config import EngineConfig, log_as_json, log_level, usable_cores
from sonoro.core.errors import ConfigError
from sonoro.core.logs import configure_logging
from sonoro.server.config import ServerConfig, read_sections

if TYPE_CHECKING:
    from sonoro.transport.fleet import Fleet

_DEFAULTS: Mapping[str, Any] = {"is_ready_early": True}
"""Fields of the engine's configuration that have another default in a server."""

_Devices = Annotated[
    str | None, typer.Option(help='an engine on each: GPUs by number, such as "0,1,2,3", or cpu; default: --device')
]
_CodecDevice = Annotated[
    str | None, typer.Option(help="a GPU of its own for the codec, by number; default: the model's")
]
_ReadyEarly = Annotated[
    bool | None,
    typer.Option(
        "--ready-early/--no-ready-early",
        help="be ready with some graphs captured, and capture the others when idle",
        show_default="ready-early",
    ),
]
_VoicesFolder = Annotated[
    str | None, typer.Option(help="folder or bucket (s3://...) for uploaded voices; default: in memory")
]
_PrintConfig = Annotated[bool, typer.Option("--print-config", help="print the resolved configuration as YAML and exit")]


def _option(entry: dataclasses.Field[Any]) -> inspect.Parameter:
    """The option of the field `entry` of `ServerConfig`, explained there. None leaves the configuration's value."""
    help, name = entry.metadata["help"], entry.metadata["flag"] or entry.name
    kind: Any = type(entry.default)
    shown: dict[str, Any] = {"show_default": str(entry.default) if entry.default and kind is not bool else False}
    if kind in (int, float):
        option: Any = number(name, kind, help, **shown)
    elif entry.metadata["flag"]:
        option, kind = typer.Option(flag(name), help=f"{help}; may be repeated"), list[str]
    else:
        option = typer.Option(flag(name), help=help, **shown)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` an option for each field of `ServerConfig`, in place of its `**server`."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*own, *map(_option, dataclasses.fields(ServerConfig))]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


@_with_server_options
def serve(  # noqa: PLR0917
    model: common.NamedModel = None,
    device: common.Device = "auto",
    devices: _Devices = None,
    codec_device: _CodecDevice = None,
    dtype: common.DataType = None,
    codec_dtype: common.CodecType = None,
    quantization: common.Quantization = None,
    load_format: common.LoadFormat = "auto",
    config: Annotated[Path | None, typer.Option(help="YAML file with the sections engine and server")] = None,
    slots: Annotated[int | None, number("slots", int, "requests that the engine runs at once")] = None,
    is_eager: common.Eager = None,
    is_ready_early: _ReadyEarly = None,
    voices_folder: _VoicesFolder = None,
    print_config: _PrintConfig = False,
    **server: Any,
) -> None:
    given = dict(locals())
    _serve(model, given | given.pop("server"))


def _serve(model: str | None, given: Mapping[str, Any]) -> None:
    """Serve `model` with the options `given` to `serve`."""
    from sonoro.server.listening import listen, listen_locally, listen_often
    from sonoro.transport.fleet import Fleet, check_devices, device_list
    from sonoro.transport.launch import Limits
    from sonoro.transport.messages import WorkerSettings

    device, devices = given["device"], given["devices"]
    if devices is not None and device != "auto":
        raise ConfigError("devices", devices, f"--device {device} is given too; leave one of them out")
    used = (device,) if devices is None else device_list(devices)
    engine, server = _configurations(given, len(used))
    check_devices(engine, used)
    load = {"dtype": given["dtype"], "load_format": given["load_format"]}
    if given["print_config"]:
        show(_resolved({"model": model, "devices": list(used), **load}, engine, server).rstrip())
        return
    log_as_json(server.log_format == "json")
    configure_logging(log_level("INFO"), is_json=server.log_format == "json")
    shared = {name: getattr(server, name) for name in ("slow_reader_timeout_s", "max_restarts", "restart_window_s")}
    settings, limits = WorkerSettings(model=model, config=engine, **load), Limits(**shared)
    count = server.front_processes or fronts_of(used)
    with contextlib.ExitStack() as listening:
        sockets = listen_often(server, count) if count > 1 else [listen(server)]
        for sock in sockets:
            listening.enter_context(sock)
        local = listening.enter_context(listen_locally(settings, server))
        address, actual = sockets[0].getsockname()[:2]
        show(f"listening on http://{f'[{address}]' if ':' in address else address}:{actual}")
        if count > 1:
            listeners = [[sockets[0], *local], *([sock] for sock in sockets[1:])]
            fronts = importlib.import_module("sonoro.server.fronts")
            asyncio.run(fronts.serve_fronts(fronts.Fronts(settings, used, limits, server, listeners)))
            return
        try:
            asyncio.run(_run(Fleet(settings, used, limits), server, *sockets, *local))
        except asyncio.CancelledError:  # by SIGTERM, whose handler is removed by now
            signal.raise_signal(signal.SIGTERM)


def fronts_of(devices: Sequence[str]) -> int:
    """How many front processes serve engines on `devices`, by default: one for one engine, and on a CPU, whose cores
    the engines need."""
    gpus = sum(device.startswith("cuda") for device in devices)
    return max(1, min(2 * gpus, usable_cores() // 4)) if gpus > 1 else 1


def _configurations(given: Mapping[str, Any], engines: int) -> tuple[EngineConfig, ServerConfig]:
    """The file's configurations, or the defaults, updated by the options `given`."""
    config = given["config"]
    engine, server = read_sections(config, **_DEFAULTS) if config else (EngineConfig(**_DEFAULTS), ServerConfig())
    codec_device = given["codec_device"]
    if codec_device and codec_device.isdecimal():
        codec_device = f"cuda:{codec_device}"
    engine = engine.over(**{**fields_of(EngineConfig, given), "codec_device": codec_device})
    settings = {}
    for name, entry in ServerConfig.__dataclass_fields__.items():
        value = given[entry.metadata["flag"] or name]
        if entry.metadata["flag"]:
            value = _READERS.get(name, tuple)(value) if value else None
        settings[name] = value
    return engine, server.over(**settings).resolve(engine.slots * engines)


async def _run(fleet: Fleet, config: ServerConfig, *sockets: socket.socket) -> None:
    """Serve over `fleet`, whose engines start while the server is being imported."""
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None
    # Until the server handles SIGTERM, it would end this process alone and leave the engines behind.
    loop.add_signal_handler(signal.SIGTERM, serving.cancel)
    fleet.begin()
    app = await asyncio.to_thread(importlib.import_module, "sonoro.server.app")
    loop.remove_signal_handler(signal.SIGTERM)
    await app.serve(fleet, config, *sockets)


def _pairs(aliases: list[str]) -> dict[str, str]:
    """Parse "name=voice" pairs. Raises `ConfigError`."""
    pairs = {}
    for alias in aliases:
        name, equals, voice = alias.partition("=")
        if not equals:
            raise ConfigError("voice_aliases", alias, "it must be NAME=VOICE")
        pairs[name] = voice
    return pairs


def _quotas(given: list[str]) -> dict[str, dict[str, int]]:
    """Parse "key=limit:count,limit:count" entries. Raises `ConfigError`."""
    quotas = {}
    for entry in given:
        name, _, limits = entry.rpartition("=")
        pairs = [pair.partition(":") for pair in limits.split(",")]
        if not name or not all(count.isdecimal() for *_, count in pairs):
            # Without what was given, which may be a key.
            raise ConfigError("quota", "...", "it must be KEY=LIMIT:COUNT,..., as default=requests_per_minute:60")
        quotas[name] = {limit: int(count) for limit, _, count in pairs}
    return quotas


_READERS: Mapping[str, Callable[[list[str]], Any]] = {"voice_aliases": _pairs, "quotas": _quotas}
"""Of options that may be repeated, those that are no lists."""


def _resolved(load: dict[str, Any], engine: EngineConfig, server: ServerConfig) -> str:
    """The resolved configuration as YAML."""
    sections = {"load": load, "engine": engine.resolve().shown, "server": server.shown}
    # JSON first, which makes lists of tuples: YAML has none.
    text: str = yaml.safe_dump(json.loads(json.dumps(sections)), sort_keys=False, default_flow_style=None)
    return text
