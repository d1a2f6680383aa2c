"""The routes of registered lexicons."""

from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, JsonValue

from sonoro.core.errors import InvalidRequest
from sonoro.server.errors import refusals
from sonoro.server.lexicons import made, shown
from sonoro.server.openapi import object_of, request_body
from sonoro.server.schemas import parse
from sonoro.server.service import Service
from sonoro.text.script.lexicon_files import MAX_BYTES


class LexiconBody(BaseModel, strict=True, extra="forbid"):
    """A lexicon to register: its rules, as objects with text and alias, or aliases by text; or the text of a file."""

    name: str
    rules: list[JsonValue] | dict[str, JsonValue] | None = None
    content: str | None = None
    description: str = ""


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_LEXICON = object_of(
    ("name", "id", "version", "rules"),
    name=_STRING,
    id=_STRING,
    version=_STRING,
    rules=_INTEGER,
    description=_STRING,
    created_at=_INTEGER,
)
_REFUSED = refusals(400, 401, 403, 404, 408, 413, 429, 503, 507)
_ONE: Any = {200: {"description": "", "content": {"application/json": {"schema": _LEXICON}}}, **_REFUSED}


def lexicon_routes(service: Service) -> APIRouter:
    """The routes of registered lexicons."""
    store = service.lexicons
    needed = [*service.keys.required, Depends(store.catch_up)]
    router = APIRouter(prefix="/v1/audio/lexicons", dependencies=needed)

    @router.get("", responses=_REFUSED)
    async def lexicons(request: Request) -> dict[str, Any]:
        """The lexicons that a request may name."""
        return {"lexicons": [shown(one) for one in store.of(request.state.caller)]}

    @router.post("", responses=_ONE, openapi_extra=request_body(LexiconBody))
    async def put(request: Request) -> dict[str, Any]:
        """Register a lexicon; one of that name gets a new version."""
        async with service.speech.bodies.body(request, MAX_BYTES) as payload:
            body = parse(LexiconBody, payload)
            if body.content is not None and body.rules is not None:
                raise InvalidRequest("content", f"{len(body.content)} characters", "give it or rules, not both")
            field = "rules" if body.content is None else "content"
            try:
                lexicon = await made(body.rules, body.content)
            except InvalidRequest as error:
                raise InvalidRequest(field, error.value, error.limit) from None
        caller = request.state.caller
        return shown(await store.put(caller, lexicon, body.name, description=body.description, by_name=True))

    @router.get("/{name}", responses=_ONE)
    async def lexicon(request: Request, name: str) -> dict[str, Any]:
        """One lexicon, by name or id."""
        return shown(store.stored(request.state.caller, name))

    @router.delete("/{name}", responses=_REFUSED)
    async def delete(request: Request, name: str) -> dict[str, Any]:
        """Delete one's own lexicon. Running requests still use it."""
        await store.delete(request.state.caller, name)
        return {"name": name, "deleted": True}

    return router
