"""Batches: several texts in one request, answered together. Each is spoken, and may fail, independently.

The response is held in memory until the last text is spoken, so its size is bounded before the first one starts."""

import asyncio
import contextlib
import logging
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.core.logs import log_event
from sonoro.core.types import Finished
from sonoro.server.bodies import HeldAudio, json_bytes
from sonoro.server.errors import Answers, AnswerTooLarge, SlowReader, refusal, refusals
from sonoro.server.keys import Caller
from sonoro.server.openapi import object_of, request_body
from sonoro.server.schemas import BatchBody, SpeechBody, parse, unknown_fields
from sonoro.server.service import Service
from sonoro.server.stream import (
    DISCONNECTED,
    Speech,
    cancel_on_disconnect,
    conclude,
    encoded_audio,
    ignored_header,
    send_body,
)
from sonoro.transport.process import cancel_tasks

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 8

_COUNTS = {count: {"type": "integer"} for count in ("total", "succeeded", "failed")}
_RESULT = object_of(
    ("index", "status"),
    index={"type": "integer"},
    status={"enum": ["success", "error"]},
    audio_data={"type": "string", "description": "base64"},
    media_type={"type": "string"},
    sample_rate={"type": "integer"},
    finish_reason={"type": "string"},
    usage={"type": "object"},
    error={"type": "object"},
)
_RESULTS = object_of(
    ("id", "results", *_COUNTS), id={"type": "string"}, results={"type": "array", "items": _RESULT}, **_COUNTS
)
_ANSWERS: Answers = {
    200: {"description": "the result of each text", "content": {"application/json": {"schema": _RESULTS}}},
    **refusals(400, 401, 403, 408, 413, 429, 503),
}


def batch_routes(service: Service) -> APIRouter:
    """The route that speaks several texts; it needs a key if the server has keys."""
    router, speech = APIRouter(prefix="/v1", dependencies=service.keys.required), service.speech

    @router.post(
        "/audio/speech/batch", response_class=Response, responses=_ANSWERS, openapi_extra=request_body(BatchBody)
    )
    async def batch(request: Request) -> Response:
        """Speak 1 to 32 texts; answered when all are spoken."""
        async with contextlib.AsyncExitStack() as held:
            payload = await held.enter_async_context(speech.bodies.body(request, service.config.max_body_bytes))
            items = read_batch(service, payload)
            held.enter_context(speech.answers.take(sum(item.max_bytes for item in items)))
            return BatchResponse(service, items, request.state.request_id, request.state.caller, held.pop_all())

    return router


class Item:
    """One text of a batch, or the `error` of its fields. Its result takes at most `max_bytes`. `ignored` are fields
    that nothing knows."""

    def __init__(self, service: Service, fields: dict[str, Any]) -> None:
        self.error: SonoroError | None = None
        self.audio_bytes, self.ignored = 0, list[str]()
        try:
            self.body = parse(SpeechBody, fields)
            self.ignored = unknown_fields(self.body, service.speech.spec())
            if self.body.stream_format == "sse":
                limit = "it must be audio: the response to a batch is not streamed"
                raise InvalidRequest("stream_format", "sse", limit)
            if self.body.timestamps:
                limit = "the response to a batch has no word times: ask for this text alone"
                raise InvalidRequest("timestamps", self.body.timestamps, limit)
            self.audio_bytes = service.speech.max_audio_bytes(self.body)
        except SonoroError as error:
            self.error = error
        self.max_bytes = json_bytes(self.audio_bytes)


def read_batch(service: Service, payload: bytes) -> list[Item]:
    """Parse the texts of a batch. Raises `InvalidRequest`, `AnswerTooLarge` or `NotReady` for the batch as a whole."""
    config = service.config
    batch = parse(BatchBody, payload)
    service.speech.spec()
    common = batch.model_extra or {}
    fields = [common | item for item in batch.items]
    total = sum(len(text) for item in fields if isinstance(text := item.get("input"), str))
    if total > config.max_batch_characters:
        limit = f"together they must have at most {config.max_batch_characters}"
        raise InvalidRequest("items", f"{total} characters", limit)
    items = [Item(service, item) for item in fields]
    if (most := sum(item.max_bytes for item in items)) > config.max_answer_bytes:
        raise AnswerTooLarge(
            f"items: the answer could have {most} bytes and must have at most {config.max_answer_bytes}; ask for fewer "
            "texts, a smaller response_format or sample_rate, more speed, or fewer max_new_tokens"
        )
    return items


class BatchResponse(Response):
    """Speaks `items`, then sends their results in order; stops when the client disconnects.
    `name` is the id of the batch, `caller` its client; `held` is closed at the end."""

    def __init__(
        self, service: Service, items: list[Item], name: str, caller: Caller, held: contextlib.AsyncExitStack
    ) -> None:
        super().__init__()
        self._service, self._items, self._name, self._caller, self._held = service, items, name, caller, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            facts = {"reason": DISCONNECTED, "items": len(self._items)}
            facts |= await cancel_on_disconnect(receive, self._answer(send)) or {}
            scope["state"]["facts"] |= facts

    async def _answer(self, send: Send) -> dict[str, object]:
        """Speak and send; return the facts for the log."""
        # At most half of the key's permits, so that a single text need not wait for a whole batch.
        most = self._service.speech.gate.most(self._caller.owner)
        limit = asyncio.Semaphore(max(1, min(MAX_AT_ONCE, most // 2)))
        named = [(item, f"{self._name}-{index}") for index, item in enumerate(self._items)]
        tasks = [asyncio.create_task(self._attempt(item, name, limit)) for item, name in named]
        try:
            await asyncio.wait(tasks)
        finally:
            await cancel_tasks(*tasks)
        results = [task.result() for task in tasks]
        succeeded = sum(is_spoken for is_spoken, _ in results)
        counts = {"total": len(results), "succeeded": succeeded, "failed": len(results) - succeeded}
        parts = [memoryview(b'{"id":' + msgspec.json.encode(self._name) + b',"results":[')]
        for index, (_, result) in enumerate(results):
            parts += [memoryview(b'{"index":%d,' % index), memoryview(result)[1:], memoryview(b",")]
        parts[-1] = memoryview(b"]," + msgspec.json.encode(counts)[1:])
        try:
            await self._send(send, parts)
        except SlowReader as error:  # the connection is closed, as the body is incomplete
            return {**counts, "reason": error.code}
        return {**counts, "reason": "stop"}

    async def _send(self, send: Send, parts: list[memoryview]) -> None:
        """Send `parts` one by one. Raises `SlowReader` if the client does not read one in time."""
        headers = {"content-type": "application/json", "content-length": str(sum(map(len, parts)))}
        headers |= self._service.speech.gate.headers(self._caller.owner)
        headers |= ignored_header(sorted({name for item in self._items for name in item.ignored}))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        for part in parts:
            await send_body(send, part, self._service.config.slow_reader_timeout_s, is_last=part is parts[-1])

    async def _attempt(self, item: Item, name: str, limit: asyncio.Semaphore) -> tuple[bool, bytes | bytearray]:
        """Speak `item`; return whether that succeeded, and its result in JSON."""
        try:
            async with limit:
                arrived_s = time.perf_counter()
                return True, await _speak(self._service, item, await self._validated(item, name), arrived_s)
        except SonoroError as error:
            return False, msgspec.json.encode({"status": "error", **refusal(error).body})

    async def _validated(self, item: Item, name: str) -> Speech:
        """The speech of `item`. Raises its error, which is counted as a refusal."""
        try:
            if item.error is not None:
                raise item.error
            return await self._service.speech.make(item.body, name, self._caller)
        except SonoroError as error:
            self._service.metrics.count_refusal(refusal(error), name)
            raise


async def _speak(service: Service, item: Item, speech: Speech, arrived_s: float) -> bytearray:
    """Speak `item`; return its result in JSON."""
    observation = service.speech.observe(item.body.speed, arrived_s)
    reason, audio = DISCONNECTED, HeldAudio(b'{"audio_data":"', item.body.response_format, item.audio_bytes)
    try:
        audio_of = encoded_audio(speech, service.client, service.speech.gate, observation)
        async with contextlib.aclosing(audio_of) as parts:
            async for part in parts:
                if isinstance(part, Finished):
                    reason = part.reason
                    facts = {
                        "status": "success",
                        "media_type": speech.encoding.encoder.content_type,
                        "sample_rate": speech.encoding.encoder.rate,
                        "finish_reason": part.reason,
                        "usage": speech.usage(part),
                    }
                    return audio.end(b'",' + msgspec.json.encode(facts)[1:])
                audio.add(part)
        raise AssertionError("a stream ends with its `Finished`")
    except SonoroError as error:
        reason = error.code
        raise
    finally:
        ended = conclude(speech, observation, reason, is_whole=reason in ("stop", "length", "runaway"))
        log_event(logger, logging.DEBUG, "item", {"id": speech.name, **ended})
