"""What is meant by words at the command line, and where speech goes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Run, sonoro
from sine_models import ErringModel
from typer.main import get_command

from sonoro.audio import player
from sonoro.cli import say as cli_say
from sonoro.cli import speaking
from sonoro.cli.arguments import COMMANDS, arranged
from sonoro.cli.main import app
from sonoro.models.base import LoadedModel

__all__ = ["sonoro"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("", ""),
        ("-h", "-h"),
        ("-V", "-V"),
        ("say Hi", "say Hi"),
        ("-v serve --port 0", "-v serve --port 0"),
        ("Hello", "say --play Hello"),
        ("Hello there -v", "say --play Hello there -v"),
        ("-v Hello", "say --play -v Hello"),
        ("Hello -o a.wav", "say Hello -o a.wav"),
        ("Hello --out=a.wav", "say Hello --out=a.wav"),
        ("--voice edith Hello", "say --play --voice edith Hello"),
        ("voice over", "say --play voice over"),
        ("help", "--help"),
        ("version", "--version"),
    ],
)
def test_words_that_no_command_begins_are_spoken(given: str, meant: str) -> None:
    assert arranged(given.split()) == meant.split()
    assert arranged(meant.split()) == meant.split()


def test_a_file_is_not_spoken_by_its_name(sonoro: Run) -> None:
    Path("a chapter.txt").write_text("Once.")
    code, out, err = sonoro("a chapter.txt")
    assert (code, out) == (2, "")
    assert "sonoro say --file 'a chapter.txt'" in err


def test_every_command_is_known_by_name() -> None:
    assert set(get_command(app).commands) == set(COMMANDS)


class Heard:
    """A player that remembers."""

    name = "fake"

    def __init__(self) -> None:
        self.pcm = bytearray()
        self.write = self.pcm.extend

    def __enter__(self) -> "Heard":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("can_play", "is_terminal"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("arguments", "plays"),
    [
        ("say Hi", None),
        ("Hi", True),
        ("say Hi --play", True),
        ("say Hi --no-play", False),
        ("say Hi -o a.wav", False),
        ("say Hi --format wav", False),
    ],
)
def test_speech_is_played_on_a_terminal_or_where_it_is_asked_for(  # noqa: PLR0917
    sonoro: Run, monkeypatch: pytest.MonkeyPatch, arguments: str, plays: bool | None, can_play: bool, is_terminal: bool
) -> None:
    heard = Heard()
    monkeypatch.setattr(player, "find_player", lambda rate: heard if can_play else None)
    monkeypatch.setattr(speaking, "is_terminal", lambda stream: is_terminal and stream is sys.stdout)
    model: Any = ErringModel("unreached")
    monkeypatch.setattr(cli_say, "_load", lambda *_: LoadedModel(model, torch.device("cpu"), torch.float32, {}))
    code, out, _ = sonoro(*arguments.split())
    assert code == 0
    is_wanted = is_terminal if plays is None else plays
    assert bool(heard.pcm) == (is_wanted and can_play)
    written = [path.name for path in Path().iterdir()]
    if heard.pcm:
        assert out.endswith("played by fake\n")
        assert written == []
    else:
        assert written == ["a.wav" if "a.wav" in arguments else "out.wav"]
        assert f"in {written[0]}, made in" in out
        assert ("nothing was found that can play it" in out) == is_wanted
