"""Kokoro-FastAPI's dialogues. The rest of its API is OpenAI's, with tags in the text that ours knows too."""

import itertools
from collections.abc import Sequence

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from sonoro.core.errors import InvalidRequest
from sonoro.server.dialects.formats import AudioFormat
from sonoro.server.dialects.shared import Asked, Dialect, Message
from sonoro.server.errors import Refusal
from sonoro.server.schemas import parse
from sonoro.server.service import Service
from sonoro.text.script.dialogue import BETWEEN_S, MAX_CUES, Cue


class _Turn(Message):
    text: str
    voice: str | None = None
    voice_id: str | None = None


class _Alias(Message):
    voice: str
    rate: float = Field(1.0, ge=0.25, le=4)


class _Body(Message):
    turns: list[_Turn] | None = Field(None, max_length=MAX_CUES)
    inputs: list[_Turn] | None = Field(None, max_length=MAX_CUES)
    pause_between_turns: float = BETWEEN_S
    voice_aliases: dict[str, str | _Alias] = Field(default_factory=dict, max_length=64)
    response_format: str = "mp3"
    speed: float = 1.0

    def cue(self, turn: _Turn) -> Cue:
        """What the speaker of `turn` says, by the name behind an alias."""
        name = turn.voice or turn.voice_id
        known = self.voice_aliases.get(name or "", name)
        return Cue(turn.text, known.voice, known.rate) if isinstance(known, _Alias) else Cue(turn.text, known)


def _refusal(refused: Refusal, request_id: str) -> Response:
    detail = {"error": refused.error["code"], "message": refused.error["message"], "type": refused.error["type"]}
    return JSONResponse({"detail": detail}, refused.status, refused.headers)


def _asked(payload: bytes) -> Asked:
    """The dialogue that a body asks for; neighbours of one voice are one turn."""
    body = parse(_Body, payload)
    turns = body.turns or body.inputs
    if not turns:
        raise InvalidRequest("turns", None, f"give 1 to {MAX_CUES}")
    groups = itertools.groupby(map(body.cue, turns), key=lambda cue: cue[1:])
    cues = [Cue(" ".join(cue.text for cue in group), *how) for how, group in groups]
    audio, between_s = AudioFormat(body.response_format), body.pause_between_turns
    return Asked("", speed=body.speed, audio=audio, markup="voices", inputs=cues, between_s=between_s)


def routes(service: Service) -> Sequence[BaseRoute]:
    """The routes of this dialect."""
    dialect = Dialect("kokoro", service, _refusal)

    async def converse(request: Request) -> Response:
        return await dialect.speak(request, _asked)

    dialect.http("POST", "/dev/dialogue", converse)
    return dialect.routes
