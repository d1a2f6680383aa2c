"""Send the load through OpenAI's own client, whose cost is then part of every time. Needs the package `openai`."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import openai

from sonoro.bench.client import SpeechClient, Target
from sonoro.bench.metrics import Exchange
from sonoro.core.errors import border

_NAMED = ("model", "input", "voice", "response_format")


class OfficialClient(SpeechClient):
    """A `SpeechClient` that calls `audio.speech.with_streaming_response.create` of one `AsyncOpenAI`.
    Time zero is before that call, as it does not report when it sends; bytes arrive when its iterator yields them."""

    name = "openai"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._openai = openai.AsyncOpenAI(
            base_url=target.api, api_key=target.api_key or "none", max_retries=0, timeout=target.timeout_s
        )

    async def __aexit__(self, *error: object) -> None:
        await self._openai.close()
        await super().__aexit__(*error)

    async def speak(self, body: Mapping[str, Any], due_s: float) -> Exchange:
        exchange = Exchange(due_s, sent_s=time.perf_counter())
        named = {name: body[name] for name in _NAMED if name in body}
        others = {name: value for name, value in body.items() if name not in _NAMED}
        speech = self._openai.audio.speech.with_streaming_response
        with border(lambda error: exchange.fail(_failure(error, exchange))):
            async with asyncio.timeout(self.target.timeout_s), speech.create(**named, extra_body=others) as response:
                self._note_head(exchange, response.status_code, response.headers)
                async for data in response.iter_bytes():
                    exchange.take(data, time.perf_counter())
        exchange.end(time.perf_counter())
        return exchange


def _failure(error: Exception, exchange: Exchange) -> str:
    if isinstance(error, openai.APIStatusError):
        return f"status {error.status_code}"
    if isinstance(error, TimeoutError | openai.APITimeoutError):
        return "timeout"
    # For a broken stream it raises its transport's error, of a library that depends on its version.
    return "broken stream" if exchange.arrivals else type(error).__name__
