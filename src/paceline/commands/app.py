"""Define the typer application with all commands, and print errors.

A command's module is imported only when the command is called, so that `paceline --help` is
instant. --debug and --help-all are accepted anywhere and removed before parsing.
"""

import os
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from paceline.core.error_lines import DEBUG, TYPED, error_line
from paceline.core.errors import InvalidInput, PacelineError, WorkersFailed
from paceline.links.failpoints import reach
from paceline.links.signals import Stopped, participle

if TYPE_CHECKING:
    from typer.core import TyperCommand

reach("command.importing")
_INTERRUPTED = 130  # typer's exit code after a KeyboardInterrupt
_TRAIN, _MEASURE, _MACHINES = "Plan and train", "Measure and compare", "Several machines"


class Command(NamedTuple):
    """A command, as `paceline --help` lists it.

    `module`: module of this package that defines a function with the command's name. `panel`:
    heading in the list. `example`: arguments of `paceline` that the command's help shows.
    """

    module: str
    panel: str
    help: str
    example: str


COMMANDS = {
    "plan": Command(
        *("running", _TRAIN, "Predict the step time of each strategy, best first."),
        "plan alexnet --machine k40-gigabit --batch-size 256",
    ),
    "train": Command(
        *("running", _TRAIN, "Profile, plan and train a model, and write its result and report."),
        "train gpt --strategy auto --workers 2 --steps 500",
    ),
    "rehearse": Command(
        *("running", _TRAIN, "Rehearse training on emulated devices."),
        "rehearse alexnet --device p100 --strategy host --workers 2",
    ),
    "profile": Command(
        *("studying", _MEASURE, "Measure the time and memory of a step, layer by layer."),
        "profile gpt --workers 2 --batch-size 32",
    ),
    "scale": Command(
        *("studying", _MEASURE, "Compare strategies, numbers of workers and batches."),
        "scale lenet5 --workers 1,2 --batch-size 32,64 --strategy allreduce,host",
    ),
    "compare": Command(
        *("studying", _MEASURE, "Compare two runs, or a run with its prediction."),
        "compare runs/FIRST runs/SECOND",
    ),
    "report": Command(*("studying", _MEASURE, "Rewrite a run's report.html."), "report runs/FIRST"),
    "probe": Command(
        *("studying", _MEASURE, "Measure this machine and write a machine file."),
        "probe --output mine.toml",
    ),
    "env": Command(
        *("studying", _MEASURE, "Describe this machine for a bug report, with causes of slowness."),
        "env --json",
    ),
    "hub": Command(
        *("remote", _MACHINES, "Serve workers on other machines."),
        "hub lenet5 --listen tcp://10.0.0.1:5555 --keys keys --workers 2",
    ),
    "worker": Command(
        *("remote", _MACHINES, "Run workers for a hub on one device."),
        "worker --connect tcp://10.0.0.1:5555 --keys keys",
    ),
    "keys": Command(
        *("remote", _MACHINES, "Write new keys for a hub and its workers."), "keys keys"
    ),
}


class _Commands(TyperGroup):
    """Imports only the module of the called command, to load its arguments and options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in COMMANDS:
            self.commands[name] = loaded(name)
        return super().resolve_command(ctx, args)


def loaded(name: str) -> "TyperCommand":
    """Import a command's module, and return the command with its arguments and options."""
    known = COMMANDS[name]
    function = getattr(import_module(f"paceline.commands.{known.module}"), name)
    alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
    epilog = f"Example: paceline {known.example}"
    alone.command(name, epilog=epilog)(function)
    found: TyperCommand = typer.main.get_command(alone)  # type: ignore[assignment]
    if "--help-all" in sys.argv:
        for parameter in found.params:
            parameter.hidden = False  # type: ignore[attr-defined]
    elif any(getattr(parameter, "hidden", False) for parameter in found.params):
        found.epilog = f"{epilog}\n\nAll options: paceline {name} --help-all"
    return found


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="Example: paceline plan alexnet --machine k40-gigabit",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from paceline import __version__

        typer.echo(__version__)
        raise typer.Exit


_VERSION = typer.Option(
    "--version", callback=_show_version, is_eager=True, metavar="", help="Print the version."
)
_TRACEBACK = "Print the traceback of an error (after any command)."


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, _VERSION] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help=_TRACEBACK)] = False,
) -> None:
    """Train PyTorch models in parallel on uneven hardware, and predict the gain beforehand."""
    if context.invoked_subcommand is None:
        context.command.format_help(context, context.make_formatter())


def _unloaded() -> None:
    raise AssertionError("a command was called without being loaded")


for _name, _command in COMMANDS.items():
    app.command(_name, help=_command.help, rich_help_panel=_command.panel)(_unloaded)


def run() -> int:
    """Run the command line, print any error, and return the exit code.

    The code is 0 if the work was done, 2 for bad input, and another number for other failures.
    """
    words = ["--help" if one == "--help-all" else one for one in sys.argv[1:]]
    if "--debug" in words:
        words.remove("--debug")
        os.environ[DEBUG] = "1"  # the worker processes inherit this and print tracebacks, too
    os.environ[TYPED] = " ".join(one.partition("=")[0] for one in words if one.startswith("--"))
    try:
        code = app(words, standalone_mode=False, prog_name="paceline") or 0
        return _fail("interrupted", code) if code == _INTERRUPTED else code
    except Stopped as stopped:
        return _fail(f"{participle(stopped.number)}{stopped.why}", 128 + stopped.number)
    except TyperException as error:
        command = " ".join(["paceline", *(one for one in words[:1] if one in COMMANDS)])
        return _fail(f"{error.format_message()} (see {command} --help)", 2)
    except WorkersFailed as error:
        return error.exit_code if error.is_said else _fail(str(error), error.exit_code)
    except PacelineError as error:
        return _fail(error_line(error), 2 if isinstance(error, InvalidInput) else 1)
    except Exception as error:
        return _fail(error_line(error), 1)


def _fail(message: str, code: int) -> int:
    if DEBUG in os.environ:
        traceback.print_exc()
    sys.stderr.write(f"paceline: {message}\n")
    return code
