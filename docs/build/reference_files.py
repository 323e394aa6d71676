"""Write docs/reference-files.md from the records of files: python docs/build/reference_files.py."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator
from pydantic_core import PydanticUndefined

from paceline.core.cluster import Level
from paceline.core.facts import Fact
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Lane
from paceline.core.settings import Record, RehearseSettings, TrainSettings
from paceline.core.timeline import Origin, Span
from paceline.records.catalogue import EqualDevices
from paceline.records.profile import ProfileResult, ProfileSettings
from paceline.records.result import PlanResult, RunResult
from paceline.records.scale import ScaleResult, ScaleSettings

PAGE = Path(__file__).parents[1] / "reference-files.md"
_HEAD = """# Files

What machine files and the files of a run contain, made by `python docs/build/reference_files.py`.
Keys without a default are required in a file that you write.
Unknown keys are errors.

| file | content | written by |
|---|---|---|
| `NAME.toml` | [a machine](#machine-file) | you, or `paceline probe` |
| `run.toml` | [the settings of a run](#runtoml) | `train`, `rehearse`, `profile`, `scale` |
| `result.json` | [metrics and plans](#resultjson-of-a-run) | these, and `plan --output` |
| `trace.json` | [timelines](#tracejson) | `train`, `rehearse`, `profile` |
| `report.html` | [the report](report.md), which needs no network | each of these commands |
| `model.safetensors` | parameters and buffers by name | `train` |
| `checkpoints/` | [checkpoints](checkpoints.md#what-is-in-one) | `train` |

## Machine file

[Machines](machines.md) has examples. A machine file has the keys of [Machine](#machine).
Equal hosts below switches also need a list `levels` of [Level](#level).
Equal devices need only `name` and a table `equal` of [EqualDevices](#equaldevices).
A quantity is text with a unit, such as `"1 Gbit/s"`.
Without a unit it is a number in bytes, seconds, or values or operations per second."""
_SETTINGS = """
## run.toml

The settings of a run: `paceline train --config run.toml` repeats it.
Its keys are the options of [train](reference.md#train), [rehearse](reference.md#rehearse),
[profile](reference.md#profile) and [scale](reference.md#scale), with `_` instead of `-`.
TOML has no null: in the tables `options` and `optimizer_options` the text `"null"` means none."""
_TRACE = """
## trace.json

A Chrome trace, which [Perfetto](https://ui.perfetto.dev) opens.
Each device or link is a process of the trace, and each of its resources a thread.
A slice (`"ph": "X"`) is a task; `ts` and `dur` are its start and duration in microseconds.
`cat` is the kind of the task.
Its `args`:

| key | value |
|---|---|"""
_ARGS = {
    "origin": Origin,
    **{name: Span.__annotations__[name] for name in ("step", "part", "worker", "sub_batch")},
    "num_samples": int,
    "owner": str,
    "lane": Lane,
}
_LINKED = {
    TrainSettings: "reference.md#train",
    RehearseSettings: "reference.md#rehearse",
    ProfileSettings: "reference.md#profile",
    ScaleSettings: "reference.md#scale",
}
_PLAIN = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    Any: "any value",
    object: "any value",
}
_MACHINE = {"Machine": Machine, "Level": Level, "EqualDevices": EqualDevices}
_RESULTS = {
    "result.json of a run": RunResult,
    "result.json of a plan": PlanResult,
    "result.json of a profile": ProfileResult,
    "result.json of a scaling study": ScaleResult,
}
# `name`, `other`: what they are. Ends with the sentence, or before the next such names.
_FIELD = re.compile(r"((?:`\w+`(?:, | and )?)+): (\S.*?)(?:\.(?= [A-Z`]|$)|;(?= `\w+`[:,]))")
_COMMENT = re.compile(r"^    (\w+): .*  # (.+)$", re.M)


class Key(NamedTuple):
    """A row of a table; all but the name are Markdown."""

    name: str
    value: str
    default: str
    meaning: str

    @property
    def row(self) -> str:
        """The row."""
        return f"| `{self.name}` | {self.value} | {self.default} | {_as_in_files(self.meaning)} |"


def page() -> str:
    """Return the page: a table of keys for each record."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    seen: set[type] = set(_LINKED)
    yield _HEAD
    for title, record in _MACHINE.items():
        yield f"\n### {title}"
        yield from _record(record, seen)
    yield _SETTINGS
    for title, record in _RESULTS.items():
        yield f"\n## {title}"
        yield from _record(record, seen)
    yield _TRACE
    for name, annotation in _ARGS.items():
        yield f"| `{name}` | {_value(annotation, seen)} |"
    yield f"\nKinds of tasks: {', '.join(f'`{kind.value}`' for kind in Kind)}."


def _record(record: type, seen: set[type]) -> Iterator[str]:
    """Yield a record's docstring and table, then sections of the records in it that have none."""
    seen.add(record)
    inner: set[type] = set()
    keys = list(_keys(record, inner))
    yield f"\n{_as_in_files(_docstring(record)[0])}\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    yield from (key.row for key in keys)
    for one in sorted(inner - seen, key=lambda one: one.__name__):
        if one not in seen:
            yield f"\n### {one.__name__}"
            yield from _record(one, seen)


def _keys(record: type, inner: set[type]) -> Iterator[Key]:
    meanings = _docstring(record)[1] | dict(_COMMENT.findall(inspect.getsource(record)))
    if not issubclass(record, BaseModel):
        hints = get_type_hints(record, include_extras=True)
        for one in fields(record):  # type: ignore[arg-type]
            value = _value(hints[one.name], inner)
            yield Key(one.name, value, _default(one.default), meanings.get(one.name, ""))
        return
    for name, field in record.model_fields.items():
        value = _value(Annotated[field.annotation, *field.metadata, field], inner)
        default = _default({} if field.default_factory else field.default)
        yield Key(name, value, default, meanings.get(name) or field.description or "")


def _docstring(record: type) -> tuple[str, dict[str, str]]:
    """Return a docstring without its sentences about single fields, and those by field."""
    text = " ".join(inspect.cleandoc(record.__doc__ or "").split())
    is_base_known = record.__base__ not in (object, BaseModel, Fact, Record)
    meanings = _docstring(record.__base__)[1] if is_base_known else {}
    for match in _FIELD.finditer(text):
        for name in re.findall(r"`(\w+)`", match[1]):
            meanings[name] = match[2]
    return " ".join(_FIELD.sub("", text).split()), meanings


def _as_in_files(text: str) -> str:
    return re.sub(r"\b(None|True|False)\b", lambda word: word[0].lower(), text)


def _default(value: Any) -> str:
    if value in (PydanticUndefined, MISSING):
        return ""
    if value is None:
        return "none"
    if value in ((), {}, ""):
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _value(annotation: Any, inner: set[type]) -> str:
    """Return a type in words; records in it are added to `inner`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated and not _is_quantity(parts):
        return _value(parts[0], inner)
    if origin is Annotated:
        example = next(one.examples[0] for one in parts if getattr(one, "examples", None))
        return f"quantity, such as `{example}`"
    if origin in (Union, UnionType):
        return " or ".join(_value(one, inner) for one in parts if one is not NoneType)
    if origin is Literal or (isinstance(annotation, type) and issubclass(annotation, Enum)):
        return " or ".join(f"`{getattr(one, 'value', one)}`" for one in parts or annotation)
    if origin in (dict, Mapping):
        keys = "" if parts[0] is str else f" by {_value(parts[0], inner)}"
        return f"table of {_several(parts[1], inner)}{keys}"
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list of {_several(parts[0], inner)}"
    if origin is tuple:
        return f"list: {', '.join(_value(one, inner) for one in parts)}"
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if annotation in _LINKED:
        return f"[settings]({_LINKED[annotation]})"
    inner.add(annotation)
    return f"[{annotation.__name__}](#{annotation.__name__.lower()})"


def _is_quantity(parts: tuple[Any, ...]) -> bool:
    return parts[0] is float and any(isinstance(one, BeforeValidator) for one in parts)


def _several(annotation: Any, inner: set[type]) -> str:
    value = _value(annotation, inner)
    return f"{value}s" if value in ("integer", "number") else value


if __name__ == "__main__":
    PAGE.write_text(page())
