"""What is meant by the arguments of the command line: `sonoro WORDS` speaks. Quick to import."""

import os.path
import shlex

from sonoro.cli.streams import BAD_INPUT, end

COMMANDS = ("say", "read", "serve", "compile", "tune", "calibrate", "info", "voices", "verify", "bench")

EXAMPLES = """\
sonoro "Good morning."                       speaks aloud
sonoro say "Good morning." -o morning.mp3    writes a file; sonoro voices lists the voices
sonoro serve                                 OpenAI's API, and a page at http://localhost:8000/
"""

_ASKED = {"help": "--help", "version": "--version"}
"""Words alone that are options."""

_OF_ALL = ("-h", "--help", "-V", "--version")
_VERBOSE = ("-v", "--verbose")
_TARGETS = ("-o", "--out", "--format", "--play", "--no-play")


def arranged(arguments: list[str]) -> list[str]:
    """`arguments`, with `say --play` before words to speak, or options of it, that no command begins. Ends the process
    for a single word that is nearly a command, or names a file."""
    if len(arguments) == 1 and arguments[0] in _ASKED:
        return [_ASKED[arguments[0]]]
    first = next((one for one in arguments if one not in _VERBOSE), "")
    if not arguments or first in COMMANDS or arguments[0] in _OF_ALL:
        return arguments
    if len(arguments) == 1 and (near := _nearest(first)):
        end(f'there is no command {first!r}; did you mean "sonoro {near}"? To speak it: sonoro say {first}', BAD_INPUT)
    if len(arguments) == 1 and "." in first and os.path.isfile(first):
        end(f"{first!r} is a file; to speak its text: sonoro say --file {shlex.quote(first)}", BAD_INPUT)
    has_target = any(one.partition("=")[0] in _TARGETS for one in arguments)
    return ["say", *([] if has_target else ["--play"]), *arguments]


def _nearest(word: str) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(word.lower(), COMMANDS, 1, 0.75)), "")
