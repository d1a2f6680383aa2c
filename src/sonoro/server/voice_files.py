"""Storage of voice files: a folder, a bucket that fsspec supports, or memory."""

import contextlib
import os
import tempfile
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec

from sonoro.core.errors import ConfigError

MAX_VOICE_BYTES = 16 * 2**20
"""The largest file that is read: an encoded voice has some hundred KB."""

_UNFINISHED = ".tmp"
_ABANDONED_S = 3600.0
"""An unfinished file older than this was left by a killed process."""


class NotAVoice(OSError):
    """A file that cannot be a voice, whatever it holds: too large, or not a regular file."""


class Files(Protocol):
    """A flat store of files by name; other processes may change it too. Methods raise nothing but `OSError`."""

    def stamps(self) -> dict[str, Hashable]:
        """All files by name, each with a stamp that changes when the file is replaced."""

    def create(self, name: str, data: bytes) -> Hashable:
        """Write a new file atomically; return its stamp, or None if unknown. Raises `FileExistsError`."""

    def read(self, name: str) -> bytes:
        """The content of a file. Raises `NotAVoice`, before reading, if it has more than `MAX_VOICE_BYTES`."""

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""


class Memory:
    """Files in memory, lost with the process."""

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
    """Files in the folder `path`, which is created if missing. Unfinished files are not listed."""

    def __init__(self, path: str) -> None:
        try:
            self._path = Path(path).expanduser()
        except RuntimeError as error:  # "~" of a user who has no home
            raise FileNotFoundError(str(error)) from error
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
            raise NotAVoice(f"{name} is not a file")
        _check_size(name, path.stat().st_size)
        with path.open("rb") as file:
            return file.read(MAX_VOICE_BYTES)

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
        """Remove unfinished files of killed processes, but none that another server may be writing."""
        for path in self._path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _is_unfinished(path) and path.stat().st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()


def open_files(field: str, location: str) -> Files:
    """The files in `location`: a folder, or the URL of a bucket. Raises `ConfigError` about `field`."""
    is_url = "://" in location
    try:
        return Bucket(location) if is_url else Folder(location)
    except OSError as error:
        limit = f"it must be {'a bucket' if is_url else 'a folder'} that can be used ({error})"
        raise ConfigError(field, location, limit) from error


class Bucket:
    """Objects below `url`, such as `s3://bucket/voices`, by fsspec with its credentials. The bucket must exist."""

    def __init__(self, url: str) -> None:
        with _as_os_error():
            self._files, path = fsspec.url_to_fs(url)
            self._path = path.rstrip("/")
            bucket = "/".join(self._path.split("/")[: 2 if self._path.startswith("/") else 1])
            # Do not create a bucket: its name may be misspelt.
            if not self._files.exists(bucket):
                raise FileNotFoundError(f"there is no {bucket!r} that can be reached")
            if bucket != self._path:
                self._files.makedirs(self._path, exist_ok=True)
        self.stamps()

    def stamps(self) -> dict[str, Hashable]:
        with _as_os_error():
            # A cached listing lacks what other servers wrote.
            self._files.invalidate_cache()
            try:
                found: list[dict[str, Any]] = self._files.ls(self._path, detail=True)
            except FileNotFoundError:
                return {}  # a bucket has no folder without objects
            names = {entry["name"].rpartition("/")[2]: entry for entry in found if entry["type"] == "file"}
            # Stores name an object's version differently (ETag, generation, time), so compare all facts.
            return {name: str(sorted(names[name].items())) for name in sorted(names) if name}

    def create(self, name: str, data: bytes) -> Hashable:
        with _as_os_error():
            self._files.pipe_file(f"{self._path}/{name}", data, mode="create")
        # The write succeeded, even if the listing fails.
        with contextlib.suppress(OSError):
            return self.stamps().get(name)
        return None

    def read(self, name: str) -> bytes:
        with _as_os_error():
            size = self._files.size(f"{self._path}/{name}") or 0
            _check_size(name, size)
            # The size may be that of an older listing. A store may refuse a range of an empty object.
            limits = {"start": 0, "end": MAX_VOICE_BYTES} if size else {}
            data: bytes = self._files.cat_file(f"{self._path}/{name}", **limits)
            return data

    def delete(self, name: str) -> None:
        with _as_os_error(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")


def _check_size(name: str, size: int) -> None:
    if size > MAX_VOICE_BYTES:
        raise NotAVoice(f"{name} has {size} bytes; a voice has at most {MAX_VOICE_BYTES}")


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn any other error of a library (not installed, no credentials) into an `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _rename(unfinished: str, path: Path) -> None:
    """Move a file to `path`. Raises `FileExistsError` if it exists, where the file system has hard links."""
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
