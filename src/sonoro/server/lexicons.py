"""Registered lexicons: a store in memory, owned by keys. Files of the server's own have names too. Knows no route."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from sonoro.core.errors import InvalidRequest
from sonoro.server.errors import TooManyLexicons, UnknownLexicon
from sonoro.server.keys import ANONYMOUS, Caller
from sonoro.text.script import Lexicon, lexicon_of, read_lexicon

MAX_OF_KEY, MAX_VERSIONS, MAX_RULES = 64, 8, 200_000
"""Lexicons of a key, versions of one, and rules of all keys together; each key has an equal share of the last."""

MAX_INLINE_RULES = 500
"""Rules that a request may bring: it takes 10 ms to make them ready."""

MAX_NAME = 100
_SUFFIXES = (".pls", ".xml", ".json", ".txt", ".tsv")


@dataclass(eq=False)
class StoredLexicon:
    """A lexicon with its versions, by digest; the newest comes last."""

    id: str
    name: str
    owner: str
    description: str = ""
    created_s: float = field(default_factory=time.time)
    versions: dict[str, Lexicon] = field(default_factory=dict)

    @property
    def newest(self) -> Lexicon:
        return next(reversed(self.versions.values()))


class LexiconStore:
    """The lexicons that callers have registered, and files of `folder`, if it is not empty. Not persistent."""

    def __init__(self, folder: str, owners: int) -> None:
        self._folder, self._share = Path(folder) if folder else None, MAX_RULES // owners
        self._stored: dict[str, StoredLexicon] = {}
        self._files: dict[tuple[str, int], Lexicon] = {}

    def of(self, caller: Caller) -> list[StoredLexicon]:
        """The lexicons that `caller` may use."""
        seen = [one for one in self._stored.values() if one.owner in ("", caller.owner) or caller.is_admin]
        return [] if caller is ANONYMOUS else seen

    def stored(self, caller: Caller, name: str) -> StoredLexicon:
        """The lexicon with that id or name. Raises `UnknownLexicon`."""
        seen = self.of(caller)
        found = [one for one in seen if one.id == name] or [one for one in seen if one.name == name]
        if not found:
            raise UnknownLexicon("lexicons", name, "no lexicon of that name is registered with this key")
        return found[-1]

    def put(
        self, caller: Caller, lexicon: Lexicon, name: str, *, description: str = "", into: StoredLexicon | None = None
    ) -> StoredLexicon:
        """Store `lexicon` as a new one of that name, or as the newest version of `into`."""
        if not name.strip() or len(name) > MAX_NAME or "/" in name:
            raise InvalidRequest("name", name, f"it must have 1 to {MAX_NAME} characters, without a slash")
        mine = [one for one in self._stored.values() if one.owner == caller.owner]
        held = sum(len(each.rules) for one in mine for each in one.versions.values())
        if (into is None and len(mine) >= MAX_OF_KEY) or held + len(lexicon.rules) > self._share:
            raise TooManyLexicons(f"a key may hold {MAX_OF_KEY} lexicons and {self._share} rules; delete one first")
        if into is None:
            into = StoredLexicon(uuid.uuid4().hex[:20], name, caller.owner, description)
            self._stored[into.id] = into
        into.versions.pop(lexicon.version, None)
        into.versions[lexicon.version] = lexicon
        if len(into.versions) > MAX_VERSIONS:
            del into.versions[next(iter(into.versions))]
        return into

    def own(self, caller: Caller, name: str) -> StoredLexicon:
        """One's own lexicon with that id or name. Raises `UnknownLexicon`."""
        found = self.stored(caller, name)
        if found.owner != caller.owner and not caller.is_admin:
            raise UnknownLexicon("lexicons", name, "it is not yours")
        return found

    def delete(self, caller: Caller, name: str) -> None:
        """Delete one's own lexicon. Raises `UnknownLexicon`."""
        del self._stored[self.own(caller, name).id]

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

    def _file(self, name: str) -> Lexicon | None:
        if self._folder is None or Path(name).name != name or not name.lower().endswith(_SUFFIXES):
            return None
        path = self._folder / name
        try:
            key = name, path.stat().st_mtime_ns
            if key not in self._files:
                self._files = {one: lexicon for one, lexicon in self._files.items() if one[0] != name}
                self._files[key] = read_lexicon(path.read_bytes(), name)
        except OSError:
            return None
        return self._files[key]


def named(store: LexiconStore, caller: Caller, given: Sequence[JsonValue]) -> list[Lexicon]:
    """The lexicons that a request names or brings: names, objects of `name` and `version`, or rules."""
    lexicons: list[Lexicon] = []
    brought = 0
    for one in given:
        if isinstance(one, str):
            lexicons.append(store.find(caller, one))
        elif isinstance(one, dict) and isinstance(one.get("name"), str) and one.keys() <= {"name", "version"}:
            version = one.get("version")
            lexicons.append(store.find(caller, str(one["name"]), None if version is None else str(version)))
        else:
            lexicons.append(lexicon_of(one))
            brought += len(lexicons[-1].rules)
            if brought > MAX_INLINE_RULES:
                limit = f"a request brings at most {MAX_INLINE_RULES}; register a lexicon and name it"
                raise InvalidRequest("lexicons", f"{brought} rules", limit)
    return lexicons


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
