"""Pipecat's services in a pipeline of their own: a turn of an agent, one that is interrupted, and one after it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import numpy as np
import pytest
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.cartesia.tts import CartesiaHttpTTSService, CartesiaTTSService
from pipecat.services.deepgram.tts import DeepgramHttpTTSService, DeepgramTTSService
from pipecat.services.elevenlabs.tts import ElevenLabsHttpTTSService, ElevenLabsTTSService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.workers.runner import WorkerRunner

from conftest import KEY, LONG, TEXT, Native, Server, is_same, run, until

VOICES = {"voice_id": "a-voice-of-theirs"}


def service(name: str, server: Server, session: aiohttp.ClientSession) -> Any:
    """A service with its address changed."""
    over_http = {"api_key": KEY, "aiohttp_session": session}
    match name:
        case "openai":
            return OpenAITTSService(base_url=server.v1, api_key=KEY)
        case "elevenlabs":
            return ElevenLabsTTSService(url=server.ws, api_key=KEY, **VOICES)
        case "elevenlabs http":
            return ElevenLabsHttpTTSService(base_url=server.url, **over_http, **VOICES)
        case "cartesia":
            return CartesiaTTSService(url=f"{server.ws}/tts/websocket", api_key=KEY, **VOICES)
        case "cartesia http":
            # It reads the answer whole, and gives a turn up that has been silent for so long: 3 s unless told.
            return CartesiaHttpTTSService(base_url=server.url, **over_http, **VOICES, stop_frame_timeout_s=15)
        case "deepgram":
            return DeepgramTTSService(base_url=server.ws, api_key=KEY)
        case "deepgram http":
            return DeepgramHttpTTSService(base_url=server.url, **over_http)
    raise AssertionError(name)


class Sink(FrameProcessor):
    """Collects what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.frames.append(frame)
        await self.push_frame(frame, direction)

    def take(self) -> list[Frame]:
        frames, self.frames = self.frames, []
        return frames

    def has(self, kind: type[Frame]) -> bool:
        return any(isinstance(frame, kind) for frame in self.frames)


@contextlib.asynccontextmanager
async def pipeline(speaker: Any) -> AsyncIterator[tuple[PipelineWorker, Sink, Sink]]:
    """A pipeline with nothing but a service; what comes up from it and what goes down."""
    above, below = Sink(), Sink()
    params = PipelineParams(audio_out_sample_rate=24000)
    worker = PipelineWorker(Pipeline([above, speaker, below]), params=params, cancel_on_idle_timeout=False)
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def begun(worker: object, frame: object) -> None:
        started.set()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        await started.wait()
        yield worker, above, below
    finally:
        await worker.queue_frame(EndFrame())
        await running


async def held(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def say(worker: PipelineWorker, text: str) -> None:
    await worker.queue_frame(LLMFullResponseStartFrame())
    for word in text.split(" "):
        await worker.queue_frame(LLMTextFrame(f"{word} "))
    await worker.queue_frame(LLMFullResponseEndFrame())


def audio(frames: list[Frame]) -> bytes:
    return b"".join(frame.audio for frame in frames if isinstance(frame, TTSAudioRawFrame))


NAMES = ["openai", "elevenlabs", "elevenlabs http", "cartesia", "cartesia http", "deepgram", "deepgram http"]


@pytest.mark.parametrize("name", NAMES)
def test_a_service_speaks_its_turns_and_is_interrupted(name: str, server: Server, native: Native) -> None:
    fields = {"language": "english"} if name.startswith("cartesia") else {}
    is_live = name in ("elevenlabs", "cartesia", "deepgram")
    expected = native.live(TEXT, **fields) if is_live else native.whole(TEXT, **fields)

    def is_whole(frames: list[Frame]) -> bool:
        """Its first and last moments may be cut or padded by the service."""
        samples = np.frombuffer(audio(frames), np.int16)
        return is_same(samples[: len(expected)].tobytes(), expected) and not samples[len(expected) :].any()

    async def follow() -> None:
        async with (
            aiohttp.ClientSession() as session,
            pipeline(service(name, server, session)) as (worker, above, below),
        ):
            await say(worker, TEXT)
            await held(lambda: below.has(TTSStoppedFrame))
            assert is_whole(below.take())
            await say(worker, LONG)
            await held(lambda: below.has(TTSAudioRawFrame))
            await worker.queue_frame(InterruptionFrame())
            await held(lambda: below.has(InterruptionFrame))
            below.take()
            await asyncio.to_thread(until, lambda: server.is_idle)
            await say(worker, TEXT)
            await held(lambda: below.has(TTSStoppedFrame))
            assert is_whole(below.take())
            assert not [frame.error for frame in above.frames if isinstance(frame, ErrorFrame)]

    run(follow())
