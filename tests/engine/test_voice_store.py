"""Registered voices in a folder: whole or not at all, there again after a restart, and no file harms the engine."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem

from fakes.sine import SineModel
from guard import GUARD_S
from listening import config_of, reference, speak
from sonoro.core.errors import ConfigError, EngineError, UnknownVoice, VoiceExists
from sonoro.core.types import SpeechRequest, VoiceFacts
from sonoro.engine.engine import Engine
from sonoro.engine.voice_store import FORMAT, FileStore, store_at
from sonoro.models.base import SavedVoice

ANNA = VoiceFacts(name="anna", use="prompt", duration_s=1.0, created_at_s=1.8e9, transcript="hm")
SAVED = SavedVoice({"a": torch.arange(6).reshape(2, 3).mT, "b": torch.tensor(0.5, dtype=torch.float16)}, {"of": "it"})


def engine_in(place: object, **changes: object) -> Engine:
    return Engine(SineModel(), config_of(voices_folder=str(place), **changes))


def store_in(folder: Path, fingerprint: str = "f") -> FileStore:
    return store_at(str(folder), "sine", fingerprint)


@pytest.fixture
def bucket() -> Iterator[str]:
    """The URL of an empty folder in a bucket."""
    files = fsspec.filesystem("memory")
    files.mkdir("/bucket")
    yield "memory://bucket/voices"
    files.rm("/bucket", recursive=True)


def names(engine: Engine) -> list[str]:
    return [facts.name for facts in engine.voices]


def file_of(folder: Path, name: str, **metadata: str) -> None:
    """A voice of the sine model, but for what `metadata` says."""
    facts = msgspec.json.encode(msgspec.structs.replace(ANNA, name=name)).decode()
    fields = {"format": FORMAT, "model": "sine", "fingerprint": SineModel.fingerprint, "facts": facts}
    fields |= {"voice": '{"pitch": "5"}'} | metadata
    (folder / f"{name}.safetensors").write_bytes(safetensors.torch.save({"a": torch.zeros(1)}, fields))


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> str:
    """Where several engines may keep their voices."""
    return str(tmp_path) if request.param == "folder" else bucket


def test_an_engine_that_looks_again_knows_what_another_did(place: str) -> None:
    one, other = engine_in(place), engine_in(place)
    one.add_voice("anna", (reference(),)).result()
    assert names(other) == []
    other.refresh_voices().result()
    assert (names(other), other.voices) == (["anna"], one.voices)

    def heard(engine: Engine) -> list[float]:
        return speak(SpeechRequest(id="a", text="Some words.", voice="anna"), engine)[0].tolist()

    assert heard(other) == heard(one)
    # The same name, another voice: what was loaded of the first must not be spoken.
    one.delete_voice("anna").result()
    one.add_voice("anna", (reference("reference"),)).result()
    other.refresh_voices().result()
    assert other.voices == one.voices
    assert heard(other) == heard(one)
    one.delete_voice("anna").result()
    with fsspec.open(f"{place}/bert.safetensors", "wb") as file:
        file.write(b"no voice")
    other.refresh_voices().result()
    assert names(other) == []


@pytest.mark.parametrize("is_in_memory", [True, False], ids=["memory", "place"])
def test_a_voice_comes_back_as_it_was(is_in_memory: bool, place: str, tmp_path: Path) -> None:
    store = store_at("" if is_in_memory else place, "sine", "f")
    assert not store.stamps()
    stamp = store.write(ANNA, SAVED)
    assert dict(store.stamps()) == {"anna": stamp}
    facts, saved = store.read("anna")
    assert (facts, dict(saved.facts)) == (ANNA, dict(SAVED.facts))
    assert saved.tensors.keys() == SAVED.tensors.keys()
    for name, tensor in SAVED.tensors.items():
        assert saved.tensors[name].dtype == tensor.dtype
        assert torch.equal(saved.tensors[name], tensor)
    store.delete("anna")
    assert not store.stamps()
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_taken_by_the_first_alone(place: str) -> None:
    one, other = store_at(place, "sine", "f"), store_at(place, "cosine", "g")
    one.write(ANNA, SAVED)
    with pytest.raises(VoiceExists, match=r"holds anna\.safetensors, of another model or registered just now"):
        other.write(ANNA, SAVED)
    assert one.read("anna")[0] == ANNA
    with pytest.raises(EngineError, match="it was made by 'sine', whose weights or dtype are not those of 'cosine'"):
        other.read("anna")
    other.delete("anna")
    other.delete("anna")
    assert not one.stamps()


def test_of_two_who_register_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, fsync, kept = threading.Barrier(2), os.fsync, list[str]()

    def wait(file: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=GUARD_S)
            together.abort()  # the second time, of the folder, nobody is waited for
        fsync(file)

    def write(model: str) -> None:
        with contextlib.suppress(VoiceExists):
            store_at(str(tmp_path), model, model).write(ANNA, SAVED)
            kept.append(model)

    monkeypatch.setattr(os, "fsync", wait)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, ("sine", "cosine")))
    assert len(kept) == 1
    assert store_at(str(tmp_path), "any", kept[0]).read("anna")[0] == ANNA
    assert [path.name for path in tmp_path.iterdir()] == ["anna.safetensors"]


def test_a_file_system_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = store_in(tmp_path)
    store.write(ANNA, SAVED)
    assert store.read("anna")[0] == ANNA
    assert [path.name for path in tmp_path.iterdir()] == ["anna.safetensors"]


def test_an_engine_has_the_voices_of_the_one_before(place: str) -> None:
    folder = f"{place}/made/for it"
    engine = engine_in(folder)
    for name in ("anna", "bert", "carl"):
        engine.add_voice(name, (reference(),), "agreed").result(0)
    engine.delete_voice("bert").result(0)
    model = SineModel()
    again = Engine(model, config_of(voices_folder=folder))
    assert again.voices == tuple(facts for facts in engine.voices if facts.name != "bert")
    assert names(again) == ["anna", "carl"]
    request = SpeechRequest(id="a", text="Some words.", voice="carl")
    np.testing.assert_array_equal(speak(request, again)[0], speak(request, engine)[0])
    assert model.encoded == 0
    with pytest.raises(UnknownVoice):
        again.submit(SpeechRequest(id="b", text="Some words.", voice="bert"))


def test_only_the_owner_can_read_a_voice(tmp_path: Path) -> None:
    engine_in(tmp_path).add_voice("anna", (reference(),))
    assert (tmp_path / "anna.safetensors").stat().st_mode & 0o077 == 0


def test_what_is_no_voice_of_this_model_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("good", "zebra"):
        file_of(tmp_path, name)
    file_of(tmp_path, "newer", format="2")
    file_of(tmp_path, "foreign", fingerprint="of another", model="cosine")
    file_of(tmp_path, "misnamed", facts=msgspec.json.encode(ANNA).decode())
    file_of(tmp_path, "factless", facts="")
    file_of(tmp_path, "unreadable", voice="[1]")
    file_of(tmp_path, "pitchless", voice="{}")
    file_of(tmp_path, "low")
    file_of(tmp_path, ".hidden")
    whole = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-2])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "noise.safetensors").write_bytes(b"\xff" * 1000)
    (tmp_path / "bare.safetensors").write_bytes(safetensors.torch.save({"a": torch.zeros(1)}))
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "README").write_text("These are voices.")
    engine = engine_in(tmp_path)
    assert names(engine) == ["good", "zebra"]
    warned = " ".join(caplog.messages)
    for path in tmp_path.iterdir():
        assert (repr(path.name) in warned) == (path.stem not in ("good", "zebra")), path.name
    assert "made by 'cosine', whose weights or dtype are not those of 'sine'" in warned
    assert "its format is '2'; it must be '1'" in warned
    assert "holds the voice 'anna', not 'misnamed'" in warned
    assert "the model has a voice of that name of its own" in warned
    # What is not ours is not ours to overwrite.
    with pytest.raises(VoiceExists, match=r"the folder of voices holds foreign\.safetensors"):
        engine.add_voice("foreign", (reference(),)).result(0)
    assert names(engine_in(tmp_path, max_registered_voices=1)) == ["good"]
    assert "file='zebra.safetensors' reason=\"name: 'zebra' is not allowed; as many" in caplog.messages[-1]


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
from test_voice_store import ANNA, SAVED, store_in
from pathlib import Path
os.link = lambda *names: os._exit(9)
store_in(Path(sys.argv[1])).write(ANNA, SAVED)
"""


def test_a_process_killed_before_the_file_has_its_name_leaves_no_voice(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])}
    script = KILLED.format(tests=str(here))
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=False, timeout=120)
    assert process.returncode == 9
    [litter] = tmp_path.iterdir()
    # It may still be being written, for all the next engine knows.
    store = store_in(tmp_path)
    assert (dict(store.stamps()), litter.exists()) == ({}, True)
    store.write(ANNA, SAVED)
    assert list(store.stamps()) == ["anna"]
    two_hours_ago = time.time() - 7200
    os.utime(litter, (two_hours_ago, two_hours_ago))
    assert list(store_in(tmp_path).stamps()) == ["anna"]
    assert not litter.exists()


@pytest.mark.parametrize("calls", [["fsync"], ["link", "replace"]])
def test_a_voice_that_cannot_be_written_is_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = engine_in(tmp_path)
    with monkeypatch.context() as patch:
        for call in calls:
            patch.setattr(os, call, is_full)
        with pytest.raises(EngineError, match="the voice 'anna' could not be kept: No space left on device"):
            engine.add_voice("anna", (reference(),)).result(0)
    assert engine.voices == ()
    assert list(tmp_path.iterdir()) == []
    engine.add_voice("anna", (reference(),)).result(0)


def test_a_voice_that_cannot_be_deleted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_in(tmp_path)
    facts = engine.add_voice("anna", (reference(),)).result(0)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(EngineError, match="the voice 'anna' could not be deleted: Operation not permitted"):
        engine.delete_voice("anna").result(0)
    assert engine.voices == (facts,)
    assert speak(SpeechRequest(id="a", text="Some words.", voice="anna"), engine)[1].reason == "stop"


def test_a_bucket_that_does_not_answer_is_asked_again(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_away(*_: object, **__: object) -> None:
        raise RuntimeError("no credentials were found")

    one, other = engine_in(bucket), engine_in(bucket)
    facts = one.add_voice("anna", (reference(),)).result(0)
    knows = engine_in(bucket)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", is_away)
        other.refresh_voices().result(0)
        assert other.voices == ()
        request = SpeechRequest(id="a", text="Some words.", voice="anna")
        with pytest.raises(EngineError, match="the voice 'anna' could not be read: RuntimeError: no credentials"):
            knows.submit(request)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "ls", is_away)
        with pytest.raises(OSError, match="RuntimeError: no credentials were found"):
            other.refresh_voices().result(0)
        assert one.voices == (facts,)
    other.refresh_voices().result(0)
    assert other.voices == (facts,)
    assert speak(request, other)[1].reason == speak(request, knows)[1].reason == "stop"


def test_a_voice_is_kept_though_the_bucket_cannot_be_listed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_away(*_: object, **__: object) -> None:
        raise PermissionError("ListBucket")

    engine = engine_in(bucket)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "ls", is_away)
        facts = engine.add_voice("anna", (reference(),)).result(0)
    for _ in range(2):
        assert engine.voices == engine_in(bucket).voices == (facts,)
        assert speak(SpeechRequest(id="a", text="Some words.", voice="anna"), engine)[1].reason == "stop"
        engine.refresh_voices().result(0)


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "another's"])
def test_a_voice_that_is_back_within_a_second_is_known(
    bucket: str, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """Of the same recording, where nothing but the time of an object tells it from the one before."""
    listed = MemoryFileSystem.ls

    def in_seconds(files: MemoryFileSystem, path: str, detail: bool = True) -> list[dict[str, object]]:
        return [{**entry, "created": "12:00:00"} for entry in listed(files, path, detail)]

    monkeypatch.setattr(MemoryFileSystem, "ls", in_seconds)
    one, other = engine_in(bucket), engine_in(bucket)
    one.add_voice("anna", (reference(),)).result(0)
    other.refresh_voices().result(0)
    (other if is_own else one).delete_voice("anna").result(0)
    if not is_own:
        other.refresh_voices().result(0)
    one.refresh_voices().result(0)
    facts = one.add_voice("anna", (reference(),)).result(0)
    other.refresh_voices().result(0)
    assert other.voices == (facts,)


def test_what_else_is_in_a_bucket_is_passed_over(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    files = fsspec.filesystem("memory")
    for path, data in (("README", b"voices"), ("cut.safetensors", b"1234567"), ("below/bert.safetensors", b"")):
        files.pipe_file(f"/bucket/voices/{path}", data)
    engine = engine_in(bucket)
    assert engine.voices == ()
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
def test_a_bucket_that_cannot_be_used_is_refused(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=f"it must be a bucket that can be used .*{words}") as refusal:
        engine_in(url)
    assert (refusal.value.field, refusal.value.value) == ("voices_folder", url)


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below"):
        with pytest.raises(ConfigError, match="it must be a folder that can be used") as refusal:
            engine_in(tmp_path / folder)
        assert refusal.value.field == "voices_folder"
