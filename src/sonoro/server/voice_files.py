"""Where the files of voices are kept: a folder, a bucket of whatever fsspec speaks to, or memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec

__all__ = ["Bucket", "Files", "Folder", "Memory"]

_UNFINISHED = ".tmp"
_ABANDONED_S = 3600.0
"""After this long nobody is writing a file any more: a process was killed at it."""


class Files(Protocol):
    """Files by name, which others may add and remove too. Everything raises `OSError`, and nothing else."""

    def stamps(self) -> dict[str, Hashable]:
        """What there is by name, and what differs when another takes the place of one."""

    def create(self, name: str, data: bytes) -> Hashable:
        """Keep `data`, whole or not at all; its stamp, None if that is not known yet.

        Raises `FileExistsError` if there is one of that name.
        """

    def read(self, name: str) -> bytes:
        """The whole of a file. Raises `IsADirectoryError` for what is none and will not become one."""

    def delete(self, name: str) -> None:
        """Remove a file; one that is gone stays so."""


class Memory:
    """Files that are gone with the process."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def stamps(self) -> dict[str, Hashable]:
        return {name: id(data) for name, data in self._files.items()}

    def create(self, name: str, data: bytes) -> Hashable:
        self._files[name] = data
        return id(data)

    def read(self, name: str) -> bytes:
        return self._files[name]

    def delete(self, name: str) -> None:
        self._files.pop(name, None)


class Folder:
    """Files in the folder `path`, made if it is missing. What is being written is none of them."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        self._path.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def stamps(self) -> dict[str, Hashable]:
        stamps: dict[str, Hashable] = {}
        for path in sorted(path for path in self._path.iterdir() if not _is_unfinished(path)):
            with contextlib.suppress(FileNotFoundError):
                stamps[path.name] = _stamp(path)
        return stamps

    def create(self, name: str, data: bytes) -> Hashable:
        path = self._path / name
        if path.exists():
            raise FileExistsError(f"{name} is there already")
        handle, unfinished = tempfile.mkstemp(dir=self._path, prefix=f".{path.stem}.", suffix=_UNFINISHED)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _rename(unfinished, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
        self._sync()
        return _stamp(path)

    def read(self, name: str) -> bytes:
        path = self._path / name
        if not path.is_file():
            raise IsADirectoryError(f"{name} is not a file")
        return path.read_bytes()

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)
        self._sync()

    def _sync(self) -> None:
        handle = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Remove what was being written when its process was killed. Another engine may be writing right now."""
        for path in self._path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _is_unfinished(path) and path.stat().st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()


class Bucket:
    """Objects below `url`, as `s3://bucket/voices`. The bucket must be there, what comes after it need not.

    An object is there whole or not at all. Which libraries and credentials are used is fsspec's to say.
    """

    def __init__(self, url: str) -> None:
        with _as_os_error():
            self._files, path = fsspec.url_to_fs(url)
            self._path = path.rstrip("/")
            bucket = "/".join(self._path.split("/")[: 2 if self._path.startswith("/") else 1])
            # To make a bucket of a name that is misspelt would help nobody.
            if not self._files.exists(bucket):
                raise FileNotFoundError(f"there is no {bucket!r} that can be reached")
            if bucket != self._path:
                self._files.makedirs(self._path, exist_ok=True)
        self.stamps()

    def stamps(self) -> dict[str, Hashable]:
        with _as_os_error():
            # Others write there, of which a listing that is kept knows nothing.
            self._files.invalidate_cache()
            try:
                found: list[dict[str, Any]] = self._files.ls(self._path, detail=True)
            except FileNotFoundError:
                return {}  # without objects there is no folder either
            names = {entry["name"].rpartition("/")[2]: entry for entry in found if entry["type"] == "file"}
            # What tells objects apart goes by other names everywhere: an ETag, a generation, a time.
            return {name: str(sorted(names[name].items())) for name in sorted(names) if name}

    def create(self, name: str, data: bytes) -> Hashable:
        with _as_os_error():
            self._files.pipe_file(f"{self._path}/{name}", data, mode="create")
        # It is kept, whether or not it can be listed now.
        with contextlib.suppress(OSError):
            return self.stamps().get(name)
        return None

    def read(self, name: str) -> bytes:
        with _as_os_error():
            data: bytes = self._files.cat_file(f"{self._path}/{name}")
            return data

    def delete(self, name: str) -> None:
        with _as_os_error(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """What a library raises that is no `OSError` (it is not installed, it finds no credentials) becomes one."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _rename(unfinished: str, path: Path) -> None:
    """Let a file be found at `path`. Raises `FileExistsError` if another was faster, but where there are no links."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise
    except OSError:
        os.replace(unfinished, path)


def _stamp(path: Path) -> Hashable:
    facts = path.lstat()
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(_UNFINISHED)
