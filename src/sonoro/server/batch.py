"""Several texts in one request, answered together: each spoken as if it had come alone, one failing without the others.

Knows speech requests, not the path they came on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.core.types import Finished
from sonoro.server.errors import refusal
from sonoro.server.schemas import BatchBody, SpeechBody, parse
from sonoro.server.service import Caller, Service
from sonoro.server.stream import DISCONNECTED, Speech, conclude, spoken

__all__ = ["RESULTS_SCHEMA", "read_batch", "speak_batch"]

MAX_AT_ONCE = 8

_RESULT = {
    "type": "object",
    "required": ["index", "status"],
    "properties": {
        "index": {"type": "integer"},
        "status": {"enum": ["success", "error"]},
        "audio_data": {"type": "string", "description": "base64"},
        "media_type": {"type": "string"},
        "sample_rate": {"type": "integer"},
        "finish_reason": {"type": "string"},
        "usage": {"type": "object"},
        "error": {"type": "object"},
    },
}
RESULTS_SCHEMA = {
    "type": "object",
    "required": ["id", "results", "total", "succeeded", "failed"],
    "properties": {
        "id": {"type": "string"},
        "results": {"type": "array", "items": _RESULT},
        **{count: {"type": "integer"} for count in ("total", "succeeded", "failed")},
    },
}


def read_batch(payload: bytes, max_characters: int) -> list[dict[str, Any]]:
    """The bodies in `payload`, not yet checked one by one. Raises `InvalidRequest` for what is wrong with the whole."""
    batch = parse(BatchBody, payload)
    common = batch.model_extra or {}
    items = [common | item for item in batch.items]
    total = sum(len(text) for item in items if isinstance(text := item.get("input"), str))
    if total > max_characters:
        raise InvalidRequest("items", f"{total} characters", f"together they must have at most {max_characters}")
    return items


async def speak_batch(service: Service, items: list[dict[str, Any]], name: str, caller: Caller) -> dict[str, Any]:
    """What each of `items` came to, in their order. `name` is the id of the whole, which `caller` asks for."""
    # Half of the places at most: somebody with one text does not wait for a whole batch.
    turns = asyncio.Semaphore(max(1, min(MAX_AT_ONCE, service.config.max_concurrency // 2)))
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_attempt(service, item, f"{name}-{index}", caller, turns))
            for index, item in enumerate(items)
        ]
    results = [{"index": index, **task.result()} for index, task in enumerate(tasks)]
    succeeded = sum(result["status"] == "success" for result in results)
    counts = {"total": len(results), "succeeded": succeeded, "failed": len(results) - succeeded}
    return {"id": name, "results": results, **counts}


async def _attempt(
    service: Service, item: dict[str, Any], name: str, caller: Caller, turns: asyncio.Semaphore
) -> dict[str, Any]:
    try:
        async with turns:
            arrived_s = time.perf_counter()
            body = parse(SpeechBody, item)
            if body.stream_format == "sse":
                raise InvalidRequest("stream_format", "sse", "it must be audio: a batch is answered whole")
            return await _speak(service, body, await service.speech(body, name, caller), arrived_s)
    except SonoroError as error:
        service.note_refusal(refused := refusal(error), name)
        return {"status": "error", **refused.body}


async def _speak(service: Service, body: SpeechBody, speech: Speech, arrived_s: float) -> dict[str, Any]:
    observation = service.observe(body.speed, arrived_s)
    reason, audio = DISCONNECTED, bytearray()
    try:
        async with contextlib.aclosing(spoken(speech, service.client, service.gate, observation)) as parts:
            async for part in parts:
                if isinstance(part, Finished):
                    reason = part.reason
                    return {
                        "status": "success",
                        # Text already, item by item: all at once would hold up every stream (150 ms for 220 s of PCM).
                        "audio_data": msgspec.Raw(msgspec.json.encode(audio)),
                        "media_type": speech.encoding.content_type,
                        "sample_rate": speech.encoding.rate,
                        "finish_reason": part.reason,
                        "usage": speech.usage(part),
                    }
                audio += part
        raise AssertionError("a stream ends with its `Finished`")
    except SonoroError as error:
        reason = error.code
        raise
    finally:
        conclude(speech, observation, reason, is_whole=reason in ("stop", "length", "runaway"))
