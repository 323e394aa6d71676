"""Read machines/*.toml, and find devices in them."""

import json
import tomllib
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from paceline.core.cluster import Cluster
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Machine, Station, place_of
from paceline.settings import first_fault


def read_machine(path: Path) -> Machine:
    """Return the machine of a TOML file, or the cluster if it has levels.

    InvalidInput names the file and the field or line, and says what would be right there. Devices
    between which there is no way are a fault of the file, too.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: not TOML: {error}") from None
    model = Cluster if "levels" in values else Machine
    try:
        machine = model.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(f"{path}: {first_fault(error)}{_right(error, model)}") from None
    missing = _missing_link(machine)
    if missing:
        raise InvalidInput(f"{path}: links: {missing}")
    return machine


def _right(error: ValidationError, model: type[BaseModel]) -> str:
    """Return what would be right where a field is missing, or is none that there is."""
    fault = error.errors(include_url=False)[0]
    *inside, last = [part for part in fault["loc"] if isinstance(part, str)] or [""]
    for part in inside:
        field = model.model_fields.get(part)
        model = model if field is None else _model_in(field.annotation) or model
    if fault["type"] == "extra_forbidden":
        return f"; known: {', '.join(model.model_fields)}"
    field = model.model_fields.get(last)
    if fault["type"] not in ("missing", "tuple_type") or field is None:
        return ""
    if _model_in(field.annotation):
        return f"; it is at least one table [[{last}]]"
    return f"; for example {last} = {json.dumps(field.examples[0])}" if field.examples else ""


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _missing_link(machine: Machine) -> str | None:
    """Return what is not linked to the first device, if anything is, and what would link it.

    Devices that are cores of one host have its memory between them, and may do without. A host
    without devices is a server, or nothing.
    """
    first = machine.devices[0]
    reached = machine.network.reached_from(place_of(first))
    occupied = {device.host for device in machine.devices}
    stations: list[Station] = list(machine.devices)
    stations += [host for host in machine.hosts if host.name not in occupied]
    for station in stations:
        place = place_of(station)
        if place not in reached:
            kind = "device" if place == station.name and isinstance(station, Device) else "host"
            to = sorted(reached)[0]
            ways = "no link" if place not in machine.network.linked else "no way over links"
            return (
                f"{ways} leads to {kind} {place!r} from {place_of(first)!r}; "
                f'a [[links]] table with between = ["{to}", "{place}"] would join them'
            )
    return None


def find_machine(name: str) -> Machine:
    """Return the machine of a file, or the one that a file of ./machines or of Paceline describes.

    InvalidInput lists the known ones if there is none of that name.
    """
    path = Path(name)
    if path.suffix or path.exists():
        return read_machine(path)
    known = {path.stem: path for path in reversed(_machine_files())}  # the user's own come first
    if name not in known:
        raise InvalidInput(
            f"machine: {name!r} is not known; known are {', '.join(sorted(known))}, "
            "and any FILE.toml"
        )
    return read_machine(known[name])


class KnownDevice(NamedTuple):
    """A device, and the machine whose file describes it."""

    machine: Machine
    device: Device

    @property
    def label(self) -> str:
        """Both names."""
        return f"{self.machine.name}/{self.device.name}"


def find_device(name: str) -> KnownDevice:
    """Return the device of that name, or the first whose label begins with it, or contains it.

    `name` may be FILE.toml:NAME, for a device of that file alone; otherwise the files in ./machines
    and those that come with Paceline are looked through. A label is "MACHINE/DEVICE"; upper and
    lower case are the same. InvalidInput lists the known devices if there is none.
    """
    file, _, wanted = name.rpartition(":")
    paths = [Path(file)] if file else _machine_files()
    known = [
        KnownDevice(machine, device)
        for machine in map(read_machine, paths)
        for device in machine.devices
    ]
    matching = [(_closeness(wanted.lower(), one), one) for one in known]
    found = [pair for pair in matching if pair[0] is not None]
    if not wanted or not found:
        labels = ", ".join(one.label for one in known) or "none"
        raise InvalidInput(
            f"device: {name!r} is not known; known are {labels}, and others as FILE.toml:NAME"
        )
    return min(found, key=itemgetter(0))[1]


def _closeness(wanted: str, one: KnownDevice) -> int | None:
    """Return how well the name fits, 0 for best, or None."""
    names = (one.label.lower(), one.device.name.lower())
    if wanted in names:
        return 0
    if any(name.startswith(wanted) for name in names):
        return 1
    return 2 if wanted in names[0] else None


def _machine_files() -> list[Path]:
    """Return the user's own, then those of the wheel, or of a checkout that is installed as is."""
    package = Path(__file__).parent
    folders = (Path("machines"), package / "machines", package.parents[1] / "machines")
    found = {path.resolve(): path for folder in folders for path in sorted(folder.glob("*.toml"))}
    return list(found.values())
