"""The command line: `sonoro say | read | serve | compile | tune | calibrate | info | voices | verify | bench`.

Invalid input gives one line on stderr and exit code 2. Only the commands that need torch import it."""

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from sonoro.cli import bench, calibrate, info, read, say, serve, tune, verify, voices
from sonoro.cli import compile as compile_
from sonoro.cli.common import FAILURE, Stopped, show
from sonoro.core.config import log_level
from sonoro.core.errors import EngineError, OutputError, SonoroError
from sonoro.core.logs import configure_logging
from sonoro.core.version import VERSION

BAD_INPUT = 2

app = typer.Typer(
    name="sonoro",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
for command in (say.say, read.read, tune.tune, calibrate.calibrate, info.info, voices.voices, verify.verify):
    app.command()(command)
app.command(help="Serve OpenAI's speech API over HTTP.")(serve.serve)
app.command("compile")(compile_.compile_command)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    try:
        code = app(args=arguments, standalone_mode=False)
        show()
    except typer.TyperException as error:
        _exit(error.format_message(), BAD_INPUT)
    except SonoroError as error:
        _exit(str(error), FAILURE if isinstance(error, EngineError) else BAD_INPUT)
    except Stopped as end:
        _exit(str(end), end.code)
    except (KeyboardInterrupt, typer.Abort):
        code = Stopped("", signal.SIGINT).code
    if code == Stopped("", signal.SIGINT).code:
        _exit("interrupted", code)
    sys.exit(code or 0)


@app.callback(invoke_without_command=True)
def sonoro(
    context: typer.Context, show_version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    """Text in, streamed speech out."""
    if show_version:
        show(f"sonoro {VERSION}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        show(context.get_help())
    configure_logging(log_level())


def _exit(message: str, code: int) -> NoReturn:
    """Print an error line on stderr and exit."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    try:
        show()
    except OutputError:
        # The interpreter would raise again when it flushes the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
