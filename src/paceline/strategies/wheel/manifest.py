"""What a snapshot says of itself: everything but tensors, in JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from paceline.core.errors import InvalidInput
from paceline.strategies.wheel.workers import Progress

NAME = "manifest.json"
_FORMAT = 1
_CONFIG = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class OptimizerScalars:
    """An optimizer without its tensors.

    `groups` are its parameter groups, each with the names of its parameters under "params";
    `state` maps a parameter's name to what is kept of it.
    """

    kind: str
    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]


@dataclass(frozen=True, config=_CONFIG)
class Manifest:
    """A snapshot: after `version` updates of run `run_id`; `tensors` is a file's name beside it."""

    run_id: str
    layout: str
    version: int
    workers: list[Progress]
    staleness: dict[int, int]
    tensors: str
    optimizer: OptimizerScalars
    format_version: int = _FORMAT


def text_of(manifest: Manifest) -> str:
    """Return a manifest as JSON, in which every number is exact."""
    fields = asdict(manifest)
    fields["workers"] = [progress._asdict() for progress in manifest.workers]
    return json.dumps(fields, indent=1) + "\n"


def read(folder: Path) -> Manifest | None:
    """Return the manifest of the snapshot in a folder, or None if there is none.

    InvalidInput if it cannot be read, or was written in another format.
    """
    path = folder / NAME
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: the snapshot cannot be read: {error}") from error
    found = fields.get("format_version") if isinstance(fields, dict) else None
    if found != _FORMAT:
        raise InvalidInput(f"{path}: a snapshot of format {found}; this version reads {_FORMAT}")
    try:
        known = TypeAdapter(Manifest).validate_python(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        field = ".".join(map(str, fault["loc"]))
        raise InvalidInput(f"{path}: {field}: {fault['msg']}") from None
    if Path(known.tensors).name != known.tensors:
        raise InvalidInput(f"{path}: tensors: {known.tensors!r} is not a file beside it")
    return known
