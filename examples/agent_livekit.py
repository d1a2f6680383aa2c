"""A voice for LiveKit's agents: its own plugins, with the address of `sonoro serve`.

    pip install livekit-plugins-cartesia==1.8.9
    echo "Good morning, everyone." | python examples/agent_livekit.py http://127.0.0.1:8000 morning.wav

In an agent it is `AgentSession(tts=voice("http://127.0.0.1:8000"), ...)`. Here it speaks what comes from a pipe, word
by word, as an agent speaks what its language model writes.
"""

import asyncio
import sys
import wave

import aiohttp
from livekit.plugins import cartesia


def voice(url: str, api_key: str = "none", name: str = "nora", **settings: object) -> cartesia.TTS:
    """Cartesia's plugin: it speaks text as it is written, and tells when each word is heard."""
    return cartesia.TTS(base_url=url, api_key=api_key, voice=name, **settings)


async def main(url: str, path: str) -> None:
    async with aiohttp.ClientSession() as session:
        speaker = voice(url, http_session=session)
        stream = speaker.stream()
        for word in sys.stdin.read().split():
            stream.push_text(f"{word} ")
        stream.end_input()
        with wave.open(path, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(speaker.sample_rate)
            async for event in stream:
                file.writeframes(bytes(event.frame.data))
                for said in event.frame.userdata.get("lk.timed_transcripts", []):
                    print(f"{said.start_time:6.2f} s  {said}")
        await speaker.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
