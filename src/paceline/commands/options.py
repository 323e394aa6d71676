"""Make a command's options from the fields of its settings; descriptions become help texts."""

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import from_json

from paceline.core.errors import InvalidInput
from paceline.core.reading import check_numbers
from paceline.core.settings import RunSettings
from paceline.core.strategy import Strategy
from paceline.records.config_file import merged, read_config
from paceline.strategies import STRATEGIES

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel="Output")
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel="Output"),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="RUN.TOML",
        help="A file with these settings, as in each run's folder; options replace its values.",
    ),
]
# Repeatable options FIELD=VALUE, by the setting that they fill.
_TABLES = {
    "options": ("--set", "A field of the strategy's configuration."),
    "optimizer_options": ("--optimizer-set", "A field of the optimizer, as weight_decay=0.1."),
}
_SIMPLE = (bool, int, float, Path)
# Panels of the help; options that are in none of them come first.
_PANELS = {
    "Model and data": ("data", "input_shape", "samples", "classes", "seed"),
    "Workers": (
        *("strategy", "options", "workers", "batch_size", "accumulate", "balance", "force"),
        "scaling",
    ),
    "Learning": (
        *("epochs", "optimizer", "optimizer_options", "learning_rate", "momentum", "schedule"),
        *("warmup_steps", "precision", "clip_norm", "evaluate_every"),
    ),
    "Pace of a rehearsal": (
        *("device", "stretch", "forward_ms", "backward_ms", "update_ms", "chunk_search"),
        *("search_step", "search_range", "interval"),
    ),
    "Going on": ("checkpoint_every", "keep", "resume", "restarts"),
    "Times and connections": ("profile_s", "deadline_s", "wait_s", "port", "bind", "keys", "run"),
    "Output": ("output", "tensorboard"),
}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names}
_OF_SOME = "Only with strategy {}"
_FEW = 2  # strategies named in a panel


def with_options(
    settings: type[BaseModel],
    *,
    leave_out: Iterable[str] = (),
    required: bool = True,
    strategy: Strategy | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with an option for every field of its settings.

    The command is called with `values`, the fields given as options or in the --config file, and
    with its own keyword-only parameters. The field `model` becomes the argument; tables become
    repeatable options such as --set. Fields in `leave_out` get no option. `strategy` provides the
    defaults in the help, if the command has only one strategy.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        skipped = {"kind", *leave_out, *(parameter.name for parameter in own)}
        known = [strategy] if strategy else list(STRATEGIES.values())
        strategies = known if issubclass(settings, RunSettings) else []
        parameters = [
            _parameter(name, field, strategies)
            for name, field in settings.model_fields.items()
            if name not in skipped
        ]
        names = {parameter.name for parameter in parameters}
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("config", kind, annotation=Config, default=None))
        parameters += [one.replace(kind=kind) for one in own]

        def called(config: Path | None, **arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in names}
            for name in values.keys() & _TABLES:
                values[name] = fields_of(values[name], _TABLES[name][0]) or None
            values = {name: value for name, value in values.items() if value is not None}
            if config is not None:
                values = merged(values, read_config(config, settings))
            # a resumed run has the model in its settings
            if required and "model" in names and not {"model", "resume"} & values.keys():
                raise typer.TyperException("Missing argument 'model'.")
            command(values, **arguments)

        ordered = sorted(parameters, key=lambda one: one.default is not inspect.Parameter.empty)
        called.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in ordered}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return decorate


def _parameter(name: str, field: FieldInfo, strategies: list[Strategy]) -> inspect.Parameter:
    """Return typer's parameter for a field."""
    annotation: Any
    if name in _TABLES:
        flag, text = _TABLES[name]
        annotation = Annotated[
            list[str] | None,
            typer.Option(
                flag, metavar="FIELD=VALUE", help=text, rich_help_panel=_panel(name, strategies)
            ),
        ]
    elif name == "model":
        annotation = Annotated[str | None, typer.Argument(help=_plain(field.description))]
    else:
        # Help shows the default, but typer gets None, so that only given options are passed on:
        # strategies have their own defaults.
        text = f"{field.description}{_shown_default(name, field, strategies)}"
        option = typer.Option(
            f"--{name.replace('_', '-')}",
            help=_plain(text),
            show_default=False,
            rich_help_panel=_panel(name, strategies),
            autocompletion=_strategy_names if name == "strategy" else None,
        )
        annotation = Annotated[_option_type(field.annotation) | None, option]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=None)


def _panel(name: str, strategies: list[Strategy]) -> str:
    """Return the help panel of an option."""
    knowing = [one.name for one in strategies if name in one.options.settings]
    if len(strategies) > 1 and knowing and len(knowing) <= _FEW:
        return _OF_SOME.format(" or ".join(knowing))
    return _PANEL_OF.get(name, "Options")


def _plain(text: str | None) -> str:
    """Escape rich markup."""
    return (text or "").replace("[", "\\[")


def _strategy_names(incomplete: str) -> list[str]:
    return [name for name in (*STRATEGIES, "auto") if name.startswith(incomplete)]


def _shown_default(name: str, field: FieldInfo, strategies: list[Strategy]) -> str:
    """Format the default of a field, and the differing defaults of strategies."""
    named = {one.name: one.options.defaults for one in strategies}
    own = {of: defaults[name] for of, defaults in named.items() if name in defaults}
    usual = field.default
    if len(strategies) == 1:  # the command has only this strategy
        usual, own = next(iter(own.values()), usual), {}
    more = [f"{value} with {strategy}" for strategy, value in own.items()]
    if not (field.is_required() or usual is None or usual is False or usual in ((), {})):
        more.insert(0, ",".join(map(str, usual)) if isinstance(usual, tuple) else str(usual))
    return f"  [default: {'; '.join(more)}]" if more else ""


def _option_type(annotation: Any) -> Any:
    """Return typer's type for a field: str if pydantic parses the value."""
    if get_origin(annotation) is Annotated:
        if any(isinstance(one, BeforeValidator) for one in annotation.__metadata__):
            return str
        return _option_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = {_option_type(one) for one in get_args(annotation) if one is not type(None)}
        return kinds.pop() if len(kinds) == 1 else str
    if get_origin(annotation) is Literal:
        return str
    return annotation if annotation in _SIMPLE else str


def fields_of(options: list[str] | None, flag: str) -> dict[str, Any]:
    """Parse FIELD=VALUE pairs; a value that is not JSON is text."""
    values: dict[str, Any] = {}
    for option in options or ():
        field, equals, value = option.partition("=")
        if not equals:
            raise InvalidInput(flag, f"{option!r} is not FIELD=VALUE")
        try:
            found = from_json(value.encode(errors="surrogateescape"))
        except ValueError:  # a text
            values[field] = value
            continue
        check_numbers(found, f"{flag}: {field}")
        values[field] = found
    return values


def print_json(value: Any) -> None:
    """Print the JSON object of `--json`."""
    sys.stdout.write(json.dumps(value) + "\n")
