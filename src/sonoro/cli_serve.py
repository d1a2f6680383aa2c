"""`sonoro serve`: the speech server, over an engine in a process of its own. Loads no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import yaml

from sonoro.cli_common import DataType, Device, LoadFormat, number, show
from sonoro.core.config import EngineConfig

if TYPE_CHECKING:
    from sonoro.server.config import ServerConfig

__all__ = ["serve"]

Settings = TypeVar("Settings", EngineConfig, "ServerConfig")

NamedModel = Annotated[
    str | None,
    typer.Argument(help="checkpoint folder, hub id or known name; the built-in voice if none", show_default=False),
]
Config = Annotated[Path | None, typer.Option(help="YAML file with the sections engine and server")]


def serve(
    model: NamedModel = None,
    *,
    host: Annotated[str | None, typer.Option(help="address to listen at; 127.0.0.1 if none")] = None,
    port: Annotated[int | None, number("port", int, "port to listen at; 8000 if none, 0 takes a free one")] = None,
    device: Device = "auto",
    dtype: DataType = None,
    load_format: LoadFormat = "auto",
    config: Config = None,
    slots: Annotated[int | None, number("slots", int, "requests that the engine runs at once")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="a key that clients must send; may be repeated")] = None,
    max_concurrency: Annotated[
        int | None, number("max_concurrency", int, "requests spoken at once; as many as slots if none")
    ] = None,
    max_queue_wait_ms: Annotated[
        int | None, number("max_queue_wait_ms", int, "how long others wait for a place before they are refused")
    ] = None,
    max_characters: Annotated[int | None, number("max_characters", int, "longest text of a request")] = None,
    max_body_bytes: Annotated[int | None, number("max_body_bytes", int, "largest body of a request")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="an origin that browsers may call from; may be repeated; * for all")
    ] = None,
) -> None:
    """Serve OpenAI's speech API over HTTP."""
    from sonoro.server.app import listen
    from sonoro.server.app import serve as serve_on
    from sonoro.server.config import ServerConfig, read_sections
    from sonoro.transport.client import EngineClient
    from sonoro.transport.launch import Limits

    engine, server = read_sections(config) if config else (EngineConfig(), ServerConfig())
    engine = _over(engine, slots=slots)
    server = _over(
        server,
        host=host,
        port=port,
        api_keys=tuple(api_key or ()) or None,
        max_concurrency=max_concurrency,
        max_queue_wait_ms=max_queue_wait_ms,
        max_characters=max_characters,
        max_body_bytes=max_body_bytes,
        cors_origins=tuple(cors_origin or ()) or None,
    ).resolve(engine.slots)
    settings: dict[str, Any] = {"device": device, "dtype": dtype, "load_format": load_format}
    client = EngineClient.launch(
        model, limits=Limits(slow_reader_timeout_s=server.slow_reader_timeout_s), config=engine, **settings
    )
    with listen(server) as sock:
        show(_resolved({"model": model, **settings}, engine, server).rstrip())
        address, actual = sock.getsockname()[:2]
        show(f"listening on http://{f'[{address}]' if ':' in address else address}:{actual}")
        serve_on(client, server, sock)


def _over(settings: Settings, **given: Any) -> Settings:
    """`settings` with what was given in place of its own."""
    return dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})


def _resolved(load: dict[str, Any], engine: EngineConfig, server: ServerConfig) -> str:
    """Everything that was decided, as YAML."""
    engine_fields = dataclasses.asdict(engine.resolve())
    sections = {"load": load, "engine": engine_fields, "server": server.shown}
    text: str = yaml.safe_dump(_plain(sections), sort_keys=False, default_flow_style=None)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
