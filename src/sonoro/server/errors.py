"""The errors of the server, and one function from any error to the status, headers and body of its response."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sonoro.core.errors import (
    EngineBusy,
    EngineClosed,
    EngineCrashed,
    EngineError,
    InvalidRequest,
    SonoroError,
    UnknownVoice,
    VoiceExists,
    without_addresses,
)


class UnknownModel(InvalidRequest, code="model_not_found"):
    """Another model than the one that is loaded; the message lists the names of that one."""


class UnknownLexicon(InvalidRequest, code="unknown_lexicon"):
    """No lexicon of that name is registered with the caller's key."""


class SlowReader(EngineError, code="slow_reader"):
    """The client read nothing for too long."""


_STATUSES: dict[type[SonoroError], int] = {
    InvalidRequest: 400,
    UnknownVoice: 404,
    UnknownLexicon: 404,
    UnknownModel: 404,
    VoiceExists: 409,
    EngineBusy: 429,
    EngineCrashed: 503,
    EngineClosed: 503,
    SonoroError: 500,
}
"""The HTTP status of an error: that of its nearest class."""


class Refused(SonoroError):
    """Refused before its fields were validated, with an HTTP status, and further `headers`."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, code: str, status: int) -> None:
        super().__init_subclass__(code)
        _STATUSES[cls] = status


class Unauthorized(Refused, code="invalid_api_key", status=401):
    """No API key, or a wrong one."""


class IdleSession(Refused, code="idle_session", status=408):
    """A session without a message for too long."""


class AnswerTooLarge(Refused, code="answer_too_large", status=413):
    """An answer that is held in memory, of a batch or in one JSON object, could exceed its bound."""


class BodyTooLarge(Refused, code="body_too_large", status=413):
    """The body has more bytes than a body may have."""


class BodyTooSlow(Refused, code="body_too_slow", status=408):
    """The body did not arrive whole, or not in time."""


class TooManyRequests(Refused, code="too_many_requests", status=429):
    """The server is full; the same request can be accepted later."""


class TooManyVoices(Refused, code="too_many_voices", status=507):
    """The key has registered as many voices as it may."""


class TooManyLexicons(Refused, code="too_many_lexicons", status=507):
    """A key has as many lexicons, or rules, as it may hold."""


class NotStored(Refused, code="storage", status=507):
    """A voice or lexicon could not be written: no space is left, say, or the folder does not allow it."""


class NotReady(Refused, code="not_ready", status=503):
    """No engine runs yet, or none any more."""


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "2"}}

_PARAMETERS = {"text": "input", "max_frames": "max_new_tokens"}
"""Fields of a request that have another name in the API."""


Answers = dict[int | str, dict[str, Any]]

_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                **{name: {"type": "string"} for name in ("message", "type", "code")},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}


REFUSAL_SHAPE = "refusal_shape"
"""The key, in a request scope's state, of the function from a `Refusal` and a request id to a response."""


@dataclass(frozen=True)
class Refusal:
    """An error response: `status`, `headers`, and the `error` object of its JSON body."""

    status: int
    error: dict[str, str | None]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.error}

    @property
    def payload(self) -> bytes:
        return json.dumps(self.body).encode()


def drop_frames(error: BaseException) -> None:
    """Drop the frames and causes of `error`: frames that hold a body and the error form a cycle, and would stay until
    a garbage collection."""
    each: BaseException | None = error
    while each is not None:
        cause = each.__cause__ or each.__context__
        each.__traceback__ = each.__cause__ = each.__context__ = None
        each = cause


def refusal(error: SonoroError) -> Refusal:
    """The response to `error`, whose frames are dropped."""
    status = next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)
    message, parameter = str(error), None
    if isinstance(error, InvalidRequest):
        own = error.field.removeprefix("options.")
        parameter = _PARAMETERS.get(own, own)
        message = parameter + message.removeprefix(error.field)
    drop_frames(error)
    refused = plain_refusal(status, message, error.code, parameter)
    if isinstance(error, Refused):
        refused.headers.update(error.headers)
    return refused


def plain_refusal(status: int, message: str, code: str, parameter: str | None = None) -> Refusal:
    """A refusal with the type and headers that go with `status`."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": without_addresses(message), "type": kind, "param": parameter, "code": code}
    return Refusal(status, error, dict(_HEADERS.get(status, {})))


class RefusalResponse(Response):
    """Sends `refused` as a response, in the shape of the request's dialect."""

    def __init__(self, refused: Refusal) -> None:
        super().__init__(refused.payload, refused.status, refused.headers, "application/json")
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shape: Callable[[Refusal, str], Response] | None = scope.get("state", {}).get(REFUSAL_SHAPE)
        if shape is None:
            await super().__call__(scope, receive, send)
        else:
            await shape(self._refused, scope["state"]["request_id"])(scope, receive, send)


def refusals(*statuses: int) -> Answers:
    """The OpenAPI responses of error `statuses`."""
    content = {"application/json": {"schema": _SCHEMA}}
    return {status: {"description": "an error", "content": content} for status in statuses}
