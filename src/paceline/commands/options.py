"""Options of commands, made from the fields of settings, whose descriptions are the help texts."""

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

from paceline.core.errors import InvalidInput
from paceline.core.settings import RunSettings
from paceline.core.strategy import Strategy
from paceline.strategies import STRATEGIES

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="A field of the strategy's configuration."),
]
_SIMPLE = (bool, int, float, Path)


def with_options(
    settings: type[BaseModel],
    *,
    leave_out: Iterable[str] = (),
    required: bool = True,
    strategy: Strategy | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every field of its settings, in their order.

    The command is called with `values`, the fields that were given, and with its own keyword-only
    parameters. The field `model` becomes the argument; `options` becomes --set. Fields to
    `leave_out` get no option. The defaults in the help are those of the `strategy`, if the command
    knows only one.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        skipped = {"kind", *leave_out, *(parameter.name for parameter in own)}
        known = [strategy] if strategy else list(STRATEGIES.values())
        strategies = known if issubclass(settings, RunSettings) else []
        parameters = [
            _parameter(name, field, strategies, required)
            for name, field in settings.model_fields.items()
            if name not in skipped
        ]
        parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        names = {parameter.name for parameter in parameters} - {one.name for one in own}

        def called(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in names}
            if "options" in values:
                values["options"] = _fields_of(values["options"]) or None
            command({k: v for k, v in values.items() if v is not None}, **arguments)

        ordered = sorted(parameters, key=lambda one: one.default is not inspect.Parameter.empty)
        called.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in ordered}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return decorate


def _parameter(
    name: str, field: FieldInfo, strategies: list[Strategy], required: bool
) -> inspect.Parameter:
    """Return the parameter of a field; typer reads its annotation and its default."""
    default: Any = None
    annotation: Any
    if name == "options":
        annotation = Options
    elif name == "model":
        argument = typer.Argument(help=field.description)
        annotation = Annotated[str, argument] if required else Annotated[str | None, argument]
        default = inspect.Parameter.empty if required else None
    else:
        # The default stands in the text. For typer it is None, so that only what is given is
        # passed on: strategies have defaults of their own.
        text = f"{field.description}{_shown_default(name, field, strategies)}"
        option = typer.Option(f"--{name.replace('_', '-')}", help=text, show_default=False)
        annotation = Annotated[_option_type(field.annotation) | None, option]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def _shown_default(name: str, field: FieldInfo, strategies: list[Strategy]) -> str:
    """Return the default of a field as help shows it, and those of strategies that differ."""
    own = {one.name: one.defaults[name] for one in strategies if name in one.defaults}
    usual = field.default
    if len(strategies) == 1:  # no other can be meant
        usual, own = next(iter(own.values()), usual), {}
    if field.is_required() or usual is None or usual is False or usual in ((), {}):
        return ""
    shown = ",".join(map(str, usual)) if isinstance(usual, tuple) else str(usual)
    more = "".join(f"; {value} with {strategy}" for strategy, value in own.items())
    return f"  [default: {shown}{more}]"


def _option_type(annotation: Any) -> Any:
    """Return the type by which typer reads a field: text, where pydantic reads it itself."""
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


def _fields_of(options: list[str] | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in options or ():
        field, equals, value = option.partition("=")
        if not equals:
            raise InvalidInput(f"--set: {option!r} is not FIELD=VALUE")
        try:
            values[field] = json.loads(value)
        except ValueError:
            values[field] = value
    return values


def print_json(value: Any) -> None:
    """Print the one object of `--json`."""
    sys.stdout.write(json.dumps(value) + "\n")
