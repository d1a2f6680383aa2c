"""`sonoro calibrate`: finds the word heads of a checkpoint, once. Imports torch when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from sonoro.cli.common import DataType, Device, LoadFormat, NamedModel
from sonoro.cli.streams import show


def calibrate(
    model: NamedModel = None,
    *,
    voice: Annotated[str | None, typer.Option(help="the voice to speak with; default: the model's first")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the table; default: in the checkpoint")] = None,
    device: Device = "auto",
    dtype: DataType = None,
    load_format: LoadFormat = "auto",
) -> None:
    """Find the attention heads of MODEL that follow the text, and write the table from which word times are derived.
    The model speaks six sentences. Word times by such a table are marked as estimated. A measured table is better, and
    is not replaced unless --output names it."""
    from sonoro.audio.files import check_place
    from sonoro.core.errors import ConfigError, OutputError
    from sonoro.engine import word_heads
    from sonoro.models import registry
    from sonoro.models.words import ShowsWords
    from sonoro.words.heads import FILE, write_heads

    loaded = registry.load(model, device=device, dtype=dtype, load_format=load_format)
    folder = registry.locate(model) if load_format == "auto" else None
    ConfigError.unless(bool(output or folder), "output", None, "name a file: the model has no folder")
    file = output or (folder or Path()) / FILE
    is_kept = output is None and isinstance(loaded.model, ShowsWords) and loaded.model.word_heads.is_measured
    ConfigError.unless(not is_kept, "output", None, f"{file} was measured: name another file")
    check_place(file)
    found = word_heads.calibrate(loaded.model, voice=voice)
    for layout, judged in found.judged.items():
        for one in judged[:3]:
            show(
                f"{layout}: layer {one.layer} head {one.head}: mass {one.mass:.2f},"
                f" {1000 * one.deviation_s:.0f} ms from the pace of letters, {one.shift:.2f} tokens ahead"
                f"{'' if one.points else ': does not follow the text'}"
            )
    if not found.heads.places:
        show("no head follows the text: this model has no word times")
    try:
        show(f"{write_heads(file, found.heads)}")
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}") from error
