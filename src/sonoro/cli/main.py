"""The command line: `sonoro say | read | serve | compile | tune | calibrate | info | voices | verify | bench`.

Invalid input gives one line on stderr and exit code 2. Only the commands that need torch import it."""

import signal
import sys
from typing import Annotated, NoReturn

import typer

from sonoro.cli import bench, calibrate, info, read, say, serve, tune, verify, voices
from sonoro.cli import compile as compile_
from sonoro.cli.arguments import EXAMPLES, arranged
from sonoro.cli.streams import BAD_INPUT, Stopped, end, reporting, show
from sonoro.core.config import log_level
from sonoro.core.logs import configure_logging
from sonoro.core.version import VERSION

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
    given = arranged(sys.argv[1:] if arguments is None else arguments)
    with reporting():
        try:
            code = app(args=given, standalone_mode=False)
            show()
        except typer.TyperException as error:
            end(error.format_message(), BAD_INPUT)
        except typer.Abort as error:
            raise KeyboardInterrupt from error
        if code == Stopped("", signal.SIGINT).code:
            raise KeyboardInterrupt
    sys.exit(code or 0)


@app.callback(invoke_without_command=True)
def sonoro(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", "-V", help="print the version")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="log what happens, as SONORO_LOG_LEVEL=INFO")
    ] = False,
) -> None:
    """Text in, streamed speech out. `sonoro WORDS` speaks them."""
    if show_version:
        show(f"sonoro {VERSION}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        show(context.get_help(), "", "Examples:", *(f"  {line}" for line in EXAMPLES.splitlines()))
    configure_logging(log_level("INFO" if verbose else "WARNING"))
