"""`sonoro serve`: the speech server, with engines in processes of their own. Imports no torch."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from sonoro.cli.common import (
    CodecType,
    DataType,
    Device,
    LoadFormat,
    NamedModel,
    Quantization,
    fields_of,
    number,
    show,
    takes,
)
from sonoro.core.config import EngineConfig, log_as_json, log_level
from sonoro.core.errors import ConfigError
from sonoro.core.logs import configure_logging
from sonoro.server.config import ServerConfig, read_sections

if TYPE_CHECKING:
    from sonoro.transport.fleet import Fleet

_DEFAULTS = {"is_ready_early": True}
"""Fields of the engine's configuration that have another default in a server."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EngineOptions:
    """The model, and the fields of the engine's configuration that have options."""

    model: NamedModel = None
    device: Device = "auto"
    devices: Annotated[
        str | None, typer.Option(help='an engine on each: GPUs by number, such as "0,1,2,3", or cpu; default: --device')
    ] = None
    codec_device: Annotated[
        str | None, typer.Option(help="a GPU of its own for the codec, by number; default: the model's")
    ] = None
    dtype: DataType = None
    codec_dtype: CodecType = None
    quantization: Quantization = None
    load_format: LoadFormat = "auto"
    config: Annotated[Path | None, typer.Option(help="YAML file with the sections engine and server")] = None
    slots: Annotated[int | None, number("slots", int, "requests that the engine runs at once")] = None
    is_eager: Annotated[
        bool | None, typer.Option("--eager", help="no CUDA graphs: the same kernels, launched one by one")
    ] = None
    is_ready_early: Annotated[
        bool | None,
        typer.Option(
            "--ready-early/--no-ready-early",
            help="be ready with some graphs captured, and capture the others when idle",
            show_default="ready-early",
        ),
    ] = None
    voices_folder: Annotated[
        str | None, typer.Option(help="folder or bucket (s3://...) for uploaded voices; default: in memory")
    ] = None
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved configuration as YAML and exit")
    ] = False


def _server_options() -> Iterator[tuple[str, Any, Any]]:
    """The fields of `ServerConfig` as options; None leaves the configuration's value."""
    kinds = {"int": int, "float": float}
    for entry in dataclasses.fields(ServerConfig):
        help, flag, kind = entry.metadata["help"], entry.metadata["flag"], str(entry.type)
        shown: dict[str, Any] = {"show_default": str(entry.default) if entry.default else False}
        if kind in kinds:
            annotation: Any = Annotated[kinds[kind] | None, number(entry.name, kinds[kind], help, **shown)]
        elif kind == "bool":
            annotation = Annotated[bool | None, typer.Option("--" + entry.name.replace("_", "-"), help=help)]
        elif flag:
            annotation = Annotated[list[str] | None, typer.Option(help=f"{help}; may be repeated")]
        else:
            annotation = Annotated[str | None, typer.Option(help=help, **shown)]
        yield flag or entry.name, annotation, dataclasses.field(default=None)


_Options = dataclasses.make_dataclass(
    "_Options", list(_server_options()), bases=(_EngineOptions,), frozen=True, kw_only=True
)


@takes(_Options)
def serve(options: Any) -> None:
    """Serve OpenAI's speech API over HTTP."""
    from sonoro.server.listening import listen
    from sonoro.transport.fleet import Fleet, device_list
    from sonoro.transport.launch import Limits

    if options.devices is not None and options.device != "auto":
        raise ConfigError("devices", options.devices, f"--device {options.device} is given too; leave one of them out")
    devices = (options.device,) if options.devices is None else device_list(options.devices)
    config, none = options.config, (EngineConfig().over(**_DEFAULTS), ServerConfig())
    engine, server = read_sections(config, **_DEFAULTS) if config else none
    codec_device = options.codec_device
    if codec_device and codec_device.isdecimal():
        codec_device = f"cuda:{codec_device}"
    engine = engine.over(**{**fields_of(EngineConfig, options), "codec_device": codec_device})
    server = server.over(**_server_settings(options)).resolve(engine.slots * len(devices))
    settings: dict[str, Any] = {"dtype": options.dtype, "load_format": options.load_format}
    if options.print_config:
        show(_resolved({"model": options.model, "devices": list(devices), **settings}, engine, server).rstrip())
        return
    log_as_json(server.log_format == "json")
    configure_logging(log_level("INFO"), is_json=server.log_format == "json")
    shared = {name: getattr(server, name) for name in ("slow_reader_timeout_s", "max_restarts", "restart_window_s")}
    fleet = Fleet.launch(options.model, devices=devices, limits=Limits(**shared), config=engine, **settings)
    with listen(server) as sock:
        address, actual = sock.getsockname()[:2]
        show(f"listening on http://{f'[{address}]' if ':' in address else address}:{actual}")
        try:
            asyncio.run(_serve(fleet, server, sock))
        except asyncio.CancelledError:  # by SIGTERM, whose handler is removed by now
            signal.raise_signal(signal.SIGTERM)


async def _serve(fleet: Fleet, config: ServerConfig, sock: socket.socket) -> None:
    """Serve over `fleet`, whose engines start while the server is being imported."""
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None
    # Until the server handles SIGTERM, it would end this process alone and leave the engines behind.
    loop.add_signal_handler(signal.SIGTERM, serving.cancel)
    fleet.begin()
    serve = await asyncio.to_thread(_import_server)
    loop.remove_signal_handler(signal.SIGTERM)
    await serve(fleet, config, sock)


def _import_server() -> Callable[[Fleet, ServerConfig, socket.socket], Awaitable[None]]:
    from sonoro.server.app import serve

    return serve


def _server_settings(options: Any) -> dict[str, Any]:
    """The fields of `ServerConfig` by the options given; None for the others."""
    settings = {}
    for entry in dataclasses.fields(ServerConfig):
        value = getattr(options, entry.metadata["flag"] or entry.name)
        if entry.metadata["flag"]:
            value = _pairs(value) if value and entry.name == "voice_aliases" else tuple(value or ()) or None
        settings[entry.name] = value
    return settings


def _pairs(aliases: list[str]) -> dict[str, str]:
    """Parse "name=voice" pairs. Raises `ConfigError`."""
    pairs = {}
    for alias in aliases:
        name, equals, voice = alias.partition("=")
        if not equals:
            raise ConfigError("voice_aliases", alias, "it must be NAME=VOICE")
        pairs[name] = voice
    return pairs


def _resolved(load: dict[str, Any], engine: EngineConfig, server: ServerConfig) -> str:
    """The resolved configuration as YAML."""
    sections = {"load": load, "engine": engine.resolve().shown, "server": server.shown}
    # JSON first, which makes lists of tuples: YAML has none.
    text: str = yaml.safe_dump(json.loads(json.dumps(sections)), sort_keys=False, default_flow_style=None)
    return text
