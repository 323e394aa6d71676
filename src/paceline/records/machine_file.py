"""Read and write machine files, and find machines and devices in them."""

import json
import re
from itertools import compress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from paceline.core.cluster import Cluster
from paceline.core.errors import InvalidInput
from paceline.core.facts import WITH_UNITS, Fact
from paceline.core.machine import Device, Machine, place_of
from paceline.core.names import did_you_mean, not_known
from paceline.core.reading import fault_of, first_fault
from paceline.links.files import limits, read_toml_file
from paceline.records.catalogue import EqualFile, by_name


def read_machine(path: Path) -> Machine:
    """Read the machine or cluster of a TOML file.

    Raises InvalidInput, which names the file, and the wrong field or line. Links that do not
    connect all devices are errors, too.
    """
    values = read_toml_file(path, limits.MACHINE, largest=inf)
    model: type[Fact] = Machine
    if "equal" in values:
        model = EqualFile
    elif "levels" in values:
        model = Cluster
    try:
        found = model.model_validate(values)
        machine = found.machine if isinstance(found, EqualFile) else found
    except ValidationError as error:
        problem = f"{first_fault(error)}{_expected(error, model)}"
        raise InvalidInput(str(path), problem) from None
    except InvalidInput as error:
        raise InvalidInput(str(path), str(error)) from None
    assert isinstance(machine, Machine)
    _check_connected(machine, path)
    return machine


def _expected(error: ValidationError, model: type[BaseModel]) -> str:
    """Return a hint for an unknown or missing field; "" for other errors."""
    fault = fault_of(error)
    *inside, last = [part for part in fault["loc"] if isinstance(part, str)] or [""]
    for part in inside:
        field = model.model_fields.get(part)
        model = model if field is None else _model_in(field.annotation) or model
    if fault["type"] == "extra_forbidden":
        hint = did_you_mean(last, model.model_fields)
        return f"{f'; {hint}' if hint else '.'} Fields: {', '.join(model.model_fields)}"
    field = model.model_fields.get(last)
    if fault["type"] not in ("missing", "tuple_type") or field is None:
        return ""
    if _model_in(field.annotation):
        return f"; add at least one table [[{last}]]"
    return f"; for example {last} = {json.dumps(field.examples[0])}" if field.examples else ""


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _check_connected(machine: Machine, path: Path) -> None:
    """Raise InvalidInput if links do not connect all devices and servers.

    A server (parameter server) is a host without devices. CPU devices of one host communicate
    through its memory, and need no link.
    """
    first = place_of(machine.devices[0])
    reached = machine.network.reached_from(first)
    occupied = {device.host for device in machine.devices}
    free = [host.name for host in machine.hosts if host.name not in occupied]
    for place in (*map(place_of, machine.devices), *free):
        if place not in reached:
            hint = f'add a [[links]] table with between = ["{min(reached)}", "{place}"]'
            problem = f"links: no route from {first!r} to {place!r}"
            raise InvalidInput(str(path), problem, hint=hint)


def find_machine(name: str) -> Machine:
    """Find a machine by its file, or by its name in ./machines or Paceline's machine files.

    NAME and NAME.toml are equivalent. InvalidInput lists the known machines.
    """
    path = Path(name)
    if path.exists() or (path.suffix and path.name != name):  # `name` is a path
        return read_machine(path)
    files = _machine_files() + _machine_files("equal")
    known = {path.stem: path for path in reversed(files)}  # the user's files take precedence
    short = name.removesuffix(".toml")
    if short in known:
        return read_machine(known[short])
    if (machine := by_name(short)) is not None:
        return machine
    if path.suffix:
        return read_machine(path)  # raises the error for a missing file
    also = ", FILE.toml, or equal devices such as 8xv100 or 4x8xv100+25gbe"
    raise not_known("machine", name, sorted(known), also)


class KnownDevice(NamedTuple):
    """A device and the machine that it belongs to."""

    machine: Machine
    device: Device

    @property
    def label(self) -> str:
        """The label MACHINE/DEVICE."""
        return f"{self.machine.name}/{self.device.name}"


def find_device(name: str) -> KnownDevice:
    """Find a device by its name, or by any part of its label "MACHINE/DEVICE".

    FILE.toml:NAME searches only that file; NAME searches ./machines and Paceline's machine files.
    Case does not matter. InvalidInput lists the known devices.
    """
    file, _, wanted = name.rpartition(":")
    machines = map(read_machine, [Path(file)] if file else _machine_files())
    known = [KnownDevice(machine, device) for machine in machines for device in machine.devices]
    word, names = wanted.lower(), [(one.label.lower(), one.device.name.lower()) for one in known]
    fits = (
        [word in each for each in names],
        [any(name.startswith(word) for name in each) for each in names],
        [word in label for label, _ in names],
    )
    found = [one for matching in fits for one in compress(known, matching)]
    if not wanted or not found:
        also = ", or FILE.toml:NAME"
        raise not_known("device", name, [one.label for one in known], also)
    return found[0]


def _machine_files(below: str = "") -> list[Path]:
    """Return the paths of the user's machine files, then of Paceline's machine files.

    `below`: a subfolder, such as "equal" for machines that use the catalogue.
    """
    package = Path(__file__).parents[1]
    folders = (Path("machines"), package / "machines", package.parents[1] / "machines")
    found = {
        path.resolve(): path
        for folder in folders
        for path in sorted((folder / below).glob("*.toml"))
    }
    return list(found.values())


def machine_text(machine: Machine, comment: str = "") -> str:
    """Format a machine as ASCII TOML, without loss of precision.

    The text begins with the lines of `comment`, and omits fields with default values.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    fields = machine.model_dump(exclude_defaults=True, context=WITH_UNITS)
    text = "\n".join([*lines, tomli_w.dumps(fields)])
    return re.sub(r"[^\n -~]", lambda match: f"\\U{ord(match[0]):08x}", text)
