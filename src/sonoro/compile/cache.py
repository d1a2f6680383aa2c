"""Records for which settings, code, compiler and card the kernels in Triton's cache were compiled. Knows no kernel."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

import sonoro
from sonoro.compile.variants import Card, Variant
from sonoro.core.folders import kernel_cache_folder
from sonoro.runtime.kernels import plans_of
from sonoro.transport.messages import WorkerSettings

_SHAPING = (
    *("slots", "max_positions", "max_frames", "prefill_tokens", "chunk_frames"),
    *("codec_dtype", "frame_batches", "prefill_buckets", "codec_batches", "model_settings", "quantization"),
    *("max_shared_bytes", "tuning"),
)
"""The configuration fields on which kernel variants depend."""


class Record(msgspec.Struct, frozen=True):
    """The outcome of a compilation: `made_for` which code, compiler and card; (kernel, entry of Triton's cache) pairs;
    (kernel, error) pairs of what this card cannot run, and of `unfinished` ones, whose compiler was killed or such."""

    made_for: dict[str, str]
    entries: list[tuple[str, str]] = []
    errors: list[tuple[str, str]] = []
    unfinished: list[tuple[str, str]] = []


class KernelCache:
    """The record of the kernels of an engine of `settings` on a `card`, as a file beside Triton's cache."""

    def __init__(self, settings: WorkerSettings, card: Card) -> None:
        config = settings.config.resolve()
        shaping = {name: getattr(config, name) for name in _SHAPING}
        what = (_model_folder(settings.model), _dtype(settings, card), shaping)
        self._name = hashlib.sha256(msgspec.json.encode(what, order="sorted")).hexdigest()
        self._folder = kernel_cache_folder()
        self._path = self._folder / "sonoro" / f"{self._name}-{re.sub(r'[^0-9a-z]+', '-', card.name.lower())}.json"
        self.made_for = {
            "code": _code(),
            "torch": str(torch.__version__),
            "triton": importlib.metadata.version("triton"),
            "card": repr(card),
            "plans": _digest(*(path for path in plans_of(card).values() if path.is_file())),
        }

    @property
    def misfits(self) -> list[str]:
        """Why the kernels must be compiled: [] if they need not be, [""] if there is no record, else what differs from
        the record ("code", "torch", "triton", "card", the user's "plans"), ["entries"] if some are gone from Triton's
        cache, or ["unfinished"]."""
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.DecodeError):
            return ["card" if any(self._path.parent.glob(f"{self._name}-*.json")) else ""]
        names = [name for name, value in self.made_for.items() if record.made_for.get(name) != value]
        names += ["entries"] * (not names and not all((self._folder / entry).is_dir() for _, entry in record.entries))
        return names or ["unfinished"] * bool(record.unfinished)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the file lock of this record, which is freed when the process and its forks end."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            # Some file systems have no locks: then concurrent starts compile the same kernels.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            # The previous holder has removed all notes, those of other code too.
            self._done.mkdir(parents=True, exist_ok=True)
            yield

    def note(self, variant: Variant) -> None:
        """Note that `variant` was compiled, or cannot be, so that launches need not wait for the others."""
        with contextlib.suppress(OSError):  # without the note, launches wait for the end of the compilation
            (self._done / _name(variant)).touch()

    def has(self, variant: Variant) -> bool:
        """Whether any process has noted `variant`."""
        return (self._done / _name(variant)).exists()

    @property
    def _done(self) -> Path:
        return self._path.with_suffix("") / hashlib.sha256(msgspec.json.encode(self.made_for)).hexdigest()[:16]

    def write(self, record: Record) -> None:
        """Write `record` atomically, and remove the notes, which it replaces."""
        part = self._path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(record))
        part.replace(self._path)
        shutil.rmtree(self._path.with_suffix(""), ignore_errors=True)


def _name(variant: Variant) -> str:
    """A file name for `variant`, equal in all processes."""
    return hashlib.sha256(repr(variant).encode()).hexdigest()


def _model_folder(model: str | None) -> str | None:
    """The resolved path if `model` is a folder, else `model`."""
    return model if model is None or not Path(model).is_dir() else str(Path(model).resolve())


def _dtype(settings: WorkerSettings, card: Card) -> str:
    """The dtype a model is served in; "auto" on cards without bfloat16, where it depends on the model."""
    wanted = settings.dtype or "auto"
    return "bfloat16" if wanted == "auto" and card.has_bfloat16 else wanted


def _code() -> str:
    """A digest of the package's code and its tuned plans."""
    package = Path(sonoro.__file__).parent
    return _digest(*sorted([*package.rglob("*.py"), *(package / "ops").rglob("*.json")]))


def _digest(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
