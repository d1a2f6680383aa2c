"""Texts and voices for the load generator: two hundred built-in texts, or a file of texts with recordings."""

import base64
import functools
import mimetypes
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from sonoro.core.errors import ConfigError

BUILTIN, LISTED = "builtin", "list"

_TEXT_FIELD = 3
"""Index of the text in a line `id|ref_text|ref_audio|text`, which may continue with a recording of the text."""


@dataclass(frozen=True)
class Recording:
    """A voice to clone: its audio file, its transcript, and whether only its x-vector (timbre) is used."""

    path: Path
    text: str | None = None
    x_vector_only: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a request's body. Raises `ConfigError` if the file cannot be read."""
        fields = {"ref_audio": _data_url(self.path), "ref_text": self.text}
        return fields | ({"x_vector_only_mode": True} if self.x_vector_only else {})


@dataclass(frozen=True)
class Prompt:
    """A text, and the recording that its line of the dataset names, if any."""

    text: str
    recording: Recording | None = None


def prompts(dataset: str) -> tuple[Prompt, ...]:
    """The texts of `dataset`: `builtin`, or a UTF-8 file with a text per line.
    A line with bars has the format of Seed-TTS, with paths relative to the file. Raises `ConfigError`."""
    if dataset == BUILTIN:
        texts = resources.files("sonoro.bench").joinpath("prompts.txt").read_text("utf-8")
        return tuple(map(Prompt, texts.splitlines()))
    try:
        lines = Path(dataset).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("dataset", dataset, f"it must be {BUILTIN} or a readable UTF-8 file ({error})") from error
    found = tuple(_prompt(number, line, Path(dataset).parent) for number, line in enumerate(lines, 1) if line.strip())
    ConfigError.unless(bool(found), "dataset", dataset, "it must hold at least one text")
    return found


def cloned(
    texts: tuple[Prompt, ...], ref: str | None, ref_text: str | None = None, *, x_vector_only: bool = False
) -> tuple[Prompt, ...]:
    """`texts` with the recording `ref` as voice; `list` keeps the recording of each text, None removes it.
    Reads every file once. Raises `ConfigError` naming the field or file."""
    if ref is None:
        ConfigError.unless(not ref_text, "ref_text", ref_text, "it needs ref: give that too")
        ConfigError.unless(not x_vector_only, "x_vector_only", x_vector_only, "it needs ref: give that too")
        return tuple(replace(text, recording=None) for text in texts)
    ConfigError.unless(ref != LISTED or ref_text is None, "ref_text", ref_text, "a list has its own")
    same, found = Recording(Path(ref), ref_text), []
    for text in texts:
        recording = text.recording if ref == LISTED else same
        if recording is None:
            raise ConfigError("ref", ref, "each line of the dataset must be id|ref_text|ref_audio|text")
        _data_url(recording.path)
        found.append(replace(text, recording=replace(recording, x_vector_only=x_vector_only)))
    return tuple(found)


def shuffled(texts: tuple[Prompt, ...], seed: str) -> Iterator[Prompt]:
    """Yield `texts` endlessly, reshuffled in every round, by `seed`."""
    draw = random.Random(seed)
    while True:
        yield from draw.sample(texts, len(texts))


@functools.lru_cache(maxsize=4096)
def _data_url(path: Path) -> str:
    """The audio file as a data URL; cached, as encoding it for each request would make the client send late."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError("ref", str(path), f"it must be a readable audio file ({error.strerror})") from error
    kind = mimetypes.guess_type(path)[0] or "audio/wav"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _prompt(number: int, line: str, folder: Path) -> Prompt:
    fields = [field.strip() for field in line.split("|")]
    text = fields[0 if len(fields) == 1 else min(_TEXT_FIELD, len(fields) - 1)]
    if 1 < len(fields) <= _TEXT_FIELD or not text:
        raise ConfigError(f"dataset line {number}", line, "it must be a text, or id|ref_text|ref_audio|text")
    return Prompt(text, Recording(folder / fields[2], fields[1] or None) if len(fields) > 1 else None)
