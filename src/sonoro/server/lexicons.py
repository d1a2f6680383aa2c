"""Registered lexicons, owned by keys: a store in memory, a folder or a bucket. Files of the server's own have names
too. Knows no route."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from pydantic import JsonValue

from sonoro.core.errors import ConfigError, EngineError, InvalidRequest
from sonoro.server.config import ServerConfig
from sonoro.server.errors import NotReady, NotStored, TooManyLexicons, UnknownLexicon
from sonoro.server.keys import ANONYMOUS, Caller
from sonoro.server.shared import Shared
from sonoro.server.voice_files import MAX_VOICE_BYTES, Files, Memory, NotAVoice, open_files
from sonoro.text.script import Lexicon, Rule, lexicon_of, read_lexicon

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_OF_KEY, MAX_VERSIONS, MAX_RULES = 64, 8, 200_000
"""Lexicons of a key, versions of one, and rules of all keys together; each key has an equal share of the last."""

MAX_INLINE_RULES = 500
"""Rules that a request may bring: it takes 10 ms to make them ready."""

MAX_NAME = 100
_SUFFIX = ".json"
_SUFFIXES = (".pls", ".xml", ".json", ".txt", ".tsv")


@dataclass(eq=False)
class StoredLexicon:
    """A lexicon with its versions, by digest, and the file of each; the newest comes last."""

    id: str
    name: str
    owner: str
    description: str = ""
    created_s: float = field(default_factory=time.time)
    versions: dict[str, Lexicon] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> Lexicon:
        return next(reversed(self.versions.values()))

    def add(self, lexicon: Lexicon, file: str) -> list[str]:
        """Add a version, which is as new as the name of its file says; returns the files that are not needed any more.
        Each server comes to the same versions, in whatever order it reads the files."""
        known = self.files.get(lexicon.version, "")
        if known > file:
            return [file]
        self.drop(lexicon.version)
        by_file = sorted((file, version) for version, file in [*self.files.items(), (lexicon.version, file)])
        lexicons = {**self.versions, lexicon.version: lexicon}
        self.files = {version: file for file, version in by_file[-MAX_VERSIONS:]}
        self.versions = {version: lexicons[version] for version in self.files}
        return [old for old, _ in by_file[:-MAX_VERSIONS]] + ([known] if known and known != file else [])

    def next_file(self) -> str:
        """The name of a file that is newer than all others, also those of servers whose clock is ahead."""
        newest = max(self.files.values(), default="-0").rpartition("-")[2].removesuffix(_SUFFIX)
        return f"{self.id}-{max(time.time_ns(), int(newest) + 1):020d}{_SUFFIX}"

    def drop(self, version: str) -> None:
        self.versions.pop(version, None)
        self.files.pop(version, None)


class _File(msgspec.Struct, frozen=True):
    """What a file holds: a version of a lexicon, with what is known of the lexicon."""

    id: str
    name: str
    owner: str
    description: str
    created_s: float
    is_recursive: bool
    rules: list[Rule]


class LexiconStore:
    """The lexicons that callers have registered, in the server's `lexicons_folder` or in memory, and files of its
    `reference_folder`. `always` are those of every text. Call `open` first. Other servers may write to the same folder;
    `refresh` reads their changes, and `catch_up` those of other fronts: call it before a lexicon is looked up."""

    def __init__(self, config: ServerConfig, owners: int, shared: Shared | None = None) -> None:
        shared = shared or Shared.of(config, 1)
        self.always = tuple(_of_server(path) for path in config.lexicons)
        self._folder, self._share = config.reference_folder, MAX_RULES // owners
        self._location = shared.location("lexicons", config.lexicons_folder)
        self._files, self._changes = cast(Files, Memory()), shared.changes("lexicons")
        self._thread, self._lock = ThreadPoolExecutor(1, thread_name_prefix="lexicons"), asyncio.Lock()
        self._stored: dict[str, StoredLexicon] = {}
        self._is_read = not self._location
        self._read: dict[tuple[str, int], Lexicon] = {}
        self._passed_over: set[str] = set()

    async def open(self) -> None:
        """Read the registered lexicons. Raises `ConfigError` if the folder cannot be used."""
        if self._location:
            self._files = await self._in_thread(open_files, "lexicons_folder", self._location)
        await self.refresh()
        self._is_read = True

    def close(self) -> None:
        """Drop queued work; running work is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def refresh(self) -> None:
        """Read what other servers have written. A failure logs a warning."""
        if not self._location:
            return
        async with self._lock:
            try:
                there = await self._in_thread(self._files.stamps)
                known = {file: one for one in self._stored.values() for file in one.files.values()}
                for file, one in known.items():
                    if file not in there:
                        one.drop(next(version for version, its in one.files.items() if its == file))
                        if not one.versions:
                            del self._stored[one.id]
                for file in sorted(there.keys() - known.keys() - self._passed_over):
                    await self._load(file)
            except OSError as error:
                logger.warning("event=lexicons_not_read reason=%r", str(error))

    async def catch_up(self) -> None:
        """Read what other fronts of this server have changed, if they have. Raises `NotReady` before `open`."""
        if not self._is_read:
            raise NotReady("the server is starting and has not read its lexicons yet; try again")
        await self._changes.catch_up(self.refresh)

    def of(self, caller: Caller) -> list[StoredLexicon]:
        """The lexicons that `caller` may use, the newest last."""
        seen = [one for one in self._stored.values() if one.owner in ("", caller.owner) or caller.is_admin]
        return [] if caller is ANONYMOUS else sorted(seen, key=lambda one: one.created_s)

    def stored(self, caller: Caller, name: str) -> StoredLexicon:
        """The lexicon with that id or name. Raises `UnknownLexicon`."""
        seen = self.of(caller)
        found = [one for one in seen if one.id == name] or [one for one in seen if one.name == name]
        if not found:
            raise UnknownLexicon("lexicons", name, "no lexicon of that name is registered with this key")
        return found[-1]

    async def put(
        self, caller: Caller, lexicon: Lexicon, name: str, *, description: str = "", by_name: bool = False
    ) -> StoredLexicon:
        """Store `lexicon` as a new one of that name; `by_name` as the newest version of the caller's own of that name,
        if there is one. Raises `InvalidRequest`, `TooManyLexicons` and `NotStored`."""
        async with self._lock:
            owner, known = caller.owner, self._stored.values() if by_name else ()
            named = [one for one in known if (one.owner, one.name) == (owner, name)]
            into = max(named, key=lambda one: one.created_s, default=None)
            one = into or StoredLexicon(_new_id(self._stored, owner, name if by_name else None), name, owner)
            return await self._put(one, lexicon, name, description)

    async def change(
        self, caller: Caller, id: str, edit: Callable[[Lexicon], Lexicon], name: str | None = None
    ) -> StoredLexicon:
        """Store what `edit`, called in a thread, makes of the newest version of one's own lexicon, which gets the
        `name` if given. No other change of this process comes between. Raises as `own` and `put`."""
        async with self._lock:
            one = self.own(caller, id)
            return await self._put(one, await self._in_thread(edit, one.newest), name or one.name)

    async def _put(self, one: StoredLexicon, lexicon: Lexicon, name: str, description: str = "") -> StoredLexicon:
        """Store `lexicon` as the newest version of `one`, which gets the name; call it under the lock."""
        if not name.strip() or len(name) > MAX_NAME or "/" in name:
            raise InvalidRequest("name", name, f"it must have 1 to {MAX_NAME} characters, without a slash")
        mine = [each for each in self._stored.values() if each.owner == one.owner]
        held = sum(len(version.rules) for each in mine for version in each.versions.values())
        added = len(lexicon.rules) * (lexicon.version not in one.versions)
        if (one not in mine and len(mine) >= MAX_OF_KEY) or held + added > self._share:
            raise TooManyLexicons(f"a key may hold {MAX_OF_KEY} lexicons and {self._share} rules; delete one first")
        file, description = one.next_file(), description or one.description
        facts = one.id, name, one.owner, description, one.created_s
        await self._write(file, _File(*facts, lexicon.is_recursive, list(lexicon.rules)))
        one.name, one.description = name, description
        self._stored[one.id] = one
        for old in one.add(lexicon, file):
            await self._remove(old)
        self._changes.note()
        return one

    def own(self, caller: Caller, name: str) -> StoredLexicon:
        """One's own lexicon with that id or name. Raises `UnknownLexicon`."""
        found = self.stored(caller, name)
        if found.owner != caller.owner and not caller.is_admin:
            raise UnknownLexicon("lexicons", name, "it is not yours")
        return found

    async def delete(self, caller: Caller, name: str) -> None:
        """Delete one's own lexicon. Raises `UnknownLexicon`, and `EngineError` if that fails."""
        async with self._lock:
            one = self.own(caller, name)
            for version, file in [*one.files.items()]:
                await self._remove(file)
                one.drop(version)
            del self._stored[one.id]
            self._changes.note()

    def find(self, caller: Caller, name: str, version: str | None = None) -> Lexicon:
        """The lexicon of that id or name, or the server's own file of that name. Raises `UnknownLexicon`."""
        try:
            stored = self.stored(caller, name)
        except UnknownLexicon:
            if version is None and (lexicon := self._file(name)) is not None:
                return lexicon
            raise
        if version is not None and version not in stored.versions:
            raise UnknownLexicon("lexicons", version, f"{name} has no such version")
        return stored.newest if version is None else stored.versions[version]

    async def named(self, caller: Caller, given: Sequence[JsonValue]) -> tuple[Lexicon, ...]:
        """The lexicons of a request, which names or brings `given`: names, objects of `name` and `version`, or rules;
        then those of every text. Raises `InvalidRequest`, and `UnknownLexicon`."""
        await self.catch_up()
        try:
            return (*self._named(caller, given), *self.always)
        except UnknownLexicon:
            if not self._location:
                raise
        await self.refresh()
        return (*self._named(caller, given), *self.always)

    def _named(self, caller: Caller, given: Sequence[JsonValue]) -> list[Lexicon]:
        lexicons: list[Lexicon] = []
        brought = 0
        for one in given:
            if isinstance(one, str):
                lexicons.append(self.find(caller, one))
            elif isinstance(one, dict) and isinstance(one.get("name"), str) and one.keys() <= {"name", "version"}:
                version = one.get("version")
                lexicons.append(self.find(caller, str(one["name"]), None if version is None else str(version)))
            else:
                lexicons.append(lexicon_of(one))
                brought += len(lexicons[-1].rules)
                if brought > MAX_INLINE_RULES:
                    limit = f"a request brings at most {MAX_INLINE_RULES}; register a lexicon and name it"
                    raise InvalidRequest("lexicons", f"{brought} rules", limit)
        return lexicons

    def _file(self, name: str) -> Lexicon | None:
        if not self._folder or Path(name).name != name or not name.lower().endswith(_SUFFIXES):
            return None
        path = Path(self._folder) / name
        try:
            key = name, path.stat().st_mtime_ns
            if key not in self._read:
                self._read = {one: lexicon for one, lexicon in self._read.items() if one[0] != name}
                self._read[key] = read_lexicon(path.read_bytes(), name)
        except OSError:
            return None
        return self._read[key]

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _write(self, file: str, content: _File) -> None:
        data = msgspec.json.encode(content)
        if len(data) > MAX_VOICE_BYTES:
            raise InvalidRequest("rules", f"{len(data)} bytes", f"a lexicon has at most {MAX_VOICE_BYTES}")
        if self._location:
            try:
                await self._in_thread(self._files.create, file, data)
            except OSError as error:
                raise NotStored(f"the lexicon could not be stored: {error.strerror or error}") from error

    async def _remove(self, file: str) -> None:
        if self._location:
            try:
                await self._in_thread(self._files.delete, file)
            except OSError as error:
                raise EngineError(f"the lexicon could not be deleted: {error.strerror or error}") from error

    async def _load(self, file: str) -> None:
        """Read a `file` that is not known yet."""
        try:
            stored = await self._in_thread(lambda: msgspec.json.decode(self._files.read(file), type=_File))
            lexicon = await self._in_thread(lambda: Lexicon(stored.rules, is_recursive=stored.is_recursive))
            if not re.fullmatch(rf"{re.escape(stored.id)}-[0-9]{{20}}{_SUFFIX}", file):
                raise ValueError(f"a version of this lexicon is in a file {stored.id}-NUMBER{_SUFFIX}, of 20 digits")
        except (NotAVoice, ValueError, InvalidRequest) as error:
            self._passed_over.add(file)
            logger.warning("event=lexicon_passed_over file=%r reason=%r", file, str(error))
            return
        known = StoredLexicon(stored.id, stored.name, stored.owner, stored.description, stored.created_s)
        one = self._stored.setdefault(stored.id, known)
        for old in one.add(lexicon, file):
            await self._in_thread(self._files.delete, old)
        if one.files.get(one.newest.version) == file:
            one.name, one.description = stored.name, stored.description


def _new_id(taken: Container[str], owner: str, name: str | None) -> str:
    """An id; the same for the same `name`, which several servers may register at a time."""
    named = hashlib.sha256(json.dumps([owner, name]).encode()).hexdigest()[:20]
    return uuid.uuid4().hex[:20] if name is None or named in taken else named


def _of_server(path: str) -> Lexicon:
    """The lexicon in the server's own file at `path`. Raises `ConfigError`."""
    try:
        return read_lexicon(Path(path).read_bytes(), path)
    except (OSError, InvalidRequest) as error:
        raise ConfigError("lexicons", path, f"it must be a file of PLS, JSON or lines word=alias ({error})") from error


async def made(rules: object, content: str | bytes | None = None) -> Lexicon:
    """The lexicon of `rules`, or of a file with `content`. In a thread: many rules take .2 s."""
    if content is not None:
        data = content.encode() if isinstance(content, str) else content
        return await asyncio.to_thread(read_lexicon, data)
    return await asyncio.to_thread(lexicon_of, rules)


def shown(stored: StoredLexicon) -> dict[str, Any]:
    """A lexicon as its owner sees it."""
    newest = stored.newest
    facts = {"name": stored.name, "id": stored.id, "version": newest.version, "rules": len(newest.rules)}
    return {**facts, "description": stored.description, "created_at": int(stored.created_s)}
