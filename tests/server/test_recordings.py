"""Recordings by URL: what is allowed is read, and nothing else is connected to or opened."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import os
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import pytest
import soundfile
from servers import SETTINGS, never_blocked, recording, serving, sound
from sine_engines import nothing_left, run, until
from sine_models import VoicedSineModel

from sonoro.core.errors import InvalidReference
from sonoro.core.types import Reference
from sonoro.server import recordings as recordings_module
from sonoro.server.errors import TooManyRequests
from sonoro.server.recordings import MAX_PENDING, Recordings, is_public

__all__ = ["nothing_left"]
from sonoro.server.schemas import SpeechBody, read_references


def wav(seconds: float = 1.0) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.sin(np.arange(int(seconds * 8000)) / 5) / 2, 8000, format="WAV", subtype="PCM_16")
    return file.getvalue()


@contextlib.asynccontextmanager
async def site(answer: bytes, trickle_s: float = 0) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A site that answers every request so, byte by byte if asked to; its port, and the heads of the requests."""
    heads: list[bytes] = []
    connections: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            step = 1 if trickle_s else max(1, len(answer))
            for start in range(0, len(answer), step):
                writer.write(answer[start : start + step])
                await writer.drain()
                await asyncio.sleep(trickle_s)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], heads
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections)


def answered(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@contextlib.contextmanager
def reading(**options: object):
    recordings = Recordings(**{"max_bytes": 100_000, **options})
    try:
        yield recordings
    finally:
        recordings.close()


async def refused(recordings: Recordings, url: str, words: str, field: str = "ref_audio") -> None:
    with pytest.raises(InvalidReference, match=words) as caught:
        await recordings.read(url, "Hello.", "prompt", field)
    assert caught.value.field == field


async def at_home(host: str, port: int) -> list[str]:
    """Every name is this machine's."""
    return ["127.0.0.1"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("172.16.0.1", False),
        ("192.0.0.8", False),
        ("192.0.2.1", False),
        ("192.88.99.1", False),
        ("192.168.1.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::ffff:8.8.8.8", False),
        ("::ffff:127.0.0.1", False),
        ("::7f00:1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::1", False),
        ("100::1", False),
        ("2001::7f00:1", False),
        ("2001:db8::1", False),
        ("2002:7f00:1::", False),
        ("3fff::1", False),
        ("fc00::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("ff02::1", False),
    ],
)
def test_only_hosts_of_the_public_internet_are_public(address: str, expected: bool) -> None:
    assert is_public(address) == expected


def test_nothing_is_fetched_or_opened_unless_the_operator_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav())

    async def ask() -> None:
        with reading() as recordings:
            for url in (
                "http://8.8.8.8/a.wav",
                (tmp_path / "a.wav").as_uri(),
                str(tmp_path / "a.wav"),
                "ftp://a/b",
                "",
            ):
                await refused(recordings, url, "it must be a data: URL")
            inline = "data:audio/wav;base64," + base64.b64encode(wav()).decode()
            assert (await recordings.read(inline, None, "reference")).duration_s == 1
            await refused(recordings, inline + "!", "valid base64")
            await refused(recordings, inline.replace(";base64", ""), "data: URL")
            large = "data:audio/wav;base64," + base64.b64encode(wav(7)).decode()
            await refused(recordings, large, "at most 100000 bytes", "references")

    run(ask())


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "0x7f.1", "2130706433", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "0"),
        *("169.254.169.254", "10.0.0.1", "192.168.0.1", "[fe80::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
    ],
)
def test_private_hosts_are_refused_however_they_are_written(host: str) -> None:
    async def ask() -> None:
        async with site(answered(wav())) as (port, heads):
            with reading(allows_urls=True) as recordings:
                await refused(recordings, f"http://{host}:{port}/a.wav", "public addresses alone|there to be fetched")
            assert heads == []

    run(ask())


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///a.wav",
        "http://user@host.example/a.wav",
        "http://user:secret@host.example/a.wav",
        "http://host.example:99999/a.wav",
        "http://host.example:port/a.wav",
        "http://host.example\\@127.0.0.1/",
        "http://host.example/a b",
        "http://host.example/\r\nX: y",
        "http://höst.example/",
        "http://[::1/",
    ],
)
def test_urls_that_could_be_read_in_two_ways_are_refused(url: str) -> None:
    async def ask() -> None:
        with reading(allows_urls=True, resolve=at_home, is_allowed=lambda address: True) as recordings:
            await refused(recordings, url, "http")

    run(ask())


def test_long_urls_are_refused_unread() -> None:
    """Python's parser of URLs would keep them."""

    async def ask() -> None:
        with reading(allows_urls=True, resolve=at_home, is_allowed=lambda address: True) as recordings:
            before = urlsplit.cache_info().misses  # type: ignore[attr-defined]
            for scheme in ("http://host/", "file:///", "ftp://host/", ""):
                await refused(recordings, scheme + "a" * 100_000, "at most 8192 characters")
            assert urlsplit.cache_info().misses == before  # type: ignore[attr-defined]

    run(ask())


def test_what_was_checked_is_what_is_connected_to() -> None:
    """The name is asked once, whatever it would answer the next time; one bad address spoils all."""
    asked: list[str] = []

    def resolve(*addresses: str) -> Callable[[str, int], object]:
        async def answer(host: str, port: int) -> list[str]:
            asked.append(host)
            return list(addresses)

        return answer

    async def ask() -> None:
        async with site(answered(wav())) as (port, heads):
            url = f"http://voices.example:{port}/a%20b.wav?c=d"
            is_allowed = lambda address: address == "127.0.0.1"  # noqa: E731
            with reading(allows_urls=True, resolve=resolve("127.0.0.1"), is_allowed=is_allowed) as recordings:
                assert (await recordings.read(url, None, "reference")).duration_s == 1
            assert asked == ["voices.example"]
            assert heads[0].startswith(b"GET /a%20b.wav?c=d HTTP/1.1\r\n")
            assert f"Host: voices.example:{port}".encode() in heads[0]
            for addresses in (("127.0.0.1", "10.0.0.1"), ()):
                with reading(allows_urls=True, resolve=resolve(*addresses), is_allowed=is_allowed) as recordings:
                    await refused(recordings, url, "public addresses alone")
            assert len(heads) == 1

    run(ask())


def test_answers_are_bounded_and_must_be_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1_000_000)

    async def ask() -> None:
        with reading(allows_urls=True, resolve=at_home, is_allowed=lambda address: True) as recordings:
            for answer, trickle_s, words in (
                (answered(b"", "302 Found", "Location: http://127.0.0.1/a.wav"), 0, "redirects are not followed"),
                (answered(wav(), "404 Not Found"), 0, "redirects are not followed"),
                (answered(b"<html>"), 0, "audio that libsndfile reads"),
                (answered(bytes(100_001)), 0, "at most 100000 bytes"),
                (endless, 0, "at most 100000 bytes"),
                (answered(wav())[:-100], 0, "there to be fetched"),
                (b"no HTTP at all\r\n\r\n", 0, "there to be fetched"),
                (b"", 0, "there to be fetched"),
                (answered(wav()), 0.05, "within 0.5 s"),
            ):
                monkeypatch.setattr(recordings_module, "FETCH_TIMEOUT_S", 0.5 if trickle_s else 10)
                async with site(answer, trickle_s) as (port, heads):
                    await refused(recordings, f"http://voices.example:{port}/", words)
                    assert len(heads) == 1
            await refused(recordings, f"http://voices.example:{port}/", "there to be fetched")
            await refused(recordings, f"https://voices.example:{port}/", "there to be fetched")

    run(ask())


def chunked(*parts: bytes) -> bytes:
    """A response in chunks, without an end."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


@pytest.mark.parametrize(
    "answer",
    [
        chunked(*[b"a"] * 100_000),
        b"HTTP/1.1 100 \r\n\r\n" * 50_000,
        b"HTTP/1.1 200 OK\r\n" + b"a:\r\n" * 25_000 + b"\r\n",
        chunked(b"a") + b"0\r\n" + b"a:\r\n" * 25_000 + b"\r\n",
    ],
    ids=["single bytes", "interim responses", "a long head", "a long trailer"],
)
def test_a_hostile_site_neither_stalls_the_server_nor_keeps_it_busy(answer: bytes) -> None:
    async def ask() -> None:
        with reading(allows_urls=True, resolve=at_home, is_allowed=lambda address: True) as recordings:
            async with site(answer) as (port, _):
                began_s = time.process_time()
                with never_blocked():
                    await refused(recordings, f"http://voices.example:{port}/", "there to be fetched")
                assert time.process_time() - began_s < 1

    run(ask())


def test_sites_that_drip_do_not_hold_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings_module, "FETCH_START_S", 0.2)

    async def ask() -> None:
        with reading(allows_urls=True, resolve=at_home, is_allowed=lambda address: True) as recordings:
            async with site(answered(wav()), 0.05) as (slow, _), site(answered(wav())) as (quick, _):
                dripping = [refused(recordings, f"http://slow.example:{slow}/", "without a pause") for _ in range(12)]
                waiting = asyncio.gather(*dripping)
                read = await recordings.read(f"http://voices.example:{quick}/", "Hello.", "prompt")
                assert read.duration_s == 1.0
                await waiting

    run(ask())


def test_files_are_read_from_their_folder_and_from_nowhere_else(tmp_path: Path) -> None:
    folder, outside = tmp_path / "voices", tmp_path / "secret.wav"
    (folder / "sub folder").mkdir(parents=True)
    for path in (folder / "a.wav", folder / "sub folder" / "b.wav", outside):
        path.write_bytes(wav())
    (folder / "text.wav").write_text("no sound")
    (folder / "large.wav").write_bytes(wav(7))
    (folder / "inside.wav").symlink_to("a.wav")
    (folder / "outside.wav").symlink_to("../secret.wav")
    (folder / "up").symlink_to("..")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")

    async def ask() -> None:
        with reading(folder=str(folder)) as recordings:
            for url in ("file:a.wav", (folder / "a.wav").as_uri(), "file:sub%20folder/b.wav", "file:inside.wav"):
                assert (await recordings.read(url, None, "reference")).duration_s == 1, url
            for url in (
                *(
                    "file:../secret.wav",
                    "file:sub folder/../../secret.wav",
                    "file:%2e%2e/secret.wav",
                    "file:up/secret.wav",
                ),
                *(outside.as_uri(), "file:outside.wav", "file:///etc/passwd", "file://host.example/a.wav", "file:"),
                *("file:pipe", "file:loop", "file:none.wav", "file:a.wav%00", "file:%ff", "file:sub%20folder"),
                *("file:" + "a" * 5000, "file:///dev/zero", "FILE:../secret.wav"),
            ):
                await refused(recordings, url, "a file in the folder")
            await refused(recordings, "file:text.wav", "audio that libsndfile reads")
            await refused(recordings, "file:large.wav", "at most 100000 bytes")

    run(ask())


def test_a_crowd_that_names_files_holds_no_more_of_them_than_are_decoded(tmp_path: Path) -> None:
    size = 2_000_000
    (tmp_path / "noise.wav").write_bytes(bytes(size))

    async def ask() -> None:
        with reading(folder=str(tmp_path), max_bytes=size) as recordings:

            async def name_it() -> None:
                # Not by pytest.raises, which keeps what the error's frames held.
                with contextlib.suppress(InvalidReference, TooManyRequests):
                    await recordings.read("file:noise.wav", None, "reference")

            crowd = asyncio.gather(*(name_it() for _ in range(40)))
            await asyncio.sleep(0)
            # Meanwhile nobody hears of what the threads find.
            time.sleep(0.3)
            await crowd

    tracemalloc.start()
    try:
        run(ask())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Two threads, each with a file and what the decoder copies of it.
    assert peak_bytes < 10 * size


@pytest.mark.parametrize(
    "fields",
    [
        {"ref_audio": "data:audio/wav;base64," + base64.b64encode(wav()).decode()},
        {"ref_audio": "data:,nothing", "ref_text": "Hm."},
        {"references": [{"audio": "data:,nothing", "text": "Hm."}]},
        {"ref_text": "Hm."},
        {"x_vector_only_mode": True},
    ],
)
def test_a_model_that_cannot_clone_says_so_whatever_else_is_wrong(fields: dict[str, object]) -> None:
    spec = msgspec.structs.replace(VoicedSineModel().spec, voice_modes=("named",))

    async def body() -> None:
        with reading() as recordings:
            asked = SpeechBody.model_validate({"input": "Hi."} | fields)
            with pytest.raises(InvalidReference, match="cannot clone") as refusal:
                await read_references(asked, recordings, spec)
            assert refusal.value.field in fields

    run(body())


class Stuck:
    """A decoder that is at work until `go_on`, and counts what it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go_on, self.begun = threading.Event(), 0
        self._decode = recordings_module.read_reference
        monkeypatch.setattr(recordings_module, "read_reference", self)

    def __call__(self, *arguments: object, **options: object) -> Reference:
        self.begun += 1
        self._may_go_on.wait()
        return self._decode(*arguments, **options)

    def go_on(self) -> None:
        self._may_go_on.set()


def test_no_more_recordings_wait_than_may_and_those_of_nobody_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)

    async def ask() -> None:
        with reading() as recordings:
            crowd = [asyncio.create_task(recordings.decode(wav(), "Hello.", "prompt")) for _ in range(MAX_PENDING)]
            await until(lambda: stuck.begun == 2)
            with pytest.raises(TooManyRequests):
                await recordings.decode(wav(), "Hello.", "prompt")
            for task in crowd[:-1]:
                task.cancel()
            await until(lambda: recordings.pending.taken == 3)
            stuck.go_on()
            assert (await crowd[-1]).text == "Hello."
            # The two that had begun, and the one that somebody waits for.
            assert stuck.begun == 3
            await until(lambda: recordings.pending.taken == 0)

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_recordings_of_one_key_keep_out_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, settings = Stuck(monkeypatch), dataclasses.replace(SETTINGS, api_keys=("first-key", "second-key"))
    body = {"input": "Hello.", "ref_audio": recording(), "ref_text": "A tone."}

    async def ask() -> None:
        async with serving(settings=settings) as server:

            def speak(key: str) -> asyncio.Task[httpx.Response]:
                headers = {"Authorization": f"Bearer {key}"}
                return asyncio.create_task(server.http.post("/v1/audio/speech", json=body, headers=headers))

            pending = server.service.speech.recordings.pending
            crowd = [speak("first-key") for _ in range(MAX_PENDING)]
            await until(lambda: sum(task.done() for task in crowd) + pending.taken == MAX_PENDING)
            before = pending.taken
            other = speak("second-key")
            await until(lambda: other.done() or pending.taken == before + 1)
            stuck.go_on()
            assert (await other).status_code == 200
            assert {answer.status_code for answer in await asyncio.gather(*crowd)} == {200, 429}

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_what_a_client_that_left_has_sent_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    form = {"files": {"audio": ("a.wav", sound(), "audio/wav")}, "data": {"name": "anna", "ref_text": "A tone."}}
    named = {"json": {"input": "Hello.", "ref_audio": recording(), "ref_text": "A tone."}}

    async def ask() -> None:
        async with serving() as server:
            recordings = server.process.config.app.state.service.speech.recordings
            holding = [asyncio.create_task(server.http.post("/v1/audio/speech", **named)) for _ in range(2)]
            await until(lambda: stuck.begun == 2)
            for path, body in (("/v1/audio/speech", named), ("/v1/audio/voices", form)):
                left = asyncio.create_task(server.http.post(path, **body))
                await until(lambda: recordings.pending.taken == 3)
                left.cancel()
                await until(lambda: recordings.pending.taken == 2)
            stuck.go_on()
            assert [answer.status_code for answer in await asyncio.gather(*holding)] == [200, 200]
            assert stuck.begun == 2

    run(ask())
