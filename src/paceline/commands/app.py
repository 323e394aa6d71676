"""The commands as one application of typer, and what errors say and return."""

import sys
import traceback
from typing import Annotated

import typer
from typer.exceptions import TyperException

from paceline import __version__
from paceline.commands.remote import hub, worker
from paceline.commands.running import plan, rehearse, train
from paceline.commands.studying import compare, papers, probe, profile, report, scale
from paceline.core.errors import InvalidInput, PacelineError, WorkersFailed
from paceline.links.signals import Stopped, participle

_INTERRUPTED = 130  # what typer returns after a KeyboardInterrupt

app = typer.Typer(
    help="Train PyTorch models in parallel on uneven hardware, and predict the gain beforehand.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models in parallel on uneven hardware, and predict the gain beforehand."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


COMMANDS = (train, rehearse, plan, compare, report, profile, scale, papers, probe, hub, worker)
for command in COMMANDS:
    app.command()(command)


def run() -> int:
    """Run the command line and return the exit code: 0 if the work was done, 2 for bad input."""
    try:
        code = app(standalone_mode=False) or 0
        return _fail("interrupted", code) if code == _INTERRUPTED else code
    except Stopped as stopped:
        return _fail(f"{participle(stopped.number)}{stopped.why}", 128 + stopped.number)
    except TyperException as error:
        return _fail(f"{error.format_message()} (see paceline --help)", 2)
    except WorkersFailed as error:
        return error.exit_code if error.is_said else _fail(str(error), error.exit_code)
    except PacelineError as error:
        return _fail(str(error), 2 if isinstance(error, InvalidInput) else 1)
    except Exception as error:
        return _fail(f"internal error: {error!r} (--debug shows where)", 1)


def _fail(message: str, code: int) -> int:
    if "--debug" in sys.argv:
        traceback.print_exc()
    sys.stderr.write(f"paceline: {message}\n")
    return code
