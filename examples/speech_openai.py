"""Speech from `sonoro serve` with OpenAI's client, written as it arrives. Usage: speech_openai.py [URL [FILE]]"""

import sys

from openai import OpenAI

url, path = (*sys.argv[1:], *("http://127.0.0.1:8000", "hello.wav")[len(sys.argv) - 1 :])
client = OpenAI(base_url=f"{url}/v1", api_key="none")

with (
    client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts",
        voice="alloy",
        input="Hello there. This was spoken on your own machine.",
        response_format="wav",
        extra_body={"seed": 7},
    ) as answer,
    open(path, "wb") as file,
):
    for part in answer.iter_bytes():
        file.write(part)
