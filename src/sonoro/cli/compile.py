"""`sonoro compile`: compiles the kernels of an engine ahead of its start, without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonoro.cli.common import CodecType, DataType, NamedModel, Quantization, number
from sonoro.cli.streams import show
from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.core.folders import kernel_cache_folder

if TYPE_CHECKING:
    from sonoro.compile.variants import Compiled, Variant


def compile_command(
    model: NamedModel = None,
    *,
    device_name: Annotated[
        str | None, typer.Option(help='the GPU\'s name by its driver, such as "NVIDIA H200"; default: the GPU here')
    ] = None,
    slots: Annotated[int | None, number("slots", int, "requests that the engine runs at once")] = None,
    config: Annotated[Path | None, typer.Option(help="the server's YAML file")] = None,
    dtype: DataType = None,
    codec_dtype: CodecType = None,
    quantization: Quantization = None,
    processes: Annotated[int | None, number("processes", int, "compiler processes; default: one per core")] = None,
) -> None:
    """Compile all kernels of a server of MODEL into Triton's cache (TRITON_CACHE_DIR). Needs no GPU.
    MODEL, slots, configuration, dtype and quantization must be those of the server."""
    try:
        # First: without a GPU, kernels are left out unless it is there.
        importlib.import_module("triton")
    except ImportError as error:
        raise ConfigError("triton", None, "it is not installed: kernels are compiled by it") from error
    from sonoro.compile.kernels import compile_kernels
    from sonoro.compile.variants import card_named, current_card
    from sonoro.core.config import usable_cores
    from sonoro.server.config import read_sections
    from sonoro.transport.messages import WorkerSettings

    ConfigError.unless(processes is None or processes >= 1, "processes", processes, "it must be at least 1")
    card = card_named(device_name) if device_name is not None else current_card()
    engine = read_sections(config)[0] if config else EngineConfig()
    engine = engine.over(slots=slots, codec_dtype=codec_dtype, quantization=quantization)

    def tell(done: int, count: int, variant: Variant, compiled: Compiled) -> None:
        kernel = variant.kernel.rpartition(":")[2]
        what = compiled.error
        if not what and compiled.shared_bytes > card.shared_bytes:
            what = f"takes {compiled.shared_bytes} bytes of shared memory, too many"
        show(f"{done}/{count} {kernel}" + (f": {what}" if what else ""))

    settings = WorkerSettings(model=model, device="cuda", dtype=dtype, config=engine)
    record = compile_kernels(settings, card, processes or usable_cores(), tell)
    if record is None:
        show(f"all kernels for {card.name} are in {kernel_cache_folder()}")
        return
    show(f"{len(record.entries)} kernels for {card.name} in {kernel_cache_folder()}")
    if record.errors:
        show(f"{len(record.errors)} cannot be compiled for it; slower PyTorch operations replace them")
