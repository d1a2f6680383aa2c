"""`sonoro serve`: the speech server, over engines in processes of their own. Loads no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import yaml

from sonoro.cli_common import CodecType, DataType, Device, LoadFormat, NamedModel, number, show
from sonoro.core.config import EngineConfig, log_as_json, log_level
from sonoro.core.errors import ConfigError
from sonoro.core.logs import configure_logging

if TYPE_CHECKING:
    from sonoro.server.config import ServerConfig

__all__ = ["serve"]

Settings = TypeVar("Settings", EngineConfig, "ServerConfig")

Config = Annotated[Path | None, typer.Option(help="YAML file with the sections engine and server")]


def serve(
    model: NamedModel = None,
    *,
    host: Annotated[str | None, typer.Option(help="address to listen at; 127.0.0.1 if none")] = None,
    port: Annotated[int | None, number("port", int, "port to listen at; 8000 if none, 0 takes a free one")] = None,
    device: Device = "auto",
    devices: Annotated[
        str | None, typer.Option(help='an engine for each: GPUs by number, as "0,1,2,3", or cpu; --device if none')
    ] = None,
    codec_device: Annotated[
        str | None, typer.Option(help="a GPU of its own for the codec, by number; that of all else if none")
    ] = None,
    dtype: DataType = None,
    codec_dtype: CodecType = None,
    load_format: LoadFormat = "auto",
    config: Config = None,
    slots: Annotated[int | None, number("slots", int, "requests that the engine runs at once")] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="capture no graphs: launch the same kernels one by one")
    ] = False,
    voices_folder: Annotated[
        str | None, typer.Option(help="a folder, or a bucket as s3://..., for uploaded voices; in memory if none")
    ] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="a key that clients must send; may be repeated")] = None,
    admin_key: Annotated[
        list[str] | None, typer.Option(help="a key that may use and delete everybody's voices; may be repeated")
    ] = None,
    model_alias: Annotated[
        list[str] | None, typer.Option(help="a further name of the model, in place of OpenAI's; may be repeated")
    ] = None,
    voice_alias: Annotated[list[str] | None, typer.Option(help="NAME=VOICE of the model; may be repeated")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="an origin that browsers may call from; may be repeated; * for all")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="a name that clients may ask by, beside --host; may be repeated; * for any"),
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json, a line for each request; text if none")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved configuration as YAML, and serve nothing")
    ] = False,
    max_concurrency: Annotated[
        int | None, number("max_concurrency", int, "requests spoken at once; as many as the engines have slots if none")
    ] = None,
    max_waiting: Annotated[int | None, number("max_waiting", int, "requests that may wait for a place")] = None,
    max_sessions: Annotated[int | None, number("max_sessions", int, "sessions over a WebSocket at once")] = None,
    max_queue_wait_ms: Annotated[
        int | None, number("max_queue_wait_ms", int, "how long they wait for it before they are refused")
    ] = None,
    max_characters: Annotated[int | None, number("max_characters", int, "longest text of a request")] = None,
    max_batch_characters: Annotated[
        int | None, number("max_batch_characters", int, "longest texts of a batch together")
    ] = None,
    max_answer_bytes: Annotated[
        int | None, number("max_answer_bytes", int, "largest answer of a batch, as its texts could be spoken")
    ] = None,
    max_total_answer_bytes: Annotated[
        int | None, number("max_total_answer_bytes", int, "largest answers of batches at work, together")
    ] = None,
    max_body_bytes: Annotated[int | None, number("max_body_bytes", int, "largest body of a request")] = None,
    max_total_body_bytes: Annotated[
        int | None, number("max_total_body_bytes", int, "largest bodies at work, together")
    ] = None,
    max_upload_bytes: Annotated[int | None, number("max_upload_bytes", int, "largest recording")] = None,
    head_timeout_s: Annotated[
        float | None, number("head_timeout_s", float, "how long the head of a request may take to arrive")
    ] = None,
    body_timeout_s: Annotated[float | None, number("body_timeout_s", float, "how long its body may take")] = None,
    keep_alive_timeout_s: Annotated[
        int | None, number("keep_alive_timeout_s", int, "how long a connection may idle between requests")
    ] = None,
    slow_reader_timeout_s: Annotated[
        float | None, number("slow_reader_timeout_s", float, "how long a client may take nothing of its answer")
    ] = None,
    session_idle_timeout_s: Annotated[
        float | None, number("session_idle_timeout_s", float, "how long a session may say nothing")
    ] = None,
    shutdown_timeout_s: Annotated[
        float | None, number("shutdown_timeout_s", float, "what requests under way get at the end")
    ] = None,
    max_restarts: Annotated[
        int | None,
        number("max_restarts", int, "replacements of an engine within restart_window_s; then the server ends"),
    ] = None,
    restart_window_s: Annotated[
        float | None, number("restart_window_s", float, "the time in which crashes of an engine are counted")
    ] = None,
    allow_reference_urls: Annotated[
        bool, typer.Option("--allow-reference-urls", help="fetch recordings from public hosts")
    ] = False,
    reference_folder: Annotated[
        str | None, typer.Option(help="folder whose files recordings may be named from; none if none")
    ] = None,
    dialects_off: Annotated[
        list[str] | None, typer.Option(help="a wire format of other servers' clients not to answer; may be repeated")
    ] = None,
    wyoming: Annotated[
        str | None, typer.Option(help="PORT or HOST:PORT to speak Wyoming at, of Home Assistant; it has no keys")
    ] = None,
    wyoming_name: Annotated[
        str | None, typer.Option(help="the name by which Home Assistant discovers it; not announced if none")
    ] = None,
) -> None:
    """Serve OpenAI's speech API over HTTP."""
    given = locals()
    from sonoro.server.app import listen
    from sonoro.server.app import serve as serve_on
    from sonoro.server.config import ServerConfig, read_sections
    from sonoro.transport.fleet import Fleet, device_list
    from sonoro.transport.launch import Limits

    if devices is not None and device != "auto":
        raise ConfigError("devices", devices, f"--device {device} is given too; leave one of them out")
    named = (device,) if devices is None else device_list(devices)

    engine, server = read_sections(config) if config else (EngineConfig(), ServerConfig())
    apart = None if codec_device is None else ",".join(device_list(codec_device))
    wanted = {"slots": slots, "codec_device": apart, "codec_dtype": codec_dtype, "voices_folder": voices_folder}
    engine = _over(engine, {**wanted, "is_eager": eager or None})
    renamed = {
        "api_keys": tuple(api_key or ()) or None,
        "admin_keys": tuple(admin_key or ()) or None,
        "model_aliases": tuple(model_alias or ()) or None,
        "voice_aliases": _pairs(voice_alias) if voice_alias else None,
        "cors_origins": tuple(cors_origin or ()) or None,
        "allowed_hosts": tuple(allowed_host or ()) or None,
        "dialects_off": tuple(dialects_off or ()) or None,
        "allow_reference_urls": allow_reference_urls or None,
    }
    server = _over(server, {**given, **renamed}).resolve(engine.slots * len(named))
    settings: dict[str, Any] = {"dtype": dtype, "load_format": load_format}
    if print_config:
        show(_resolved({"model": model, "devices": list(named), **settings}, engine, server).rstrip())
        return
    log_as_json(server.log_format == "json")
    configure_logging(log_level("INFO"), is_json=server.log_format == "json")
    shared = {name: getattr(server, name) for name in ("slow_reader_timeout_s", "max_restarts", "restart_window_s")}
    limits = Limits(**shared)
    fleet = Fleet.launch(model, devices=named, limits=limits, config=engine, **settings)
    with listen(server) as sock:
        address, actual = sock.getsockname()[:2]
        show(f"listening on http://{f'[{address}]' if ':' in address else address}:{actual}")
        serve_on(fleet, server, sock)


def _over(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """`settings` with what was given in place of its own; what is not a field of it is passed over."""
    names = {field.name for field in dataclasses.fields(settings)}
    values = {name: value for name, value in given.items() if name in names and value is not None}
    return dataclasses.replace(settings, **values)


def _pairs(aliases: list[str]) -> dict[str, str]:
    """Names and what they stand for, from "name=voice". Raises `ConfigError`."""
    pairs = {}
    for alias in aliases:
        name, equals, voice = alias.partition("=")
        if not equals:
            raise ConfigError("voice_aliases", alias, "it must be NAME=VOICE")
        pairs[name] = voice
    return pairs


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
