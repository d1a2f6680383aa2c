"""`sonoro say` by a running server: only by one that is the user's own and says the same; else by itself."""

import base64
import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import GUARD_S, server

from sonoro.cli import client, quick
from sonoro.core import nearby
from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineError
from sonoro.core.version import VERSION
from sonoro.server.config import ServerConfig
from sonoro.server.listening import listen_locally
from sonoro.server.local import Identity
from sonoro.transport.messages import WorkerSettings

HEAVY = "torch numpy typer rich msgspec yaml asyncio logging"
SAY = f"""
import atexit, sys
atexit.register(lambda: print("heavy:", *({{*"{HEAVY}".split()}} & sys.modules.keys()), file=sys.stderr))
from sonoro.cli.start import main
main()
"""

pytestmark = pytest.mark.skipif(not nearby.is_offered(), reason="no Unix sockets")


@pytest.fixture
def run_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's folder of sockets, and an empty working folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("r")))
    monkeypatch.chdir(tmp_path)
    folder = Path(nearby.run_folder())
    folder.mkdir(mode=0o700)
    return folder


def identity(**changed: Any) -> dict[str, Any]:
    plain = {**Identity(WorkerSettings()).shown(), "voices": ["nora"], "sample_rate": 24000}
    return {**plain, **changed}


def event(**facts: Any) -> bytes:
    return b"data: " + json.dumps(facts).encode() + b"\n\n"


PCM = bytes(range(200))
PIECE = event(type="speech.audio.delta", audio=base64.b64encode(PCM).decode(), characters=5, remarks=["it is short"])
DONE = event(type="speech.audio.done", finish_reason="stop", characters=5)


@contextlib.contextmanager
def posing(path: Path, told: dict[str, Any] | bytes, speech: bytes = PIECE + DONE) -> Iterator[list[bytes]]:
    """A server on `path` that answers with what it is told; yields what it was asked."""
    asked: list[bytes] = []
    identified = told if isinstance(told, bytes) else b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(told).encode()

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    asked.append(connection.recv(65536))
                    is_speech = asked[-1].startswith(b"POST")
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + speech if is_speech else identified)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        path.chmod(0o700)
        listening.listen()
        threading.Thread(target=answer, daemon=True).start()
        yield asked
        listening.shutdown(socket.SHUT_RDWR)


def test_what_a_server_says_is_written(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with posing(run_folder / "1.sock", identity()) as asked:
        assert quick.say(["Hi", "there.", "--voice", "Nora", "--seed=7", "-v", "-o", "a.wav"]) == 0
    assert Path("a.wav").read_bytes()[44:] == PCM
    _, _, body = asked[1].partition(b"\r\n\r\n")
    assert json.loads(body) == {"input": "Hi there.", "voice": "Nora", "seed": 7}
    out, err = capsys.readouterr()
    assert re.fullmatch(r"0\.0 s of speech in a\.wav, made in \d+\.\d s\n", out)
    assert err.startswith("warning: it is short\n")
    assert f"spoken by the server at {run_folder / '1.sock'}\n" in err


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (identity(version="0.0.9"), f"version 0.0.9, this is {VERSION}"),
        (identity(settings={"dtype": "bfloat16"}), "settings of its own: dtype=bfloat16"),
        (identity(stamp="", digest="0"), "another built-in voice"),
        (identity(voices=["edith"]), "no voice 'nora'"),
        (
            b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error": {"message": "it starts"}}',
            "503 Service Unavailable: it star",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n{", "no server of this kind"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "no server of this kind"),
        (b"SSH-2.0", "answered"),
        (b"", "answered"),
    ],
)
def test_a_server_that_would_say_something_else_is_not_asked_to(
    run_folder: Path, capsys: pytest.CaptureFixture[str], told: dict[str, Any] | bytes, reason: str
) -> None:
    arguments = ["Hi.", "--voice", "nora", "-v"]
    with posing(run_folder / "1.sock", told) as asked:
        assert quick.say(arguments) == arguments
    assert not any(one.startswith(b"POST") for one in asked)
    err = capsys.readouterr().err
    assert err.startswith("spoken in this process: ")
    assert reason in err
    assert not Path("out.wav").exists()


def test_files_of_another_installation_with_the_same_content_are_the_same_voice(run_folder: Path) -> None:
    with posing(run_folder / "1.sock", identity(stamp="elsewhere")):
        assert quick.say(["Hi."]) == 0


def test_the_first_server_that_says_the_same_speaks(run_folder: Path) -> None:
    with posing(run_folder / "1.sock", identity(version="0.0.9")), posing(run_folder / "2.sock", identity()) as asked:
        assert quick.say(["Hi."]) == 0
    assert len(asked) == 2


@pytest.mark.parametrize(
    "how",
    [
        "folder open",
        "folder link",
        "socket open",
        "socket link",
        "a file",
        "another's folder",
        "another's socket",
        "gone",
    ],
)
def test_a_socket_that_others_could_have_made_is_not_used(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    path = run_folder / "1.sock"
    with posing(path, identity()) as asked:
        if how == "folder open":
            run_folder.chmod(0o750)
        elif how == "folder link":
            run_folder.rename(run_folder.with_name("real"))
            run_folder.symlink_to("real")
        elif how == "socket open":
            path.chmod(0o722)
        elif how == "socket link":
            path.rename(run_folder / "real")
            path.symlink_to("real")
        elif how == "a file":
            path.unlink()
            path.touch(mode=0o700)
        elif how == "gone":
            path.unlink()
        else:
            lstat, another = os.lstat, run_folder if how == "another's folder" else path

            def owned(place: str) -> os.stat_result:
                facts = lstat(place)
                is_another = str(place) == str(another)
                return os.stat_result([*facts[:4], facts.st_uid + is_another, *facts[5:10]])

            monkeypatch.setattr(nearby.os, "lstat", owned)
        assert quick.say(["-v", "Hi."]) == ["-v", "Hi."]
    assert asked == []
    assert capsys.readouterr().err == "spoken in this process: no server is running\n"


def test_a_dead_server_and_a_silent_one_are_passed_over(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_folder / "1.sock"))
    (run_folder / "1.sock").chmod(0o700)
    assert quick.say(["-v", "Hi."]) == ["-v", "Hi."]
    assert "refused" in capsys.readouterr().err
    monkeypatch.setattr(client, "_IDENTITY_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(run_folder / "2.sock"))
        (run_folder / "2.sock").chmod(0o700)
        silent.listen()
        assert quick.say(["-v", "Hi."]) == ["-v", "Hi."]
    assert "timed out" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [b"", PIECE, PIECE + event(type="error", error={}), PIECE + DONE[:20]])
def test_a_server_that_breaks_off_leaves_the_text_to_the_process(
    run_folder: Path, capsysbinary: pytest.CaptureFixture[bytes], broken: bytes
) -> None:
    arguments = ["-v", "Hi.", "-o", "a.wav"]
    with posing(run_folder / "1.sock", identity(), broken):
        assert quick.say(arguments) == arguments
        assert not Path("a.wav").exists(), "the process refuses to replace a file"
        assert b"broke off" in capsysbinary.readouterr().err
        if PIECE in broken:
            with pytest.raises(EngineError, match="broke off"):
                quick.say([*arguments[:-1], "-"])


def test_a_text_from_stdin_is_kept_for_the_process(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = subprocess.Popen(["echo", "-n", "-v ?"], stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(sys, "stdin", stdin.stdout)
    with stdin, posing(run_folder / "1.sock", identity(), b""):
        assert quick.say(["--seed", "3", "-"]) == ["--seed", "3", "--", "-v ?"]


@pytest.mark.parametrize(
    "arguments",
    [["--no-server"], ["--srt", "a.srt"], ["--model", "x"], ["--seed", "x"], ["--seed"], ["-h"], ["--", "-x"], ["?!"]],
)
def test_what_is_not_for_a_server_is_left_to_the_process(run_folder: Path, arguments: list[str]) -> None:
    with posing(run_folder / "1.sock", identity()) as asked:
        assert quick.say(arguments) == arguments
    assert not any(one.startswith(b"POST") for one in asked)


def test_a_server_listens_where_only_its_user_can_connect(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(run_folder / "1.sock"))
    (run_folder / "1.sock").chmod(0o700)
    run_folder.chmod(0o700)
    with posing(run_folder / "2.sock", identity()), listen_locally(WorkerSettings(), ServerConfig()) as [sock]:
        names = {path.name for path in run_folder.iterdir()}
        assert names == {"2.sock", f"{os.getpid()}.sock"}, "what a dead server left is gone"
        assert stat.S_IMODE(os.lstat(sock.getsockname()).st_mode) == 0o700
    assert {path.name for path in run_folder.iterdir()} == {"2.sock"}
    (run_folder / "2.sock").unlink()
    run_folder.rmdir()
    with listen_locally(WorkerSettings(), ServerConfig()) as made:
        assert len(made) == 1
        assert stat.S_IMODE(run_folder.stat().st_mode) == 0o700
    for settings, config in (
        (WorkerSettings(model="qwen3-tts-0.6b-base"), ServerConfig()),
        (WorkerSettings(), ServerConfig(api_keys=("k",))),
        (WorkerSettings(), ServerConfig(admin_keys=("k",))),
    ):
        with listen_locally(settings, config) as made:
            assert made == []
    assert caplog.text == ""
    run_folder.chmod(0o755)
    with listen_locally(WorkerSettings(), ServerConfig()) as made:
        assert made == []
    assert "chmod 700" in caplog.text


def test_a_folder_with_too_long_a_name_is_said(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_folder / ("long" * 40)))
    with listen_locally(WorkerSettings(), ServerConfig()) as made:
        assert made == []
    assert "too long" in caplog.text


def test_settings_that_change_what_is_said_are_told() -> None:
    told = Identity(WorkerSettings(dtype="bfloat16", config=EngineConfig(segment_letters=100, slots=2))).shown()
    assert told["settings"] == {"dtype": "bfloat16", "segment_letters": "100"}


def say(*arguments: str, is_module: bool = False) -> "subprocess.Popen[str]":
    command = [sys.executable, *(["-m", "sonoro"] if is_module else ["-c", SAY]), "say", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_the_built_in_voice_says_the_same_by_a_server(run_folder: Path, tmp_path: Path) -> None:
    """To the bit, in float32: the server cuts its chunks by the same rule, and a row of a batch is computed alone."""
    run_folder.rmdir()
    texts = {"a": ["Good morning."], "b": ["It is <break time='1s'/> 9:30. ☃", "--voice", "hugh", "--speed", "1.25"]}
    with server(tmp_path, device="--device=auto") as (process, _, _):
        began_s = time.monotonic()
        while client.find_server()[0] is None:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < began_s + GUARD_S
            time.sleep(0.1)
        # At once: the two are a batch of the server.
        running = {name: say(*text, "-v", "-o", f"{name}.wav") for name, text in texts.items()}
        ended = {name: (*one.communicate(timeout=GUARD_S), one.returncode) for name, one in running.items()}
        for _, err, code in ended.values():
            assert code == 0, err
            assert "spoken by the server" in err
            assert err.endswith("heavy:\n"), "what takes long to import is not"
        assert "1 character cannot be spoken" in ended["b"][1]
    assert client.find_server()[0] is None
    for name, text in texts.items():
        _, err = say(*text, "-v", "-o", "alone.wav", "--force", is_module=True).communicate(timeout=GUARD_S)
        assert "spoken in this process: " in err
        assert Path("alone.wav").read_bytes() == Path(f"{name}.wav").read_bytes()
