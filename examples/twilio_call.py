"""A telephone call by Twilio Media Streams in which sonoro speaks: a greeting, then what key was pressed.

    sonoro serve &
    python examples/twilio_call.py ws://127.0.0.1:8000 8080

Twilio must reach port 8080 as wss://, through a proxy or a tunnel, and is sent there by this TwiML:

    <Response><Connect><Stream url="wss://YOUR-HOST/"/></Connect></Response>

Speech comes as mu-law at 8 kHz, which Twilio takes as it is: nothing is encoded here. A key that is pressed in
mid-speech ends it, as an agent would end it when it hears somebody talk.
"""

import asyncio
import base64
import json
import os
import sys

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

SPEECH = "/v1/speak?encoding=mulaw&sample_rate=8000"
KEY = {"Authorization": f"Token {os.environ.get('SONORO_API_KEY', 'none')}"}


class Call:
    """One call, with one connection to sonoro that lasts as long."""

    def __init__(self, phone: ServerConnection, speech: ClientConnection) -> None:
        self._phone, self._speech, self._stream = phone, speech, ""

    async def run(self) -> None:
        """Hold the call until the caller hangs up."""
        speaking = asyncio.create_task(self._forward())
        try:
            async for message in self._phone:
                match json.loads(message):
                    case {"event": "start", "start": {"streamSid": stream}}:
                        self._stream = stream
                        await self._say("Hello. Press any key, also while I speak, and I will tell you which it was.")
                    case {"event": "dtmf", "dtmf": {"digit": digit}}:
                        await self._speech.send(json.dumps({"type": "Clear"}))
                        await self._say(f"You pressed {digit}.")
                    case {"event": "stop"}:
                        break
        finally:
            speaking.cancel()

    async def _say(self, text: str) -> None:
        for message in ({"type": "Speak", "text": text}, {"type": "Flush"}):
            await self._speech.send(json.dumps(message))

    async def _forward(self) -> None:
        """What sonoro says, to the phone; the end of each text as a mark, which Twilio sends back once it is played."""
        async for said in self._speech:
            if isinstance(said, bytes):
                await self._tell("media", media={"payload": base64.b64encode(said).decode()})
                continue
            match json.loads(said):
                case {"type": "Flushed"}:
                    await self._tell("mark", mark={"name": "spoken"})
                case {"type": "Cleared"}:  # after which nothing of what was interrupted comes
                    await self._tell("clear")
                case {"type": "Error", "description": reason}:
                    print(reason, file=sys.stderr, flush=True)

    async def _tell(self, event: str, **fields: object) -> None:
        await self._phone.send(json.dumps({"event": event, "streamSid": self._stream, **fields}))


async def main(sonoro: str, port: int) -> None:
    async def answer(phone: ServerConnection) -> None:
        async with connect(sonoro + SPEECH, additional_headers=KEY, compression=None, max_size=None) as speech:
            try:
                await Call(phone, speech).run()
            except ConnectionClosed:
                print("the call has ended", flush=True)

    async with serve(answer, "127.0.0.1", port) as server:
        print(f"waiting for Twilio on port {server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


asyncio.run(main(sys.argv[1].replace("http", "ws", 1), int(sys.argv[2])))
