"""Read the settings in a file for `--config`, and write run.toml into the folder of every run.

The file's fields are the settings of the command. TOML has no null, so the tables `options` and
`optimizer_options` contain the text "null" instead; on the command line this is
`--strategy-option FIELD=null`.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.core.errors import InvalidInput
from paceline.core.names import did_you_mean
from paceline.core.reading import first_fault
from paceline.core.settings import Record, RunSettings
from paceline.links.files import limits, read_file, read_toml_file, write_text
from paceline.records.settings import useful_settings

FILE_NAME = "run.toml"
_NULL = "null"
# A setting of a file (key) is dropped if the user gives the other setting (value).
_REPLACES = {"epochs": "steps", "steps": "epochs", "device": "slowdown", "slowdown": "device"}


def read_config(path: Path, kind: type[BaseModel]) -> dict[str, Any]:
    """Read and validate settings of class `kind`; InvalidInput names the file and key or line."""
    found = read_toml_file(path, limits.CONFIGURATION, largest=sys.float_info.max)
    known = {name: field for name, field in kind.model_fields.items() if name != "kind"}
    values = {}
    for name, value in found.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise InvalidInput(str(path), f"{name!r} is not a setting", hint=hint)
        values[name] = _with_null(value) if isinstance(value, dict) else value
        annotation: Any = known[name].annotation
        try:
            TypeAdapter(Annotated[annotation, known[name]]).validate_python(values[name])
        except ValidationError as error:
            raise InvalidInput(str(path), first_fault(error, name)) from None
    return values


def merged(given: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings: `given` takes precedence over `below`, also within tables.

    A `codec` in `given` also removes options from `below`: "half" removes the option `codec`, and
    "gradients=half" the option `gradients`. `epochs` replaces `steps` and vice versa, `device`
    replaces `slowdown` and vice versa.
    """
    below = {name: value for name, value in below.items() if _REPLACES.get(name) not in given}
    if isinstance(below.get("options"), dict):
        parts = str(given["codec"]).split(",") if "codec" in given else []
        shorthands = {part.partition("=")[0].strip() if "=" in part else "codec" for part in parts}
        kept = {key: one for key, one in below["options"].items() if key not in shorthands}
        below["options"] = kept
    tables = {
        name: {**below[name], **value}
        for name, value in given.items()
        if isinstance(value, dict) and isinstance(below.get(name), dict)
    }
    return {**below, **given, **tables}


def with_resumed(values: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Add to `values` the other settings of the run in folder `values["resume"]`, if any.

    Raises InvalidInput if the folder contains no run.
    """
    folder = values.get("resume")
    if folder is None:
        return dict(values)
    path = Path(str(folder)) / FILE_NAME
    if not path.is_file():
        raise InvalidInput("resume", f"must be a folder with a {FILE_NAME}", got=str(folder))
    before = read_config(path, kind)
    if "strategy" in values and values["strategy"] != before.get("strategy"):
        before.pop("options", None)  # these belong to the former strategy
    return merged(values, before)


@contextmanager
def written_config(folder: Path, settings: Record) -> Iterator[None]:
    """Write run.toml; restore the previous file if the `with` block raises InvalidInput.

    Raises InvalidInput if the file cannot be written.
    """
    path = folder / FILE_NAME
    before = read_file(path, limits.CONFIGURATION) if path.exists() else None
    write_config(folder, settings)
    try:
        yield
    except InvalidInput:
        if before is not None:
            path.write_bytes(before)
        raise


def write_config(folder: Path, settings: Record) -> None:
    """Write run.toml into a run's folder; InvalidInput if that fails."""
    path, verb = folder / FILE_NAME, getattr(settings, "kind", "train")
    if isinstance(settings, RunSettings):
        values = useful_settings(settings)
    else:
        values = settings.model_dump(exclude={"kind"}, exclude_none=True)
    values.pop("resume", None)  # would be the folder of this file itself
    if values.get("steps") is not None and "epochs" in values:
        del values["epochs"]  # `steps` replaces `epochs`
    text = f"# `paceline {verb} --config {FILE_NAME}` repeats this run.\n{to_toml(values)}"
    try:
        write_text(path, text)
    except OSError as error:
        raise InvalidInput("output", f"{path}: {error.strerror}") from None


def to_toml(values: Mapping[str, Any]) -> str:
    """Format TOML: values first, then a table for each mapping."""
    return tomli_w.dumps({name: _plain(value) for name, value in values.items() if value != {}})


def _plain(value: Any) -> Any:
    """Convert a value to TOML's types: None to "null", types that TOML lacks to text."""
    if value is None:
        return _NULL
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float) else str(value)


def _with_null(value: Any) -> Any:
    """Replace each text "null" within a table by None."""
    if isinstance(value, dict):
        return {key: _with_null(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_null(one) for one in value]
    return None if value == _NULL else value
