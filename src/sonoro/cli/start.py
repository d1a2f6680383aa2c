"""The entry of the command line. `sonoro say` is tried by a running server first.

Imports no command before it must: beside a server, the imports took most of the time of a short text."""

import sys
from typing import NoReturn

from sonoro.cli import quick
from sonoro.cli.arguments import arranged
from sonoro.cli.streams import reporting


def main() -> NoReturn:
    """Run the command line and exit."""
    with reporting():
        given = arranged(sys.argv[1:])
        if given[:1] == ["say"]:
            spoken = quick.say(given[1:])
            if isinstance(spoken, int):
                sys.exit(spoken)
            given = ["say", *spoken]
    from sonoro.cli.main import main as run

    run(given)
