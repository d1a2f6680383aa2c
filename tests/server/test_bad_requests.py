"""Requests that cannot be served: each is refused by name, and the server serves on."""

import asyncio
import base64
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from processes import GUARD_S
from servers import SETTINGS, check_error, recording, serving, sound
from sine_engines import alone, nothing_left, run

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import SpeechRequest
from sonoro.server.schemas import SpeechBody, parse

__all__ = ["nothing_left"]

# The folder of a test is made before that of its links, which must be empty at the end.
pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")

SPEECH = "/v1/audio/speech"


def data(audio: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(audio).decode()


BAD_FIELDS = [
    ({"input": None}, 400, "input"),
    ({"input": 7}, 400, "input"),
    ({"input": ""}, 400, "input"),
    ({"input": " \n"}, 400, "input"),
    ({"input": "?!", "voice": "nobody"}, 404, "voice"),
    ({"input": "?!", "speed": 9}, 400, "speed"),
    ({"input": "word " * 820}, 400, "input"),
    ({"input": "It is unspeakable."}, 400, "input"),
    ({"model": "gpt-9"}, 404, "model"),
    ({"model": ["tts-1"]}, 400, "model"),
    ({"voice": "nobody"}, 404, "voice"),
    ({"voice": {"name": "low"}}, 400, "voice"),
    ({"voice": {"id": "nobody"}}, 404, "voice"),
    ({"voice": 3}, 400, "voice"),
    ({"speaker": "nobody"}, 404, "voice"),
    ({"voice": "low", "speaker": "high"}, 400, "speaker"),
    ({"instructions": "Whisper."}, 400, "instructions"),
    ({"instructions": {}}, 400, "instructions"),
    ({"response_format": "midi"}, 400, "response_format"),
    ({"speed": 0}, 400, "speed"),
    ({"speed": 4.5}, 400, "speed"),
    ({"speed": "fast"}, 400, "speed"),
    ({"speed": True}, 400, "speed"),
    ({"stream_format": "websocket"}, 400, "stream_format"),
    ({"sample_rate": 7}, 400, "sample_rate"),
    ({"sample_rate": 8000.5}, 400, "sample_rate"),
    ({"bit_rate": 7999, "response_format": "mp3"}, 400, "bit_rate"),
    ({"bit_rate": 64_000, "response_format": "wav"}, 400, "bit_rate"),
    ({"language": "klingon"}, 400, "language"),
    ({"text_format": "rtf"}, 400, "text_format"),
    ({"text_format": "markdown"}, 400, "text_format"),
    ({"seed": -1}, 400, "seed"),
    ({"seed": 2**63}, 400, "seed"),
    ({"seed": 1.5}, 400, "seed"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"top_k": -1}, 400, "top_k"),
    ({"top_p": 0}, 400, "top_p"),
    ({"repetition_penalty": 11}, 400, "repetition_penalty"),
    ({"max_new_tokens": 0}, 400, "max_new_tokens"),
    ({"max_new_tokens": 2001}, 400, "max_new_tokens"),
    ({"strength": 101}, 400, "strength"),
    ({"strength": "full"}, 400, "strength"),
    ({"strength": [1]}, 400, "strength"),
    ({"ref_text": "Hello."}, 400, "ref_text"),
    ({"x_vector_only_mode": True}, 400, "x_vector_only_mode"),
    ({"ref_audio": "http://127.0.0.1/voice.wav", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "file:///etc/passwd", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "../../etc/passwd", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "data:audio/wav;base64,@@@", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "data:audio/wav;base64,é", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "data:audio/wav;base64,AAAA", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": recording(0.2), "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": recording(61), "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": recording(peak=0), "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": recording()}, 400, "ref_text"),
    ({"ref_audio": recording(), "ref_text": "Hello.", "voice": "low"}, 400, "voice"),
    ({"ref_audio": 7, "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "data:audio/wav,raw", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "data:audio/wav;base64," + "A" * 8_000_000, "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "data:audio/wav;base64," + "A" * 15_000_000, "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": data(sound()[:60]), "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": data(b"ID3" + bytes(5000)), "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": data(b"<svg onload=alert(1)>"), "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "http://169.254.169.254/latest/meta-data/", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "http://[::1]/a.wav", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "http://2130706433/a.wav", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "http://user@127.0.0.1/a.wav", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "ftp://127.0.0.1/a.wav", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "file:../secret.wav", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "file:%2e%2e/secret.wav", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "file:link.wav", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"ref_audio": "file:///dev/zero", "ref_text": "Hello."}, 400, "ref_audio"),
    ({"references": []}, 400, "references"),
    ({"references": {}}, 400, "references"),
    ({"references": [{}]}, 400, "references"),
    ({"references": [recording()]}, 400, "references"),
    ({"references": [{"audio": recording(), "text": 7}]}, 400, "references"),
    ({"references": [{"audio": "http://10.0.0.1/a.wav", "text": "Hello."}]}, 400, "references"),
    ({"references": [{"audio": recording(), "text": "Hello."}] * 9}, 400, "references"),
    ({"references": [{"audio": recording(31), "text": "Hello."}] * 2}, 400, "references"),
    ({"references": [{"audio": recording(), "text": ""}]}, 400, "ref_text"),
    ({"references": [{"audio": recording(), "text": "Hello."}], "ref_audio": recording()}, 400, "references"),
    ({"task_type": "Base"}, 400, "task_type"),
    ({"task_type": "VoiceDesign"}, 400, "task_type"),
    ({"task_type": "Singing"}, 400, "task_type"),
    ({"task_type": "CustomVoice", "ref_audio": recording(), "ref_text": "Hello."}, 400, "task_type"),
    ({"initial_codec_chunk_frames": 0}, 400, "initial_codec_chunk_frames"),
    ({"initial_codec_chunk_frames": "one"}, 400, "initial_codec_chunk_frames"),
    ({"stream": "yes"}, 400, "stream"),
]

BAD_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"input": "a\xff"}',
    b'{"input": "\\ud800"}',
    b'{"input": "a", "speed": NaN}',
    b'{"input": "a", "temperature": Infinity}',
    b'{"input": "a", "seed": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b"input=hello&voice=low",
]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inputs": [{"text": "Hm."}, {"text": "Hm.", "speed": 9}]}, "inputs: 9 is not allowed; at 1.speed: "),
        ({"inputs": [{"text": "Hm.", "pace": 1}]}, "inputs: 1 is not allowed; at 0.pace: "),
        ({"inputs": [{}]}, "at 0.text: Field required"),
        ({"input": "Hm.", "timestamps": ["word", "line"]}, "timestamps: 'line' is not allowed; at 1: "),
        ({"input": "Hm.", "references": [{"text": "Hm."}]}, "at 0.audio: "),
        ({"input": "Hm.", "voices": {"bob": 7}}, "voices: 7 is not allowed; at bob: "),
        ({"input": "Hm.", "voice": {"id": 7}}, "voice: {'id': 7} is not allowed; Input should be a valid string"),
        ({"input": "Hm.", "lexicons": [7]}, "lexicons: 7 is not allowed; at 0: "),
        ({"input": "Hm.", "loudness": []}, "loudness: [] is not allowed; Input should be "),
        ({"input": "Hm.", "speed": 9}, "speed: 9 is not allowed; Input should be "),
    ],
)
def test_a_refusal_tells_where_in_a_field_it_is(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(SpeechBody, fields)
    assert words in str(refused.value)


async def hidden(length: int) -> AsyncIterator[bytes]:
    """A body of more than `length` bytes, which its head does not say."""
    for _ in range(length // 65536 + 1):
        yield b" " * 65536


def test_what_is_wrong_is_refused_by_name_and_the_server_serves_on(tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    folder.mkdir()
    (tmp_path / "secret.wav").write_bytes(sound())
    (folder / "link.wav").symlink_to("../secret.wav")
    settings = dataclasses.replace(SETTINGS, allow_reference_urls=True, reference_folder=str(folder))

    async def ask() -> None:
        async with serving(settings=settings) as server:
            for fields, status, parameter in BAD_FIELDS:
                answer = await server.speak(**{"text": "Some words.", **fields} if "input" not in fields else fields)
                check_error(answer, status, parameter)
                assert len(answer.content) < 1000
                assert len(answer.headers["x-request-id"]) == 32
            for payload in BAD_BODIES:
                answer = await server.http.post(SPEECH, content=payload)
                assert answer.status_code == 400, payload[:50]
                assert answer.json()["error"]["code"] == "invalid_request"
            check_error(await server.http.post(SPEECH, json={"voice": "low"}), 400, "input")
            check_error(await server.http.get(SPEECH), 405)
            check_error(await server.http.get("/v1/nothing"), 404)
            check_error(await server.http.post(SPEECH, content=b" " * (SETTINGS.max_body_bytes + 1)), 413)
            check_error(await server.http.post(SPEECH, content=hidden(SETTINGS.max_body_bytes)), 413)
            exploded = await server.speak("An explosive one.")
            check_error(exploded, 500)
            assert (await server.speak()).content == alone(SpeechRequest(id="a", text="Some words.", voice="low"))
            assert server.engine.replicas[0].restarts == 0
            assert await server.metric('sonoro_requests_total{model="sine",reason="unknown_voice"}') == 4

    run(ask())


def test_a_body_that_does_not_end_is_not_waited_for() -> None:
    settings = dataclasses.replace(SETTINGS, body_timeout_s=1)

    async def ask() -> None:
        async with serving(settings=settings) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n ".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            writer.close()
            assert (await server.speak()).status_code == 200

    run(ask())


def test_bodies_at_work_are_bounded_together() -> None:
    settings = dataclasses.replace(SETTINGS, max_total_body_bytes=50_000)
    text = '{"input": "Some words.", "response_format": "pcm", "padding": "%s"}'

    async def ask() -> None:
        async with serving(settings=settings) as server:
            release = asyncio.Event()

            async def held_back():
                yield (text % ("a" * 30_000)).encode()[:-1]
                await release.wait()
                yield b"}"

            large = text % ("a" * 40_000)
            first, pause_s = asyncio.create_task(server.http.post(SPEECH, content=held_back())), 0.02
            async with asyncio.timeout(GUARD_S):
                while (answer := await server.http.post(SPEECH, content=large)).status_code == 200:
                    # The large one was read before, and this one refused: it would learn that when all is sent.
                    first.cancel()
                    first, pause_s = asyncio.create_task(server.http.post(SPEECH, content=held_back())), 2 * pause_s
                    await asyncio.sleep(pause_s)
            check_error(answer, 429)
            assert (await server.speak()).status_code == 200
            release.set()
            assert (await first).status_code == 200
            assert (await server.http.post(SPEECH, content=large)).status_code == 200

    run(ask())
