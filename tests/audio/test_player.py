"""Players: the first that can be heard plays all of it; none that cannot. Programs of the system are replaced."""

import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sonoro.audio.player import find_player
from sonoro.core.errors import OutputError

PCM = bytes(range(256)) * 40

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="scripts of sh stand for the programs")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with programs that play, besides those of the shell; no sound device."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cat", "sh", "rm", "wc"):
        (folder / name).symlink_to(
            next(Path(place, name) for place in ("/bin", "/usr/bin") if Path(place, name).exists())
        )
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    return folder


def add(programs: Path, name: str, script: str) -> None:
    path = programs / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_without_anything_there_is_no_player(programs: Path) -> None:
    assert find_player(24000) is None
    add(programs, "aplay", "echo no such device >&2; exit 1")
    add(programs, "paplay", "echo no such device >&2; cat >/dev/null")
    assert find_player(24000) is None


@pytest.mark.parametrize(("name", "head"), [("aplay", 0), ("paplay", 0), ("ffplay", 44)])
def test_a_program_that_can_be_heard_plays_all_of_it(programs: Path, name: str, head: int) -> None:
    add(programs, "aplay", "exit 1")
    add(programs, name, 'echo "$@" >> asked; cat > played')
    player = find_player(22050)
    assert player.name == name
    with player:
        for start in range(0, len(PCM), 1000):
            player.write(PCM[start : start + 1000])
    assert Path("played").read_bytes()[head:] == PCM
    if head == 0:
        assert "22050" in Path("asked").read_text()
    else:
        assert Path("played").read_bytes()[:4] == b"RIFF"


def test_a_program_of_files_plays_at_the_end(programs: Path) -> None:
    add(programs, "afplay", 'cat "$1" > played')
    with find_player(24000) as player:
        player.write(PCM[:5000])
        player.write(PCM[5000:])
        assert not Path("played").exists()
    assert Path("played").read_bytes()[44:] == PCM


def test_a_program_that_ends_is_an_error_and_a_signal_ends_it(programs: Path) -> None:
    add(programs, "aplay", "cat > /dev/null; [ ! -e broken ] || { echo gone >&2; exit 3; }")
    with pytest.raises(OutputError, match="aplay ended: gone"), find_player(24000) as player:  # noqa: PT012
        Path("broken").touch()
        player.write(PCM)
    Path("broken").unlink()
    add(programs, "aplay", "cat > /dev/null; : > ended")
    player = find_player(24000)
    Path("ended").unlink()
    with pytest.raises(KeyboardInterrupt), player:  # noqa: PT012
        player.write(PCM)
        raise KeyboardInterrupt
    assert not Path("ended").exists()


def test_the_package_for_sound_comes_first(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(programs, "aplay", "cat > /dev/null")
    done: list[object] = []
    stream = SimpleNamespace(
        active=False, start=lambda: done.append("start"), write=done.append, abort=lambda: done.append("abort"),
        stop=lambda: done.append("stop"), close=lambda: done.append("close"),
    )  # fmt: skip
    device = SimpleNamespace(RawOutputStream=lambda **_: stream)
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    with find_player(24000) as player:
        player.write(PCM)
        stream.active = True
        player.write(PCM)
    assert done == ["start", PCM, PCM, "stop", "close"]

    def none(**_: object) -> None:
        raise OSError("no device")

    device.RawOutputStream = none
    assert find_player(24000).name == "aplay"
