"""Speak text while it is written, from standard input into a WAV file. Usage: ... | live_text.py [URL [FILE]]

Any stream of tokens will do; an API key goes into `additional_headers={"Authorization": "Bearer KEY"}`.
"""

import asyncio
import codecs
import json
import sys
import wave

from websockets.asyncio.client import ClientConnection, connect


async def send(socket: ClientConnection) -> None:
    """Whatever has come, as soon as it has."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while piece := await asyncio.to_thread(sys.stdin.buffer.read1):
        await socket.send(json.dumps({"type": "input.text", "text": decoder.decode(piece)}))
    await socket.send(json.dumps({"type": "session.close"}))


async def main(url: str, path: str) -> None:
    async with connect(f"{url.replace('http', 'ws', 1)}/v1/audio/speech/stream", compression=None) as socket:
        await socket.send(json.dumps({"type": "session.config", "seed": 7}))
        sending = asyncio.create_task(send(socket))
        with wave.open(path, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            async for message in socket:
                if isinstance(message, bytes):
                    file.writeframes(message)
                    continue
                event = json.loads(message)
                if event["type"] == "error":
                    sys.exit(event["error"]["message"])
                if event["type"] == "audio.start":
                    file.setframerate(event["sample_rate"])
                print(event)
        await sending


url, path = (*sys.argv[1:], *("http://127.0.0.1:8000", "live.wav")[len(sys.argv) - 1 :])
try:
    asyncio.run(main(url, path))
except ConnectionRefusedError:
    sys.exit(f"there is no server at {url}; start one with: sonoro serve")
