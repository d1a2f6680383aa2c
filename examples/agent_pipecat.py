"""A voice for Pipecat: it speaks what a language model says, token by token, over the WebSocket of `sonoro serve`.

Put `SonoroTTS("http://127.0.0.1:8000")` where a pipeline has its speech service. For LiveKit its own OpenAI plugin will
do: `openai.TTS(base_url="http://127.0.0.1:8000/v1", api_key="none", model="tts-1", voice="alloy")`.
"""

import contextlib
import json
from collections.abc import AsyncGenerator

from pipecat.frames.frames import ErrorFrame, Frame, TTSAudioRawFrame, TTSStoppedFrame
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode, TTSService
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException


class SonoroTTS(TTSService):
    """One session for each turn of the agent; an interruption closes it, which cancels what it was saying."""

    def __init__(self, url: str, voice: str | None = None, api_key: str = "none", **settings: object) -> None:
        super().__init__(
            text_aggregation_mode=TextAggregationMode.TOKEN,
            push_start_frame=True,
            settings=TTSSettings(model=None, voice=voice, language=None),
            **settings,
        )
        self._url = f"{url.replace('http', 'ws', 1)}/v1/audio/speech/stream"
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._turns: dict[str, ClientConnection] = {}

    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Say more in the turn `context_id`; the audio arrives beside."""
        try:
            if context_id not in self._turns:
                turn = await connect(self._url, additional_headers=self._headers, compression=None)
                self._turns[context_id] = turn
                await self._say(turn, "session.config", voice=self._settings.voice, sample_rate=self.sample_rate)
                self.create_task(self._listen(turn, context_id))
            await self._say(self._turns[context_id], "input.text", text=text)
            yield None
        except (OSError, WebSocketException) as error:
            self._turns.pop(context_id, None)
            yield ErrorFrame(error=f"the speech server cannot be reached, or refuses: {error}")

    async def flush_audio(self, context_id: str | None = None) -> None:
        """The turn has all of its text."""
        if turn := self._turns.get(context_id or self.get_active_audio_context_id() or ""):
            with contextlib.suppress(ConnectionClosed):  # which who listens tells
                await self._say(turn, "session.close")

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        """The user speaks: be silent."""
        if turn := self._turns.pop(context_id, None):
            await turn.close()
        await super().on_audio_context_interrupted(context_id)

    async def _say(self, turn: ClientConnection, kind: str, **fields: object) -> None:
        await turn.send(json.dumps({"type": kind, **fields}))

    async def _listen(self, turn: ClientConnection, context_id: str) -> None:
        try:
            async for message in turn:
                if not self.audio_context_available(context_id):
                    break
                if isinstance(message, bytes):
                    await self.append_to_audio_context(
                        context_id, TTSAudioRawFrame(message, self.sample_rate, 1, context_id=context_id)
                    )
                elif (event := json.loads(message))["type"] == "error":
                    await self.push_error(error_msg=event["error"]["message"])
        except ConnectionClosed as error:
            await self.push_error(error_msg=f"the speech server is gone: {error}")
        if self._turns.pop(context_id, None):
            await self.append_to_audio_context(context_id, TTSStoppedFrame(context_id=context_id))
            await self.remove_audio_context(context_id)
        await turn.close()
