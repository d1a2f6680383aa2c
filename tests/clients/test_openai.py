"""OpenAI's own clients."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest

from conftest import KEY, LONG, TEXT, Native, Server, is_same, pause_of, run, sounds_like, until


def client(server: Server, **settings: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0, **settings)


def test_a_text_is_spoken_whole_and_streamed_with_a_voice_by_name_and_by_id(server: Server, native: Native) -> None:
    asked = client(server)
    whole = asked.audio.speech.create(model="tts-1", voice="alloy", input=TEXT, response_format="pcm")
    assert is_same(whole.content, native.whole(TEXT))
    by_id = asked.audio.speech.create(model="tts-1", voice={"id": "nora"}, input=TEXT, response_format="pcm")
    assert is_same(by_id.content, native.whole(TEXT))
    with asked.audio.speech.with_streaming_response.create(model="tts-1", voice="alloy", input=TEXT) as answer:
        parts = list(answer.iter_bytes())
    assert len(parts) > 1, "it comes as it is made"
    assert sounds_like(b"".join(parts), native.whole(TEXT))


def test_events_are_read_as_the_bytes_that_the_client_hands_on(server: Server, native: Native) -> None:
    settings = {"model": "gpt-4o-mini-tts", "voice": "alloy", "input": TEXT, "response_format": "pcm"}
    with client(server).audio.speech.with_streaming_response.create(**settings, stream_format="sse") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + done["usage"]["output_tokens"]
    assert is_same(b"".join(base64.b64decode(event["audio"]) for event in deltas), native.whole(TEXT))


def test_models_are_listed_and_retrieved(server: Server) -> None:
    asked = client(server)
    listed = asked.models.list().data
    assert "tts-1" in [model.id for model in listed]
    for model in listed:
        assert asked.models.retrieve(model.id) == model
        assert (model.object, model.owned_by) == ("model", "sonoro")
        assert isinstance(model.created, int)
    with pytest.raises(openai.NotFoundError) as refused:
        asked.models.retrieve("tts-7")
    assert refused.value.code == "model_not_found"


def test_what_is_wrong_is_raised_as_the_client_has_it(server: Server) -> None:
    asked = client(server)
    with pytest.raises(openai.BadRequestError) as refused:
        asked.audio.speech.create(model="tts-1", voice="alloy", input=TEXT, speed=9)
    assert refused.value.param == "speed"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.v1, api_key="wrong", max_retries=0).models.list()


def test_who_leaves_in_mid_speech_frees_the_slot(server: Server) -> None:
    left = server.metric("sonoro_requests_total", reason="disconnected")

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key=KEY, max_retries=0) as asked:
            speech = asked.audio.speech.with_streaming_response
            async with speech.create(model="tts-1", voice="alloy", input=LONG, response_format="pcm") as answer:
                async for _ in answer.iter_bytes():
                    break

    run(leave())
    until(lambda: server.metric("sonoro_requests_total", reason="disconnected") == left + 1)


def test_the_syntax_of_kokoro_fastapi_is_spoken(server: Server) -> None:
    """By OpenAI's client, as its users do: pauses, voices and pronunciations within the text, and SSML."""
    speech = client(server).audio.speech
    texts = (
        "[voice:nora]Good morning.[pause:0.75s][voice:miles]My friends.",
        '<speak>Good morning.<break time="750ms"/><voice name="miles">My friends.</voice></speak>',
        "[voice:me]Good morning.[pause:750ms][Friends](/fɹˈɛndz/).",
    )
    more = {"allow_voice_tags": True, "ssml": True, "voice_aliases": {"me": "nora"}, "on_markup": "plain"}
    for text in texts:
        how = {"model": "tts-1", "voice": "nora", "input": text, "response_format": "pcm", "extra_body": more}
        assert pause_of(speech.create(**how).content) == 18000
    turns = [{"voice": "nora", "text": "Good morning."}, {"voice": "miles", "text": "My friends."}]
    body = {"turns": turns, "pause_between_turns": 0.75, "response_format": "pcm"}
    request = urllib.request.Request(f"{server.url}/dev/dialogue", json.dumps(body).encode())
    request.add_header("authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert pause_of(answer.read()) == 18000


def test_open_webui_lists_voices_and_models_without_a_key(server: Server) -> None:
    """What its back end reads: `voices` as objects, `models` as objects."""
    voices = json.loads(server.get("/v1/audio/voices"))["voices"]
    assert any({"id": "nora", "name": "nora"}.items() <= voice.items() for voice in voices)
    models = json.loads(server.get("/v1/audio/models"))["models"]
    assert "tts-1" in [model["id"] for model in models]


SCRIPT = """
const { default: OpenAI } = require("openai");
(async () => {
  const [baseURL, apiKey, text, long] = process.argv.slice(1);
  const asked = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const fields = { model: "tts-1", voice: "alloy", input: text, response_format: "pcm" };
  const whole = Buffer.from(await (await asked.audio.speech.create(fields)).arrayBuffer());
  const parts = [];
  for await (const part of (await asked.audio.speech.create(fields)).body) parts.push(part);
  const leaving = new AbortController();
  const cut = await asked.audio.speech.create({ ...fields, input: long }, { signal: leaving.signal });
  for await (const part of cut.body) break;
  leaving.abort();
  const model = await asked.models.retrieve("tts-1");
  let code = null;
  await asked.models.retrieve("tts-7").catch((error) => { code = error.code; });
  const streamed = Buffer.concat(parts);
  console.log(JSON.stringify({ whole: whole.toString("base64"), streamed: streamed.toString("base64"),
                               parts: parts.length, model, code }));
})();
"""


def test_the_client_of_npm_speaks_whole_streamed_and_cut(server: Server, native: Native) -> None:
    node, folder = shutil.which("node"), Path(sys.prefix) / "npm"
    if node is None or not (folder / "node_modules" / "openai").exists():
        pytest.skip("node is not here, or openai of npm is not installed")
    left = server.metric("sonoro_requests_total", reason="disconnected")
    arguments = (server.v1, KEY, TEXT, LONG)
    said = json.loads(subprocess.check_output([node, "-e", SCRIPT, *arguments], cwd=folder, text=True, timeout=60))
    assert is_same(base64.b64decode(said["whole"]), native.whole(TEXT))
    assert is_same(base64.b64decode(said["streamed"]), native.whole(TEXT))
    assert said["parts"] > 1
    assert said["model"]["id"] == "tts-1"
    assert said["code"] == "model_not_found"
    until(lambda: server.metric("sonoro_requests_total", reason="disconnected") == left + 1)
