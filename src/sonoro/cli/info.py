"""`sonoro info`: what a model is and can do, and the memory of an engine of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec

from sonoro.cli.common import Config, DataType, Device, NamedModel, Quantization, number
from sonoro.cli.streams import show
from sonoro.core.config import EngineConfig

if TYPE_CHECKING:
    from sonoro.models.base import Description


def info(
    model: NamedModel = None,
    *,
    device: Device = "auto",
    dtype: DataType = None,
    slots: Annotated[int | None, number("slots", int, "add the GPU memory of an engine of so many, by part")] = None,
    quantization: Quantization = None,
    config: Config = None,
) -> None:
    """Show a model's configuration, voices, languages, options, parameters and memory."""
    from sonoro.models import registry

    sections = list(_sections(registry.describe(model, device=device, dtype=dtype)))
    if slots is not None or quantization is not None or config is not None:
        engine = (config or EngineConfig()).over(slots=slots, quantization=quantization)
        sections.append(_footprint(model, engine, dtype))
    for title, rows in sections:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        show(title, *(f"  {line.rstrip()}" for line in table))


def _sections(description: Description) -> Iterator[tuple[str, list[list[str]]]]:
    """The tables of `info`: a title and rows."""
    spec = description.spec
    yield spec.name, [[name, str(value)] for name, value in description.configuration.items()]
    speech = {
        "sample rate": f"{spec.sample_rate} Hz",
        "frame": f"{spec.hop} samples, {spec.frame_s * 1000:g} ms",
        "longest segment": f"{spec.max_frames} frames, {spec.max_frames * spec.frame_s:.0f} s",
        "voice": ", ".join(spec.voice_modes),
        "voices": ", ".join(spec.voices) or "none of its own",
        "languages": ", ".join(spec.languages),
        "instructions": "followed" if spec.accepts_instructions else "not followed",
    }
    yield "speech", [[name, value] for name, value in speech.items()]
    yield "sampling", [[name, str(value)] for name, value in msgspec.structs.asdict(spec.sampling).items()]
    yield "options", [[option.name, option.limit, f"default {option.default}", option.help] for option in spec.options]
    yield "parameters, by part", _counted(description.parameters)
    yield "parameters, by file", _counted(description.files)
    yield "memory", [[name, f"{count / 2**20:,.1f} MiB"] for name, count in description.memory_bytes.items()]


def _footprint(model: str | None, config: EngineConfig, dtype: str | None) -> tuple[str, list[list[str]]]:
    """The GPU memory of an engine, as a table of `info`."""
    from sonoro.compile.footprint import footprint

    parts = footprint(model, config, dtype).parts
    title = f"memory of an engine on a GPU: slots={config.slots} quantization={config.quantization}"
    return title, [[name, f"{count:,} bytes", f"{count / 2**20:,.1f} MiB"] for name, count in parts.items()]


def _counted(counts: dict[str, int]) -> list[list[str]]:
    return [[name, f"{count:,}"] for name, count in {**counts, "total": sum(counts.values())}.items()]
