"""The playground: one page that speaks with the API beside it, from files of this package. Knows no engine.

The page asks nothing of any other host, and its policy forbids it to."""

import asyncio
import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from sonoro.core.errors import InvalidRequest
from sonoro.server.playground.saved import KINDS, RATES, audio_file
from sonoro.server.service import Service

__all__ = ["playground_routes"]

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mp3": "audio/mpeg",
}

_HEADERS = {
    # Asked for again each time, and answered with 304: a page and the script of another version would not fit.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; media-src blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_MOST_SAVED_AT_ONCE = 2


def playground_routes(service: Service) -> APIRouter:
    """The page at /, what it loads from /playground, and the files that it saves speech in."""
    router = APIRouter(include_in_schema=False)
    names = [entry.name for entry in files(__name__).iterdir()]
    assets = {name: _Asset(name) for name in names if name.rpartition(".")[2] in _KINDS}
    saving = asyncio.Semaphore(_MOST_SAVED_AT_ONCE)

    @router.get("/")
    async def page(request: Request) -> Response:
        return assets["index.html"].answer(request)

    @router.get("/playground/{name}")
    async def asset(request: Request, name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, "Not Found")
        return assets[name].answer(request)

    @router.post("/playground/{kind}", dependencies=service.keys.required)
    async def save(request: Request, kind: str) -> Response:
        """The PCM16 of the body, at the rate that the query names, as a file of `kind`."""
        if kind not in KINDS:
            raise HTTPException(404, "Not Found")
        rate = request.query_params.get("rate", "")
        if rate not in map(str, RATES):
            raise InvalidRequest("rate", rate[:20], f"it must be one of {', '.join(map(str, RATES))}")
        async with service.speech.bodies.body(request, service.config.max_body_bytes) as pcm, saving:
            file = await asyncio.to_thread(audio_file, kind, pcm, int(rate))
        return Response(file, media_type=KINDS[kind][2])

    return router


class _Asset:
    """A file of the page, held in memory, and its fingerprint."""

    def __init__(self, name: str) -> None:
        self._content = files(__name__).joinpath(name).read_bytes()
        self._tag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'
        self._kind = _KINDS[name.rpartition(".")[2]]

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self._tag}
        if self._tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._kind)
