"""ElevenLabs' API, as its own SDK, LiveKit, Pipecat and Open WebUI speak it. Its base address is the root."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sonoro.server.dialects.shared import Asked, Dialect, Message, json_response
from sonoro.server.errors import Refusal
from sonoro.server.schemas import parse
from sonoro.server.service import Service

__all__ = ["routes"]


def _refusal(refused: Refusal) -> Response:
    detail = {"status": refused.error["code"], "message": refused.error["message"]}
    return json_response(refused.status, {"detail": detail}, refused.headers)


class _Settings(Message):
    speed: float | None = None


class _Body(Message):
    text: str
    language_code: str | None = None
    voice_settings: _Settings | None = None
    seed: int | None = None


def routes(service: Service) -> Sequence[BaseRoute]:
    """What its clients ask."""
    dialect = Dialect("elevenlabs", service, _refusal)

    async def convert(request: Request) -> Response:
        def read(payload: bytes) -> Asked:
            body = parse(_Body, payload)
            speed = (body.voice_settings or _Settings()).speed or 1.0
            return Asked(body.text, request.path_params["voice"], body.language_code, speed, body.seed)

        return await dialect.speak(request, read)

    dialect.post("/v1/text-to-speech/{voice}", convert)
    dialect.post("/v1/text-to-speech/{voice}/stream", convert)
    return dialect.routes
