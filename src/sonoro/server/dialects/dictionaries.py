"""The pronunciation dictionaries of ElevenLabs' and Cartesia's APIs, over the server's lexicons."""

import asyncio
import time
from typing import Any

from pydantic import Field, JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sonoro.core.errors import InvalidRequest
from sonoro.server.dialects.shared import Answering, Dialect, Message
from sonoro.server.lexicons import StoredLexicon, made
from sonoro.server.schemas import parse
from sonoro.server.voices import read_form
from sonoro.text.script.lexicon import Lexicon, Rule
from sonoro.text.script.lexicon_files import MAX_BYTES, lexicon_of, written_pls

_PATH = "/v1/pronunciation-dictionaries"
_AT_ONCE = 100


class _Rules(Message):
    rules: list[JsonValue] = Field(default_factory=list)
    rule_strings: list[str] = Field(default_factory=list)
    name: str | None = None
    description: str | None = None


class _Items(Message):
    name: str | None = None
    items: list[JsonValue] | None = None
    pinned: bool | None = None


class Locator(Message):
    """A dictionary that a request of ElevenLabs' API names."""

    pronunciation_dictionary_id: str
    version_id: str | None = None

    @property
    def named(self) -> dict[str, JsonValue]:
        version: dict[str, JsonValue] = {} if self.version_id is None else {"version": self.version_id}
        return {"name": self.pronunciation_dictionary_id, **version}


async def _body(dialect: Dialect, request: Request) -> bytes:
    async with dialect.service.speech.bodies.body(request, MAX_BYTES) as payload:
        return bytes(payload)


def _add(dialect: Dialect, method: str, path: str, answer: Answering) -> None:
    """Add a route that knows the dictionaries as all fronts have left them."""

    async def caught_up(request: Request) -> Response:
        await dialect.service.lexicons.catch_up()
        return await answer(request)

    dialect.http(method, path, caught_up)


def _dictionary(stored: StoredLexicon, *, is_new: bool = False) -> dict[str, Any]:
    newest, prefix = stored.newest, "" if is_new else "latest_"
    facts = {"id": stored.id, "name": stored.name, "created_by": stored.owner or "sonoro", "archived_time_unix": None}
    version = {f"{prefix}version_id": newest.version, f"{prefix}version_rules_num": len(newest.rules)}
    about = {"creation_time_unix": int(stored.created_s), "description": stored.description or None}
    return {**facts, **version, **about, "permission_on_resource": "admin"}


def _rule(rule: Rule) -> dict[str, Any]:
    said = {"alias": rule.alias} if rule.phonemes is None else {"phoneme": rule.phonemes, "alphabet": rule.alphabet}
    return {"type": "alias" if rule.phonemes is None else "phoneme", "string_to_replace": rule.text, **said}


class _ElevenLabs:
    """The handlers of ElevenLabs' routes."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect, self._store = dialect, dialect.service.lexicons

    def _of(self, request: Request) -> StoredLexicon:
        return self._store.stored(request.state.caller, request.path_params["id"])

    def _own(self, request: Request) -> StoredLexicon:
        return self._store.own(request.state.caller, request.path_params["id"])

    async def add(self, request: Request) -> Response:
        body = parse(_Rules, await _body(self._dialect, request))
        lexicon, about = await made(body.rules), body.description or ""
        stored = await self._store.put(request.state.caller, lexicon, body.name or "", description=about)
        return JSONResponse(_dictionary(stored, is_new=True))

    async def add_file(self, request: Request) -> Response:
        kind = request.headers.get("content-type")
        form = await asyncio.to_thread(read_form, await _body(self._dialect, request), kind)
        content, about = form.get("file"), str(form.get("description") or "")
        if content is None:
            raise InvalidRequest("file", None, "it is the PLS file")
        stored = await self._store.put(
            request.state.caller, await made(None, content), str(form.get("name", "")), description=about
        )
        return JSONResponse(_dictionary(stored, is_new=True))

    async def listed(self, request: Request) -> Response:
        found = [_dictionary(one) for one in self._store.of(request.state.caller)][:_AT_ONCE]
        return JSONResponse({"pronunciation_dictionaries": found, "next_cursor": None, "has_more": False})

    async def one(self, request: Request) -> Response:
        stored = self._of(request)
        return JSONResponse({**_dictionary(stored), "rules": [_rule(rule) for rule in stored.newest.rules]})

    async def rename(self, request: Request) -> Response:
        id, body = self._own(request).id, parse(_Rules, await _body(self._dialect, request))
        return JSONResponse(_dictionary(await self._store.change(request.state.caller, id, lambda old: old, body.name)))

    async def change(self, request: Request) -> Response:
        id, body = self._own(request).id, parse(_Rules, await _body(self._dialect, request))
        how = request.url.path.rpartition("/")[2]
        given = [] if how == "remove-rules" else (await made(body.rules)).rules
        texts = {*body.rule_strings, *(rule.text for rule in given)}

        def edit(old: Lexicon) -> Lexicon:
            kept = [] if how == "set-rules" else [rule for rule in old.rules if rule.text not in texts]
            return Lexicon([*kept, *given], is_recursive=old.is_recursive)

        newest = (await self._store.change(request.state.caller, id, edit)).newest
        return JSONResponse({"id": id, "version_id": newest.version, "version_rules_num": len(newest.rules)})

    async def download(self, request: Request) -> Response:
        lexicon = self._store.find(request.state.caller, self._of(request).id, request.path_params["version"])
        return Response(written_pls(lexicon.rules), media_type="application/pls+xml")


def add_elevenlabs_dictionaries(dialect: Dialect) -> None:
    """Add the routes of ElevenLabs' dictionaries."""
    answers = _ElevenLabs(dialect)
    for path, answer in (("/add-from-rules", answers.add), ("/add-from-file", answers.add_file)):
        _add(dialect, "POST", _PATH + path, answer)
    _add(dialect, "GET", _PATH, answers.listed)
    _add(dialect, "GET", _PATH + "/{id}", answers.one)
    _add(dialect, "PATCH", _PATH + "/{id}", answers.rename)
    for how in ("set", "add", "remove"):
        _add(dialect, "POST", f"{_PATH}/{{id}}/{how}-rules", answers.change)
    _add(dialect, "GET", _PATH + "/{id}/{version}/download", answers.download)


class _Cartesia:
    """The handlers of Cartesia's routes."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect, self._store = dialect, dialect.service.lexicons

    def _shown(self, stored: StoredLexicon) -> dict[str, Any]:
        items = [
            {"text": rule.text, "alias": rule.alias or "", "pronunciation": rule.alias or ""}
            for rule in stored.newest.rules
        ]
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stored.created_s))
        about = {"id": stored.id, "name": stored.name, "owner_id": stored.owner or "sonoro", "pinned": False}
        return {**about, "items": items, "created_at": created}

    def _of(self, request: Request) -> StoredLexicon:
        return self._store.stored(request.state.caller, request.path_params["id"])

    def _own(self, request: Request) -> StoredLexicon:
        return self._store.own(request.state.caller, request.path_params["id"])

    async def _lexicon(self, items: list[JsonValue]) -> Lexicon:
        # Any capitalisation matches unless the item says otherwise.
        cased = [{"case_sensitive": False, **item} if isinstance(item, dict) else item for item in items]
        return await asyncio.to_thread(lexicon_of, cased)

    async def add(self, request: Request) -> Response:
        body = parse(_Items, await _body(self._dialect, request))
        lexicon = await self._lexicon(body.items or [])
        return JSONResponse(self._shown(await self._store.put(request.state.caller, lexicon, body.name or "")))

    async def listed(self, request: Request) -> Response:
        found, after = self._store.of(request.state.caller), request.query_params.get("starting_after")
        if after is not None:
            # The SDK asks for what follows its last one until nothing does.
            ids = [one.id for one in found]
            found = found[ids.index(after) + 1 :] if after in ids else []
        shown = [self._shown(one) for one in found[:_AT_ONCE]]
        return JSONResponse({"data": shown, "has_more": len(found) > _AT_ONCE, "next_page": None})

    async def one(self, request: Request) -> Response:
        return JSONResponse(self._shown(self._of(request)))

    async def change(self, request: Request) -> Response:
        id, body = self._own(request).id, parse(_Items, await _body(self._dialect, request))
        new = None if body.items is None else await self._lexicon(body.items)
        changed = await self._store.change(request.state.caller, id, lambda old: new or old, body.name)
        return JSONResponse(self._shown(changed))

    async def delete(self, request: Request) -> Response:
        await self._store.delete(request.state.caller, self._own(request).id)
        return Response(status_code=204)


def add_cartesia_dictionaries(dialect: Dialect) -> None:
    """Add the routes of Cartesia's dictionaries."""
    answers = _Cartesia(dialect)
    for path in ("/pronunciation-dicts", "/pronunciation-dicts/"):
        _add(dialect, "POST", path, answers.add)
        _add(dialect, "GET", path, answers.listed)
    for method, answer in (("GET", answers.one), ("PATCH", answers.change), ("DELETE", answers.delete)):
        _add(dialect, method, "/pronunciation-dicts/{id}", answer)
