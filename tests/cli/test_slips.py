"""What a newcomer gets wrong: each slip is answered in one line that says what to do."""

import re
import socket
from pathlib import Path

import pytest
from processes import Run, sonoro

from sonoro.api import TTS
from sonoro.core.errors import SonoroError

__all__ = ["sonoro"]

SLIPS = {
    "say": "give one, as in sonoro say",
    "read": "give one, as in sonoro read",
    "say ''": 'give at least one that is not white space, as in "Good morning."',
    "say '?!'": "it must hold at least one letter or digit",
    "serv": "sonoro serve",
    "Voices": "sonoro voices",
    "bench serv": "Did you mean 'serve'",
    "say Hi --voise nora": "--voice",
    "say Hi --voice bob": "known voices: nora, miles, edith, hugh",
    "say Hi -o out": "use .wav, .flac, .mp3",
    "say Hi -o hi.m4a": "or give a format",
    "say Hi -o hi.wav --format mp3": "--format: 'mp3' is not what 'hi.wav' is named after, wav",
    "say Hi -o none/hi.wav": "there is no folder 'none'",
    "say Hi -o old.wav": "--force replaces it",
    "say Hi -o": "requires an argument",
    "say Hi -o a.wav --play": "leave out --play or --out",
    "say Hi --speed 5": "from 0.25 to 4",
    "say Hi --speed fast": "it must be a number",
    "say Hi --seed abc": "it must be a whole number",
    "say Hi --model ./none": "known models: builtin; on the hub: ",
    "say Hi --model qwen3-tts-1.7b-customvoise": "did you mean qwen3-tts-1.7b-customvoice?",
    "say Hi --model notes.txt": "a checkpoint is a folder with config.json in it",
    "say Hi --ref-audio old.wav": "cannot clone voices; name one of its own",
    "say Hi --instructions sadly": "leave them out",
    "say Hi --language german": "known languages: auto, english",
    "say --file none.txt": "it must be a readable file",
    "say Hi --file notes.txt": "leave one of them out",
    "say 'Привет, как дела?'": "this voice reads English, in Latin letters",
    "say Hi --device cuda": "auto takes what is there",
    "say Hi --lexicon none.txt": "it must be a readable file",
    "serve --port 80000": "at most 65535",
}
"""Commands, and what the answer must say."""


@pytest.mark.parametrize("command", SLIPS)
def test_a_slip_at_the_command_line_is_answered_with_what_to_do(sonoro: Run, command: str) -> None:
    Path("old.wav").write_bytes(b"no audio")
    Path("notes.txt").write_text("Hi.")
    arguments = [quoted or plain for quoted, plain in re.findall(r"'([^']*)'|(\S+)", command)]
    code, out, err = sonoro(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert SLIPS[command] in err
    assert "''" not in err
    assert "None" not in err
    assert "'given'" not in err


def test_a_port_that_is_taken_is_answered_with_another(sonoro: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "try another, or 0" in sonoro("serve", "--port", str(taken.getsockname()[1]))[2]


def test_slips_in_python_are_answered_with_what_to_do() -> None:
    with TTS() as tts:
        for slip, wanted in (
            (tts.generate, "give a text to speak"),
            (lambda: tts.generate("Hi", voice="bob"), "known voices: "),
            (lambda: tts.generate("Hi", sped=2), "did you mean speed?"),
            (lambda: tts.generate("Hi", speed=9), "from 0.25 to 4"),
            (lambda: tts.generate("Hi", ref_audio="me.wav"), "cannot clone voices; name one of its own"),
        ):
            with pytest.raises(SonoroError, match=re.escape(wanted)):
                slip()
