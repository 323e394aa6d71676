"""Make a command's options from the fields of its settings, a pydantic model.

The description of a field becomes the help of the field's option.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import from_json
from rich.markup import escape

from paceline.core.error_lines import flag_of
from paceline.core.errors import InvalidInput
from paceline.core.reading import check_numbers
from paceline.core.settings import RunSettings
from paceline.core.strategy import Strategy
from paceline.records.config_file import merged, read_config
from paceline.strategies import STRATEGIES


def option(metavar: str, text: str, *names: str) -> Any:
    """Declare a command's option with the help `text`; `metavar` must be "" for a flag."""
    return typer.Option(*names, metavar=metavar, help=text)


Json = Annotated[
    bool,
    typer.Option("--json", metavar="", help="Print one JSON object.", rich_help_panel="Output"),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="RUN.TOML",
        help="File of settings, such as a run's run.toml. Other options replace its values.",
        hidden=True,
    ),
]
# Settings that are dicts. Each use of their option on the command line sets one FIELD=VALUE.
_TABLES = ("options", "optimizer_options")
# Settings that have no option of their own; --strategy-option NAME=VALUE sets them.
_RARE = ("lighthouse", "worker_ids", "exchange_alone")
# Panels of the help, in their order; options without a panel come first.
_PANELS = {
    "Model and data": ("data", "batch_size", "input_shape", "samples", "seed"),
    "Strategy": (
        *("strategy", "options", "workers", "codec", "balance", "keep_all", "scaling", "elastic"),
        "overhead",
    ),
    "Optimization": (
        *("epochs", "steps", "optimizer", "optimizer_options", "learning_rate", "momentum"),
        *("schedule", "warmup_steps", "precision", "accumulate", "clip_norm", "evaluate_every"),
    ),
    "Checkpoints": ("checkpoint_every", "keep_checkpoints", "resume", "max_restarts"),
    "Timeouts and ports": ("profile_s", "deadline_s", "wait_s", "listen", "keys", "run_name"),
    "Emulated device": ("device", "slowdown", "forward_ms", "backward_ms", "update_ms"),
    "Output": ("output", "tensorboard"),
}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names}
# Settings that --help shows; --help-all shows all settings.
_FIRST = frozenset(
    (
        *("data", "batch_size", "strategy", "options", "workers", "epochs", "steps", "optimizer"),
        *("learning_rate", "resume", "output", "machine", "measured", "device"),
        *("slowdown", "listen", "keys", "kinds", "repeats", "largest_batch"),
        *("input_shape", "connect", "codec"),
    )
)
_METAVARS = {
    "data": "DATA",
    "input_shape": "SHAPE",
    "strategy": f"[{'|'.join(list(STRATEGIES)[:2])}|…]",
    "workers": "INT|LIST",
    "machine": "FILE|NAME",
    "device": "DEVICE",
    "listen": "URL",
    "connect": "URL",
    "options": "FIELD=VALUE",
    "optimizer_options": "FIELD=VALUE",
    "slowdown": "FLOAT,…",
    "codec": "CODEC",
    "kinds": "[measured|rehearsed|predicted],…",
    "scaling": "[strong|strong-per-worker|weak],…",
    "checkpoint_every": "STEPS|TIME|never",
    "measured": "RATE",
    "largest_batch": "auto|BYTES",
}
_SUFFIXES = {"_s": "SECONDS", "_ms": "MS"}
_TYPES = {bool: "", int: "INT", float: "FLOAT", Path: "PATH", str: "NAME"}


def with_options(
    settings: type[BaseModel],
    *,
    leave_out: Iterable[str] = (),
    required: bool = True,
    strategy: Strategy | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for every field of `settings`.

    The command is called with a dict of the fields that the user set by options or the --config
    file. The field `model` becomes an argument. If `required`, the user must give MODEL or
    --resume. The fields in `_TABLES` become repeatable options. The fields in `_RARE` and
    `leave_out` have no option; --strategy-option NAME=VALUE sets them. If `strategy` is given, the
    command supports only this strategy, whose defaults the help shows. The command's keyword-only
    parameters become options, too.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        without_option = {*_RARE, *leave_out} & settings.model_fields.keys()
        skipped = {"kind", *without_option, *(parameter.name for parameter in own)}
        known = [strategy] if strategy else list(STRATEGIES.values())
        strategies = known if issubclass(settings, RunSettings) else []
        parameters = [
            _parameter(name, settings.model_fields[name], strategies, sorted(without_option))
            for name in _by_panel(settings)
            if name not in skipped
        ]
        names = {parameter.name for parameter in parameters}

        def called(config: Path | None, **arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in names}
            for name in values.keys() & _TABLES:
                table = fields_of(values[name], name)
                values |= {key: table.pop(key) for key in table.keys() & without_option}
                values[name] = table or None
            values = {name: value for name, value in values.items() if value is not None}
            if config is not None:
                values = merged(values, read_config(config, settings))
            # MODEL is not needed with --resume, which reads the model from the run's settings.
            if required and "model" in names and not {"model", "resume"} & values.keys():
                raise typer.TyperException("Missing argument 'model'.")
            command(values, **arguments)

        kind = inspect.Parameter.KEYWORD_ONLY
        config_file = inspect.Parameter("config", kind, annotation=Config, default=None)
        declared = [*parameters, *own, config_file]
        # Typer reads these attributes.
        called.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in declared}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return decorate


def _by_panel(settings: type[BaseModel]) -> list[str]:
    """Return the fields' names: the model, fields without a help panel, then panel by panel."""
    order = ["model", None, *_PANELS]
    return sorted(
        settings.model_fields,
        key=lambda name: order.index(name if name == "model" else _PANEL_OF.get(name)),
    )


def _parameter(
    name: str, field: FieldInfo, strategies: list[Strategy], without_option: list[str]
) -> inspect.Parameter:
    """Return the typer parameter (an argument or option) for a field of the settings.

    `strategies`: those whose defaults the help shows. `without_option`: settings that the help of
    --strategy-option lists, because they have no option of their own.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    if name == "model":
        argument = typer.Argument(help=escape(field.description or ""), metavar="MODEL")
        annotation: Any = Annotated[str | None, argument]
        return inspect.Parameter(name, kind, annotation=annotation, default=None)
    option_type = list[str] if name in _TABLES else bool if field.annotation is bool else str
    choices = (*STRATEGIES, "auto") if name == "strategy" else _choices(field.annotation)

    def completed(incomplete: str) -> list[str]:
        return [one for one in choices if one.startswith(incomplete)]

    # Typer's default is None, which marks an option that the user did not give. Its real default
    # may depend on the strategy. Pydantic parses given values.
    text = f"{field.description}{_shown_default(name, field, strategies)}"
    if name == "options" and without_option:
        names = ", ".join(without_option) if len(without_option) < 9 else "other keys of run.toml"
        text += f" Also sets {names}."
    option = typer.Option(
        flag_of(name),
        metavar=_metavar(name, field),
        help=escape(text),
        show_default=False,
        hidden=name not in _FIRST,
        rich_help_panel=_PANEL_OF.get(name, "Options"),
        autocompletion=completed if choices else None,
    )
    annotation = Annotated[option_type | None, option]
    return inspect.Parameter(name, kind, annotation=annotation, default=None)


def _metavar(name: str, field: FieldInfo) -> str:
    """Return the placeholder of an option's value in the help: its choices, unit or type."""
    if name in _METAVARS:
        return _METAVARS[name]
    if choices := _choices(field.annotation):
        return f"[{'|'.join(choices)}]"
    units = (unit for suffix, unit in _SUFFIXES.items() if name.endswith(suffix))
    types = (text for kind, text in _TYPES.items() if _is_of(kind, field.annotation))
    return next(units, next(types))


def _shown_default(name: str, field: FieldInfo, strategies: list[Strategy]) -> str:
    """Format a field's default for the help, followed by strategies' own defaults, if any."""
    named = {one.name: one.options.defaults for one in strategies}
    own = {of: defaults[name] for of, defaults in named.items() if name in defaults}
    usual = field.default
    if len(strategies) == 1:  # the command supports only one strategy
        usual, own = next(iter(own.values()), usual), {}
    more = [f"{value} with {strategy}" for strategy, value in own.items()]
    if not (field.is_required() or usual is None or usual is False or usual in ((), {})):
        more.insert(0, ",".join(map(str, usual)) if isinstance(usual, tuple) else str(usual))
    return f"  [default: {'; '.join(more)}]" if more else ""


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the values of a Literal type, alone or in a union with None; () for other types."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next(filter(None, map(_choices, get_args(annotation))), ())


def _is_of(kind: type, annotation: Any) -> bool:
    """Return whether the type `annotation` is `kind`, or a union that contains `kind`."""
    return annotation is kind or any(_is_of(kind, one) for one in get_args(annotation))


def fields_of(options: list[str] | None, name: str) -> dict[str, Any]:
    """Parse FIELD=VALUE options into a dict; a VALUE that is not JSON becomes a str.

    `name`: the setting that the options belong to, for errors.
    """
    values: dict[str, Any] = {}
    for option in options or ():
        field, equals, value = option.partition("=")
        if not equals:
            raise InvalidInput(name, "must be FIELD=VALUE", got=option)
        try:
            found = from_json(value.encode(errors="surrogateescape"))
        except ValueError:  # not JSON: keep the text
            values[field] = value
            continue
        check_numbers(found, f"{name}.{field}")
        values[field] = found
    return values


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, for the option --json."""
    sys.stdout.write(json.dumps(value) + "\n")
