"""vLLM-Omni's WebSocket, on the path of our own sessions, as LiveKit's Baseten plugin and as nobody should speak it."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import soundfile
from processes import GUARD_S
from servers import SETTINGS, Server, serving
from sessions import PATH, TEXT, session, whole
from sine_engines import LONG, nothing_left, run, until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

STREAMED = {"response_format": "pcm", "stream_audio": True}
BASETEN = {"task_type": "Base", **STREAMED, "speed": 1.0, "voice": "a-voice-of-theirs", "language": "Auto"}
METRIC = 'sonoro_requests_total{dialect="vllm_omni",model="sine",reason="%s"}'


@dataclasses.dataclass
class Client:
    """A client's side."""

    socket: ClientConnection

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def hear(self) -> dict[str, Any] | bytes:
        message = await asyncio.wait_for(self.socket.recv(), GUARD_S)
        return message if isinstance(message, bytes) else json.loads(message)

    async def speak(self, *pieces: str) -> None:
        for piece in pieces:
            await self.say("input.text", text=piece)
        await self.say("input.done")

    async def hear_utterance(self, index: int, sentences: int = 1) -> tuple[list[bytes], list[dict[str, Any]]]:
        """The binary frames and the events of an utterance, all of them of that index."""
        frames: list[bytes] = []
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != "session.done":
            heard = await self.hear()
            if isinstance(heard, bytes):
                frames.append(heard)
            else:
                events.append(heard)
                assert heard["type"] == "error" or heard["utterance_index"] == index, heard
        assert events.pop() == {"type": "session.done", "utterance_index": index, "total_sentences": sentences}
        return frames, events


@contextlib.asynccontextmanager
async def client(server: Server, **config: Any) -> AsyncIterator[Client]:
    url = server.url.replace("http", "ws") + PATH
    async with connect(url, proxy=None, compression=None, max_size=None) as socket:
        asked = Client(socket)
        # Ours: whose clients wait for it, and who speaks this dialect passes over what he does not know.
        assert (await asked.hear())["type"] == "session.created"
        if config:
            await asked.say("session.config", **config)
        yield asked


def test_texts_are_spoken_in_pieces_as_they_come_and_each_end_is_answered() -> None:
    async def speak() -> None:
        async with serving("live") as server, client(server, **BASETEN) as asked:
            await asked.speak()
            assert await asked.hear_utterance(0, sentences=0) == ([], [])
            # The second and third are sent while the first is spoken.
            await asked.speak("Some ", "words, ", "which come one by one.")
            await asked.speak(" ")
            await asked.speak(" ", LONG[:200])
            frames, (start, done) = await asked.hear_utterance(1)
            assert b"".join(frames) == whole()
            facts = {"utterance_index": 1, "sentence_index": 0}
            assert start.pop("sentence_text").startswith("Some ")
            audio = {"format": "pcm", "sample_rate": 8000, "word_timestamps": False}
            assert start == {"type": "audio.start", **facts, **audio}
            assert done == {"type": "audio.done", **facts, "total_bytes": len(whole()), "error": False}
            assert await asked.hear_utterance(2, sentences=0) == ([], [])
            frames, _ = await asked.hear_utterance(3)
            assert len(frames) > 1
            assert b"".join(frames) == whole(LONG[:200])
            await asked.say("session.config", **STREAMED, voice="low")
            await asked.speak(TEXT)
            await asked.say("session.close")  # after what was asked for before it
            frames, _ = await asked.hear_utterance(4)
            assert b"".join(frames) == whole(voice="low")
            with pytest.raises(ConnectionClosed) as closed:
                await asked.hear()
            assert closed.value.rcvd.code == 1000
            assert await server.metric(METRIC % "stop") == 3

    run(speak())


def test_audio_that_is_not_streamed_comes_in_one_frame_as_a_file() -> None:
    async def speak() -> None:
        async with serving("live") as server, client(server, split_granularity="sentence") as asked:
            await asked.speak(LONG[:200])
            (file,), (start, done) = await asked.hear_utterance(0)
            assert start["format"] == "wav"
            assert done["total_bytes"] == len(file)
            samples, rate = soundfile.read(io.BytesIO(file), dtype="int16")
            assert rate == 8000
            assert samples.tobytes() == whole(LONG[:200])

    run(speak())


def test_a_long_file_is_sent_in_fragments_and_states_its_length() -> None:
    slow = {"stream_audio": False, "sample_rate": 48000, "speed": 0.25}

    async def speak() -> None:
        async with serving("live") as server, client(server, **slow) as asked:
            await asked.speak(LONG[:200])
            assert (await asked.hear())["type"] == "audio.start"  # type: ignore[call-overload, index]
            parts: list[Any] = [part async for part in asked.socket.recv_streaming()]
            file = b"".join(parts)
            assert max(map(len, parts)) < len(file) / 2
            assert int.from_bytes(file[4:8], "little") == len(file) - 8
            assert (await asked.hear())["total_bytes"] == len(file)  # type: ignore[call-overload, index]

    run(speak())


def test_who_reads_nothing_of_a_long_file_is_given_up_and_it_is_freed() -> None:
    settings = dataclasses.replace(SETTINGS, slow_reader_timeout_s=0.3)
    slow = {"stream_audio": False, "sample_rate": 48000, "speed": 0.25}

    async def speak() -> None:
        async with serving("live", settings) as server, client(server, **slow) as asked:
            asked.socket.transport.pause_reading()
            await asked.speak((20 * LONG)[:2500])  # more than the buffers of the system
            await until(lambda: server.service.speech.answers.taken > 8_000_000)
            await until(lambda: server.service.speech.answers.taken == 0)
            assert await server.metric(METRIC % "slow_reader") == 1
            asked.socket.transport.abort()

    run(speak())


def test_audio_that_is_held_has_room_with_that_of_others() -> None:
    settings = dataclasses.replace(SETTINGS, max_total_answer_bytes=16_000)

    async def speak() -> None:
        async with serving("live", settings) as server, client(server, split_granularity="sentence") as asked:
            await asked.speak(LONG)
            frames, (*_, error) = await asked.hear_utterance(0)
            assert not frames
            assert "responses held in memory" in error["message"]
            await until(lambda: server.service.speech.answers.taken == 0)
            await asked.speak(LONG[:20])
            (file,), _ = await asked.hear_utterance(1)
            assert len(file) > 44

    run(speak())


@pytest.mark.parametrize("is_ours", [False, True])
def test_words_are_told_with_their_times(is_ours: bool) -> None:
    further = {"word_timestamps": True} if is_ours else {"timestamp_type": "word"}

    async def speak() -> None:
        async with serving("live") as server, client(server, **STREAMED, **further) as asked:
            await asked.speak(*(f"{word} " for word in TEXT.split()))
            frames, events = await asked.hear_utterance(0)
            if is_ours:
                *chunks, last = (event for event in events if event["type"] == "audio.chunk")
                assert not frames
                audio = b"".join(base64.b64decode(chunk["audio_b64"]) for chunk in chunks)
                assert all(chunk["timestamps"] is None for chunk in chunks)
                assert [chunk["chunk_id"] for chunk in (*chunks, last)] == [*range(len(chunks) + 1)]
                assert [chunk["chunk_end_ms"] for chunk in chunks[:-1]] == [c["chunk_start_ms"] for c in chunks[1:]]
                assert last["audio_b64"] == ""
                words = [(word["word"], word["start_ms"] / 1000, word["end_ms"] / 1000) for word in last["timestamps"]]
            else:
                audio = b"".join(frames)
                words = [*zip(*events[-1]["timestamp_info"]["word_alignment"].values(), strict=True)]
            assert audio == whole(TEXT + " ")
            assert [word for word, _, _ in words] == TEXT.split()
            edges_s = [edge for _, *span in words for edge in span]
            assert edges_s == sorted(edges_s)
            assert edges_s[0] >= 0
            assert edges_s[-1] <= len(audio) / 16000 + 0.001

    run(speak())


def test_what_is_wrong_is_told_as_a_string_and_every_end_is_answered_all_the_same() -> None:
    settings = dataclasses.replace(SETTINGS, max_characters=100)

    async def speak() -> None:
        async with serving("live", settings) as server, client(server, **STREAMED) as asked:
            unknown = [{"type": kind} for kind in ("voice.list", "response.cancel")]
            for message in (*unknown, {"type": "input.text", "text": 7}, {}, []):
                await asked.socket.send(json.dumps(message))
                told = await asked.hear()
                assert set(told) == {"type", "message"}
                assert isinstance(told["message"], str)
            await asked.say("session.config", **STREAMED, speed=9)
            assert "speed" in (await asked.hear())["message"]
            await asked.say("session.config", **STREAMED)
            await asked.speak(*["Much too much text. "] * 9)
            _, events = await asked.hear_utterance(0)
            assert events[-1]["type"] == "error"
            await asked.speak(TEXT)
            assert b"".join((await asked.hear_utterance(1))[0]) == whole()
            await until(server.is_idle)

    run(speak())


def test_it_is_told_from_ours_by_the_first_message_alone() -> None:
    async def speak() -> None:
        async with serving("live") as server:
            async with session(server) as ours:
                assert (await ours.speak(TEXT))[0] == whole()
                await ours.say("session.config", **STREAMED)
                assert (await ours.hear())["type"] == "session.configured"
            async with session(server) as ours:
                await ours.say("session.config", voice="low", response_format="pcm")
                assert (await ours.hear())["type"] == "session.configured"
                assert (await ours.speak(TEXT))[0] == whole(voice="low")
            off = dataclasses.replace(SETTINGS, dialects_off=("vllm_omni",))
            assert await server.metric('sonoro_requests_total{dialect="native",model="sine",reason="stop"}') == 2
        async with serving("live", off) as server, session(server) as ours:
            await ours.say("session.config", **STREAMED)
            assert (await ours.hear())["type"] == "session.configured"

    run(speak())


def test_who_leaves_in_mid_speech_frees_the_slot() -> None:
    async def leave() -> None:
        async with serving("slow_live") as server:
            async with client(server, **BASETEN) as asked:
                await asked.speak(LONG)
                await asked.speak(LONG)
                assert (await asked.hear())["type"] == "audio.start"
                asked.socket.transport.abort()
            await until(server.is_idle)
            await until(lambda: server.has(METRIC % "disconnected", 1))

    run(leave())


@pytest.mark.parametrize("scheme", ["Api-Key", "Bearer"])
def test_a_key_comes_in_either_scheme(scheme: str) -> None:
    async def knock() -> None:
        async with serving("live", dataclasses.replace(SETTINGS, api_keys=("hush",))) as server:
            url = server.url.replace("http", "ws") + PATH
            with pytest.raises(Exception, match="401"):
                await connect(url, proxy=None, additional_headers={"Authorization": f"{scheme} loud"})
            async with connect(url, proxy=None, additional_headers={"Authorization": f"{scheme} hush"}) as socket:
                assert json.loads(await socket.recv())["type"] == "session.created"

    run(knock())


def test_garbage_neither_breaks_the_server_nor_holds_anything_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """200 sessions in wrong order, of bytes, left anywhere: no slot or task is left of them."""
    chance = random.Random(7)
    texts = [{"type": "input.text", "text": text} for text in ("Some ", " ", "Words.")]
    configs = [STREAMED, {"voice": ["low"]}, {"word_timestamps": True, "stream_audio": None}]
    said = [
        *(*texts, *({"type": "session.config", **config} for config in configs), {"type": "input.text"}, None, 7, {}),
        *({"type": kind} for kind in ("input.done", "input.done", "session.close", "response.cancel")),
    ]
    firsts = [STREAMED, {"split_granularity": 7}, {"timestamp_type": "word"}]

    async def talk(server: Server) -> None:
        with contextlib.suppress(ConnectionClosed):
            async with client(server, **chance.choice(firsts)) as asked:
                for _ in range(chance.randrange(1, 12)):
                    is_binary = chance.random() < 0.1
                    garbage = chance.randbytes(chance.randrange(1, 200))
                    await asked.socket.send(garbage if is_binary else json.dumps(chance.choice(said)))
                if chance.random() < 0.5:
                    await asked.hear()
                if chance.random() < 0.5:
                    asked.socket.transport.abort()

    async def fuzz() -> None:
        async with serving("live", dataclasses.replace(SETTINGS, session_idle_timeout_s=1)) as server:
            before = len(asyncio.all_tasks())
            await asyncio.gather(*(talk(server) for _ in range(200)))
            await until(server.is_idle)
            await until(lambda: len(asyncio.all_tasks()) <= before)
            assert await server.metric("sonoro_requests_in_flight") == 0
            assert server.engine.replicas[0].restarts == 0
            async with client(server, **BASETEN) as asked:
                await asked.speak(TEXT)
                assert b"".join((await asked.hear_utterance(0))[0]) == whole()

    run(fuzz())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
