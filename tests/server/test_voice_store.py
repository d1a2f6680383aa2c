"""Registered voices: whole or not at all, there again after a restart, by digest, and no file harms the server."""

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem
from processes import GUARD_S
from sine_engines import reference, run, until

from sonoro.audio.references import content_hash
from sonoro.core.errors import ConfigError, EngineError, InvalidRequest, UnknownVoice, VoiceExists
from sonoro.core.types import Reference
from sonoro.engine.voice_encoder import dump, parse
from sonoro.models.base import SavedVoice
from sonoro.server.errors import NotStored, refusal
from sonoro.server.voice_store import VoiceStore
from sonoro.transport.encoded_voice import FORMAT, EncodedVoice, VoiceFacts, with_facts
from sonoro.transport.table import Changes, Table

FINGERPRINT = "of a sine"
ANNA = VoiceFacts(name="anna", use="prompt", duration_s=1.0, created_at_s=1.8e9, transcript="hm")
SAVED = SavedVoice({"a": torch.arange(6).reshape(2, 3).mT, "b": torch.tensor(0.5, dtype=torch.float16)}, {"of": "it"})

Wait = Callable[[Coroutine[Any, Any, Any]], Any]


async def encode(references: tuple[Reference, ...]) -> EncodedVoice:
    return EncodedVoice(content_hash(references), dump(SAVED, "sine", FINGERPRINT))


def add(store: VoiceStore, name: str = "anna", use: str = "prompt") -> Coroutine[Any, Any, VoiceFacts]:
    return store.add(name, (reference(use),), "agreed", encode)


def names(store: VoiceStore) -> list[str]:
    return [facts.name for facts in store.voices]


@pytest.fixture
def wait() -> Iterator[Wait]:
    """What waits for a coroutine, all in one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def opened(wait: Wait) -> Iterator[Callable[..., VoiceStore]]:
    """What opens a store."""
    stores: list[VoiceStore] = []

    def make(
        location: object = "", max_voices: int = 100, fingerprint: str = FINGERPRINT, changes: Changes | None = None
    ) -> VoiceStore:
        stores.append(store := VoiceStore(str(location), max_voices, changes))
        wait(store.open(fingerprint))
        return store

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def bucket() -> Iterator[str]:
    """The URL of an empty folder in a bucket."""
    files = fsspec.filesystem("memory")
    files.mkdir("/bucket")
    yield "memory://bucket/voices"
    files.rm("/bucket", recursive=True)


@pytest.fixture(params=["folder", "bucket"])
def location(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> str:
    """Where several servers may keep their voices."""
    return str(tmp_path) if request.param == "folder" else bucket


Opened = Callable[..., VoiceStore]


def test_a_voice_has_the_same_bytes_each_time_it_is_saved() -> None:
    facts = {f"fact {number}": "it" for number in range(8)}
    assert len({dump(SavedVoice(SAVED.tensors, facts), "sine", FINGERPRINT) for _ in range(8)}) == 1
    saved = parse(dump(SAVED, "sine", FINGERPRINT), FINGERPRINT)
    assert saved.facts == SAVED.facts
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in SAVED.tensors.items())


def test_who_looks_again_knows_what_another_did(location: str, opened: Opened, wait: Wait) -> None:
    one, other = opened(location), opened(location)
    first = wait(add(one))
    assert names(other) == []
    wait(other.refresh())
    assert (names(other), other.voices) == (["anna"], one.voices)
    assert wait(other.data(first.digest)) == wait(one.data(first.digest))
    # The same name, another voice: that of the first must not be given in its place.
    wait(one.delete("anna"))
    second = wait(add(one, use="reference"))
    with pytest.raises(UnknownVoice, match="another has just been registered under its name"):
        wait(other.data(first.digest))
    wait(other.refresh())
    assert other.voices == one.voices == (second,)
    with pytest.raises(UnknownVoice, match="it has just been deleted"):
        wait(other.data(first.digest))
    wait(one.delete("anna"))
    with fsspec.open(f"{location}/bert.safetensors", "wb") as file:
        file.write(b"no voice")
    wait(other.refresh())
    assert names(other) == []


def test_what_one_front_found_of_another_server_all_fronts_know(
    location: str, tmp_path_factory: pytest.TempPathFactory, opened: Opened, wait: Wait
) -> None:
    folder = tmp_path_factory.mktemp("fronts")
    Table.create(["voices"], 2, folder)
    changes = [Changes(Table(["voices"], 2, number, folder), "voices") for number in range(2)]
    fronts, server = [opened(location, changes=each) for each in changes], opened(location)
    scans: list[int] = []

    async def catch_up() -> None:
        for number, front in enumerate(fronts):

            async def read(number: int = number, front: VoiceStore = front) -> None:
                scans.append(number)
                await front.refresh()

            await changes[number].catch_up(read)

    wait(add(server))
    wait(fronts[0].refresh())
    wait(catch_up())
    assert [names(front) for front in fronts] == [["anna"]] * 2
    wait(server.delete("anna"))
    wait(fronts[1].refresh())
    for _ in range(3):
        wait(catch_up())
    assert [names(front) for front in fronts] == [[]] * 2
    # Each looked once for what the other had found, and nobody for what itself had.
    assert scans == [1, 0]


@pytest.mark.parametrize("is_in_memory", [True, False], ids=["memory", "place"])
def test_a_voice_comes_back_as_it_was(
    is_in_memory: bool, location: str, tmp_path: Path, opened: Opened, wait: Wait
) -> None:
    store = opened("" if is_in_memory else location)
    facts = wait(add(store, "Anna"))
    assert store.voices == (facts,)
    assert (facts.name, facts.use, facts.duration_s, facts.transcript, facts.consent) == (
        *("anna", "prompt", 1.0, "hm", "agreed"),
    )
    assert facts.created_at_s > 1.7e9
    assert facts.digest == content_hash((reference(),))
    saved = parse(wait(store.data(facts.digest)), FINGERPRINT)
    assert dict(saved.facts) == dict(SAVED.facts)
    assert saved.tensors.keys() == SAVED.tensors.keys()
    for name, tensor in SAVED.tensors.items():
        assert saved.tensors[name].dtype == tensor.dtype
        assert torch.equal(saved.tensors[name], tensor)
    wait(store.refresh())
    assert store.voices == (facts,)
    wait(store.delete("anna"))
    assert store.voices == ()
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_taken_by_the_first_alone(location: str, opened: Opened, wait: Wait) -> None:
    one, other = opened(location), opened(location, fingerprint="g")
    facts = wait(add(one))
    with pytest.raises(VoiceExists, match=r"holds anna\.safetensors, of another model or registered just now"):
        wait(add(other))
    wait(one.refresh())
    wait(other.refresh())
    assert (one.voices, other.voices) == ((facts,), ())


def test_a_name_is_taken_from_the_moment_it_is_asked_for_and_free_if_nothing_comes_of_it(
    opened: Opened, wait: Wait
) -> None:
    store, is_encoded = opened(max_voices=2), asyncio.Event()

    async def fail(references: tuple[Reference, ...]) -> EncodedVoice:
        await is_encoded.wait()
        raise EngineError("it could not")

    async def register() -> None:
        failing = asyncio.create_task(store.add("anna", (reference(),), None, fail))
        await asyncio.sleep(0)
        with pytest.raises(VoiceExists, match="delete it first"):
            await add(store, "Anna")
        await add(store, "bert")
        with pytest.raises(InvalidRequest, match=r"2 voices \(max_registered_voices\) are registered"):
            await add(store, "carl")
        is_encoded.set()
        with pytest.raises(EngineError, match="it could not"):
            await failing
        await add(store)
        assert names(store) == ["anna", "bert"]

    wait(register())


@pytest.mark.parametrize("name", ["", "-a", "a b", "../a", "a/b", ".a", "ä", "a" * 65, "a\n", "a\0", None])
def test_a_name_that_could_be_no_file_is_refused(name: str, opened: Opened, wait: Wait) -> None:
    with pytest.raises(InvalidRequest, match=r"1 to 64 letters \(a to z\), digits") as refusal:
        wait(add(opened(), name))
    assert refusal.value.field == "name"


@pytest.mark.parametrize("name", ["a.b", "a.", "a.0123456789abcdeg", "a.0123456789abcdef0", "a.0123456789abcdef.b"])
def test_what_is_no_owner_is_refused(name: str, opened: Opened, wait: Wait) -> None:
    with pytest.raises(InvalidRequest, match="16 digits of an owner"):
        wait(add(opened(), name))


def test_of_two_who_register_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, fsync, kept = threading.Barrier(2), os.fsync, list[VoiceFacts]()

    def wait_for_both(file: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=GUARD_S)
            together.abort()  # the second time, of the folder, nobody is waited for
        fsync(file)

    async def write() -> None:
        store = VoiceStore(str(tmp_path), 9)
        await store.open(FINGERPRINT)
        with contextlib.suppress(VoiceExists):
            kept.append(await add(store))
        store.close()

    monkeypatch.setattr(os, "fsync", wait_for_both)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: asyncio.run(write()), range(2)))
    assert len(kept) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["anna.safetensors"]


def test_a_file_system_without_links_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened, wait: Wait
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    facts = wait(add(opened(tmp_path)))
    assert opened(tmp_path).voices == (facts,)
    assert [path.name for path in tmp_path.iterdir()] == ["anna.safetensors"]


def test_a_server_has_the_voices_of_the_one_before(location: str, opened: Opened, wait: Wait) -> None:
    folder = f"{location}/made/for it"
    store = opened(folder)
    for name in ("anna", "bert", "carl"):
        wait(add(store, name))
    wait(store.delete("bert"))
    assert opened(folder).voices == store.voices
    assert names(store) == ["anna", "carl"]


def test_only_the_owner_can_read_a_voice(tmp_path: Path, opened: Opened, wait: Wait) -> None:
    wait(add(opened(tmp_path)))
    assert (tmp_path / "anna.safetensors").stat().st_mode & 0o077 == 0


def file_of(folder: Path, name: str, **metadata: str) -> None:
    """A voice as it was kept before voices had digests, but for what `metadata` says."""
    facts = msgspec.json.encode(msgspec.structs.replace(ANNA, name=name)).decode()
    fields = {"format": FORMAT, "model": "sine", "fingerprint": FINGERPRINT, "facts": facts, "voice": "{}"} | metadata
    (folder / f"{name}.safetensors").write_bytes(safetensors.torch.save({"a": torch.zeros(1)}, fields))


def test_what_is_no_voice_of_this_model_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: Opened, wait: Wait
) -> None:
    for name in ("good", "zebra"):
        file_of(tmp_path, name)
    file_of(tmp_path, "newer", format="2")
    file_of(tmp_path, "foreign", fingerprint="of another", model="cosine")
    file_of(tmp_path, "misnamed", facts=msgspec.json.encode(ANNA).decode())
    file_of(tmp_path, "factless", facts="")
    file_of(tmp_path, ".hidden")
    whole = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-2])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "noise.safetensors").write_bytes(b"\xff" * 1000)
    (tmp_path / "bare.safetensors").write_bytes(safetensors.torch.save({"a": torch.zeros(1)}))
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "README").write_text("These are voices.")
    store = opened(tmp_path)
    assert names(store) == ["good", "zebra"]
    # They are known by digests all the same, each by its own.
    digests = {facts.digest for facts in store.voices}
    assert len(digests) == 2
    assert all(parse(wait(store.data(digest)), FINGERPRINT).tensors for digest in digests)
    warned = " ".join(caplog.messages)
    for path in tmp_path.iterdir():
        assert (repr(path.name) in warned) == (path.stem not in ("good", "zebra")), path.name
    assert "made by 'cosine' with other weights or another dtype" in warned
    assert "its format is '2'; it must be '1'" in warned
    assert "holds the voice 'anna', not 'misnamed'" in warned
    # What is not ours is not ours to overwrite.
    with pytest.raises(VoiceExists, match=r"the folder of voices holds foreign\.safetensors"):
        wait(add(store, "foreign"))
    assert names(opened(tmp_path, max_voices=1)) == ["good"]
    assert (
        "file='zebra.safetensors' reason=\"name: 'zebra' is not allowed; max_registered_voices" in caplog.messages[-1]
    )


KILLED = """
import asyncio, os, sys
sys.path.insert(0, {tests!r})
from test_voice_store import FINGERPRINT, VoiceStore, add
os.link = lambda *names: os._exit(9)
async def write():
    store = VoiceStore(sys.argv[1], 9)
    await store.open(FINGERPRINT)
    await add(store)
asyncio.run(write())
"""


def test_a_process_killed_before_the_file_has_its_name_leaves_no_voice(
    tmp_path: Path, opened: Opened, wait: Wait
) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = KILLED.format(tests=str(here))
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=False, timeout=120)
    assert process.returncode == 9
    [litter] = tmp_path.iterdir()
    # It may still be being written, for all the next server knows.
    store = opened(tmp_path)
    assert (names(store), litter.exists()) == ([], True)
    wait(add(store))
    assert names(store) == ["anna"]
    two_hours_ago = time.time() - 7200
    os.utime(litter, (two_hours_ago, two_hours_ago))
    assert names(opened(tmp_path)) == ["anna"]
    assert not litter.exists()


@pytest.mark.parametrize("calls", [["fsync"], ["link", "replace"]])
def test_a_voice_that_cannot_be_written_is_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str], opened: Opened, wait: Wait
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = opened(tmp_path)
    with monkeypatch.context() as patch:
        for call in calls:
            patch.setattr(os, call, is_full)
        with pytest.raises(NotStored, match="the voice 'anna' could not be stored: No space left on device") as told:
            wait(add(store))
    assert (refusal(told.value).status, told.value.code) == (507, "storage")
    assert store.voices == ()
    assert list(tmp_path.iterdir()) == []
    wait(add(store))


def test_a_voice_that_cannot_be_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened, wait: Wait
) -> None:
    store = opened(tmp_path)
    facts = wait(add(store))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(EngineError, match="the voice 'anna' could not be deleted: Operation not permitted"):
        wait(store.delete("anna"))
    assert store.voices == (facts,)
    assert wait(store.data(facts.digest))


def test_a_bucket_that_does_not_answer_is_asked_again(
    bucket: str, monkeypatch: pytest.MonkeyPatch, opened: Opened, wait: Wait
) -> None:
    def is_away(*_: object, **__: object) -> None:
        raise RuntimeError("no credentials were found")

    one, other = opened(bucket), opened(bucket)
    facts = wait(add(one))
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", is_away)
        wait(other.refresh())
        assert other.voices == ()
        with pytest.raises(EngineError, match="the voice 'anna' could not be read: RuntimeError: no credentials"):
            wait(one.data(facts.digest))
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "ls", is_away)
        wait(other.refresh())
        wait(one.refresh())
        assert one.voices == (facts,)
    wait(other.refresh())
    assert other.voices == (facts,)
    assert wait(other.data(facts.digest)) == wait(one.data(facts.digest))


def test_a_voice_is_kept_though_the_bucket_cannot_be_listed(
    bucket: str, monkeypatch: pytest.MonkeyPatch, opened: Opened, wait: Wait
) -> None:
    def is_away(*_: object, **__: object) -> None:
        raise PermissionError("ListBucket")

    store = opened(bucket)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "ls", is_away)
        facts = wait(add(store))
    for _ in range(2):
        assert store.voices == opened(bucket).voices == (facts,)
        assert wait(store.data(facts.digest))
        wait(store.refresh())


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "another's"])
def test_a_voice_that_is_back_within_a_second_is_known(
    bucket: str, monkeypatch: pytest.MonkeyPatch, is_own: bool, opened: Opened, wait: Wait
) -> None:
    """Of the same recording, where nothing but the time of an object tells it from the one before."""
    listed = MemoryFileSystem.ls

    def in_seconds(files: MemoryFileSystem, path: str, detail: bool = True) -> list[dict[str, object]]:
        return [{**entry, "created": "12:00:00"} for entry in listed(files, path, detail)]

    monkeypatch.setattr(MemoryFileSystem, "ls", in_seconds)
    one, other = opened(bucket), opened(bucket)
    wait(add(one))
    wait(other.refresh())
    wait((other if is_own else one).delete("anna"))
    if not is_own:
        wait(other.refresh())
    wait(one.refresh())
    facts = wait(add(one))
    wait(other.refresh())
    assert other.voices == (facts,)


def test_what_else_is_in_a_bucket_is_passed_over(bucket: str, caplog: pytest.LogCaptureFixture, opened: Opened) -> None:
    files = fsspec.filesystem("memory")
    for path, data in (("README", b"voices"), ("cut.safetensors", b"1234567"), ("below/bert.safetensors", b"")):
        files.pipe_file(f"/bucket/voices/{path}", data)
    assert opened(bucket).voices == ()
    warned = " ".join(caplog.messages)
    assert [name in warned for name in ("'README'", "'cut.safetensors'", "bert")] == [True, True, False]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://nothing/voices", "there is no '/nothing' that can be reached"),
        ("nowhere://bucket/voices", "Protocol not known: nowhere"),
        ("s3://bucket/voices", "Install s3fs"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused(
    url: str, words: str, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=f"it must be a bucket that can be used .*{words}") as refusal:
        opened(url)
    assert (refusal.value.field, refusal.value.value) == ("voices_folder", url)


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("~nobody-of-this-name/voices")):
        with pytest.raises(ConfigError, match="it must be a folder that can be used") as refusal:
            opened(folder)
        assert refusal.value.field == "voices_folder"


def test_many_who_look_at_once_look_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look, looks, may_go_on = VoiceStore._scan, 0, threading.Event()

    async def ask() -> None:
        nonlocal looks
        store = VoiceStore(str(tmp_path), 9)
        await store.open(FINGERPRINT)

        def counted(store: VoiceStore) -> None:
            nonlocal looks
            looks += 1
            may_go_on.wait()
            look(store)

        monkeypatch.setattr(VoiceStore, "_scan", counted)
        first = [asyncio.create_task(store.refresh()) for _ in range(20)]
        await until(lambda: looks == 1)
        encoded = await encode((reference(),))
        (tmp_path / "anna.safetensors").write_bytes(with_facts(encoded.data, ANNA))
        later = [asyncio.create_task(store.refresh()) for _ in range(20)]
        later.pop().cancel()
        may_go_on.set()
        await asyncio.gather(*first, *later)
        assert names(store) == ["anna"]
        assert looks <= 3
        store.close()

    run(ask())


def test_a_voice_whose_sender_leaves_is_registered(opened: Opened, wait: Wait) -> None:
    async def leave() -> None:
        store, is_encoded = VoiceStore("", 9), asyncio.Event()

        async def encode_later(references: tuple[Reference, ...]) -> EncodedVoice:
            await is_encoded.wait()
            return await encode(references)

        await store.open(FINGERPRINT)
        adding = asyncio.create_task(store.add("anna", (reference(),), None, encode_later))
        await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        is_encoded.set()
        await until(lambda: names(store) == ["anna"])
        store.close()

    run(leave())


def test_a_file_too_large_for_a_voice_is_not_read(
    location: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, opened: Opened, wait: Wait
) -> None:
    def too_much(*limits: object, **named: object) -> bytes:
        raise AssertionError("it was read")

    store = opened(location)
    if "://" in location:
        monkeypatch.setattr(MemoryFileSystem, "size", lambda self, path: 3 * 2**30)
        monkeypatch.setattr(MemoryFileSystem, "cat_file", too_much)
        with fsspec.open(f"{location}/bert.safetensors", "wb") as file:
            file.write(b"no voice")
    else:
        with open(f"{location}/bert.safetensors", "wb") as file:
            file.truncate(3 * 2**30)
        monkeypatch.setattr(Path, "read_bytes", too_much)
    wait(store.refresh())
    assert names(store) == []
    [warned] = [message for message in caplog.messages if "voice_passed_over" in message]
    assert f"{3 * 2**30} bytes" in warned
    wait(store.refresh())
    assert caplog.messages.count(warned) == 1


def test_a_header_of_deep_json_is_passed_over(location: str, caplog: pytest.LogCaptureFixture, opened: Opened) -> None:
    header = b'{"a": {"b": ' + b"[" * 100_000
    with fsspec.open(f"{location}/bert.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
    assert names(opened(location)) == []
    assert any("it is no encoded voice" in message for message in caplog.messages)
