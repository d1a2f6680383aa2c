"""What is kept of what a server answers: shapes, for recordings of clients and for their replay. Needs Python alone.

Audio and times come in as many messages as the moment makes of them: they are the flow. All else are marks.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

NAMES = ("context_id", "contextId")
LITERAL = {
    *("type", "status", "status_code", "code", "err_code", "error_code", "param", "object"),
    *(*NAMES, "utterance_index", "total_sentences", "sequence_id"),
}
"""Fields whose values are kept."""

OF_A_SERVER = ("options", "labels", "configuration")
"""Fields whose own fields are of a model or a server, and of no wire format."""


def shape(value: Any, name: str = "") -> Any:
    """`value` without what differs from one answer to the next."""
    if isinstance(value, dict):
        return {} if name in OF_A_SERVER else {key: shape(value[key], key) for key in sorted(value)}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if value is None or isinstance(value, bool) or name in LITERAL or value == "audio":
        return value
    return "" if isinstance(value, str) else 0


def fits(now: Any, then: Any) -> bool:
    """Whether the shape `now` has all that `then` had; it may have further fields."""
    if isinstance(now, dict) and isinstance(then, dict):
        return all(name in now and fits(now[name], then[name]) for name in then)
    if isinstance(now, list) and isinstance(then, list) and now and then:
        return fits(now[0], then[0])
    return bool(now == then)


def all_fit(now: list[Any], then: list[Any]) -> bool:
    """Whether the shapes `now` are as many as `then`, in the same order, and each fits."""
    return len(now) == len(then) and all(map(fits, now, then))


def is_flow(message: Any) -> bool:
    """Whether a message, or its shape, carries audio or times."""
    if not isinstance(message, dict):
        return bool(message == "audio")
    named = ("audio", "data", "audio_base64", "audio_b64", "delta")
    is_audio = any(isinstance(message.get(name), str) for name in named)
    return is_audio or message.get("type") in ("timestamps", "audio-chunk")


def name_of(message: Any) -> str:
    """The context that a message is about; empty if it has none."""
    return next((str(message[name]) for name in NAMES if message.get(name)), "") if isinstance(message, dict) else ""


def messages_of(body: bytes, content_type: str) -> list[Any]:
    """What an answer of that type says: its JSON, its events, its lines; "audio" of audio."""
    if content_type.startswith("audio/"):
        return ["audio"] if body else []
    text = body.decode()
    if content_type.startswith("text/event-stream"):
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    with suppress(ValueError):
        return [json.loads(text)]
    found = []
    for line in text.splitlines():
        with suppress(ValueError):  # the last may have been cut
            found.append(json.loads(line))
    return found
