"""Read and write machines/*.toml, and find machines and devices in them."""

import json
import re
from collections.abc import Iterator
from itertools import compress, islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from paceline.core.cluster import Cluster
from paceline.core.errors import InvalidInput
from paceline.core.facts import Fact
from paceline.core.machine import Device, Machine, Station, place_of
from paceline.core.names import did_you_mean, not_known
from paceline.core.reading import fault_of, first_fault
from paceline.links.files import limits
from paceline.links.files.reading import read_toml_file
from paceline.records.catalogue import EqualFile, by_name

_DECIMAL = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
_BINARY = (("Ti", 2.0**40), ("Gi", 2.0**30), ("Mi", 2.0**20), ("Ki", 2.0**10))
_SECONDS = (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9))
_MOST_DIGITS = 17  # of a float64
# A field's unit follows from the end of its name; longer endings come first.
_UNITS = {
    "values_per_s": "value/s",
    "flops_per_s": "flop/s",
    "bytes_per_s": "B/s",
    "_bytes": "B",
    "_s": "s",
}


def read_machine(path: Path) -> Machine:
    """Return the machine of a TOML file, or the cluster if it has levels.

    InvalidInput names the file and the field or line, and says what would be right there. Devices
    between which there is no way are a fault of the file, too.
    """
    values = read_toml_file(path, limits.MACHINE, largest=inf)
    model: type[Fact] = Machine
    if "equal" in values:
        model = EqualFile
    elif "levels" in values:
        model = Cluster
    try:
        found = model.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(str(path), f"{first_fault(error)}{_right(error, model)}") from None
    try:
        machine = found.machine if isinstance(found, EqualFile) else found
    except InvalidInput as error:
        raise InvalidInput(str(path), str(error)) from None
    assert isinstance(machine, Machine)
    missing = _missing_link(machine)
    if missing:
        raise InvalidInput(str(path), f"links: {missing}")
    return machine


def _right(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the right fields where one is missing or is not known."""
    fault = fault_of(error)
    *inside, last = [part for part in fault["loc"] if isinstance(part, str)] or [""]
    for part in inside:
        field = model.model_fields.get(part)
        model = model if field is None else _model_in(field.annotation) or model
    if fault["type"] == "extra_forbidden":
        hint = did_you_mean(last, model.model_fields)
        return f"{hint} Known are {', '.join(model.model_fields)}"
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
    """Name the stations without a route to the first device, and the link that would join them.

    Devices that are cores of one host have its memory between them, and may do without. A host
    without devices is a server, or nothing.
    """
    first = machine.devices[0]
    reached = machine.network.reached_from(place_of(first))
    occupied = {device.host for device in machine.devices}
    free = [host for host in machine.hosts if host.name not in occupied]
    stations: list[Station] = [*machine.devices, *free]
    apart = next((one for one in stations if place_of(one) not in reached), None)
    if apart is None:
        return None
    place = place_of(apart)
    kind = "device" if place == apart.name and isinstance(apart, Device) else "host"
    ways = "no link" if place not in machine.network.linked else "no way over links"
    return (
        f"{ways} leads to {kind} {place!r} from {place_of(first)!r}; "
        f'a [[links]] table with between = ["{min(reached)}", "{place}"] would join them'
    )


def find_machine(name: str) -> Machine:
    """Return the machine of a file, or the one that a file of ./machines or of Paceline describes.

    Where there is no such file, NAME.toml is the machine NAME. InvalidInput lists the known ones if
    there is none of that name.
    """
    path = Path(name)
    if path.exists() or (path.suffix and path.name != name):  # a file, here or in a folder
        return read_machine(path)
    files = _machine_files() + _machine_files("equal")
    known = {path.stem: path for path in reversed(files)}  # the user's own come first
    short = name.removesuffix(".toml")
    if short in known:
        return read_machine(known[short])
    if (machine := by_name(short)) is not None:
        return machine
    if path.suffix:
        return read_machine(path)  # which says why it cannot be read
    also = ", any FILE.toml, and equal devices such as 8xv100 or 4x8xv100+25gbe"
    raise not_known("machine", name, sorted(known), also)


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
        also = ", and others as FILE.toml:NAME"
        raise not_known("device", name, [one.label for one in known], also)
    return found[0]


def _machine_files(below: str = "") -> list[Path]:
    """Return the user's own, then those of the wheel, or of a checkout that is installed as is.

    `below`: the folder of such files in theirs, "equal" of machines that catalogues describe.
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
    """Return the TOML text that describes exactly this machine, in ASCII.

    It begins with the lines of `comment`. Fields with their default value are left out.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    text = "\n".join([*lines, tomli_w.dumps(_plain("", machine))])
    return re.sub(r"[^\n -~]", lambda match: f"\\U{ord(match[0]):08x}", text)


def quantity(value: float, unit: str) -> str | None:
    """Return the value with its unit, such as "1.6 GB/s", in the fewest digits that are exact.

    None if no text is exact, or if the value is zero, infinite, or too small for any prefix.
    """
    prefixes = [_prefix(value, unit)]
    if unit == "B":  # as memory is sold
        prefixes += [one for one in _BINARY if one[1] <= value][:1]
    texts = []
    for prefix, factor in prefixes:
        if factor <= value < inf:
            numbers = (f"{value / factor:.{digits}g}" for digits in range(1, _MOST_DIGITS + 1))
            # 1e+02 is shorter than 103, but no easier to read
            exact = (n for n in numbers if "e" not in n and float(n) * factor == value)
            texts += [f"{number} {prefix}{unit}" for number in islice(exact, 1)]
    return min(texts, key=len, default=None)


def rounded(value: float, unit: str) -> str:
    """Return the value with its unit, rounded to three digits."""
    prefix, factor = _prefix(value, unit)
    return f"{float(f'{value / factor:.3g}'):g} {prefix}{unit}"


def as_rounded(value: float, unit: str) -> float:
    """Return the value that `rounded` prints."""
    factor = _prefix(value, unit)[1]
    return float(f"{value / factor:.3g}") * factor


def _prefix(value: float, unit: str) -> tuple[str, float]:
    """Return the largest prefix that the value reaches, or else the smallest, and its factor."""
    known = _SECONDS if unit == "s" else _DECIMAL
    return next((one for one in known if one[1] <= value), known[-1])


def _given(fact: BaseModel) -> Iterator[tuple[str, Any]]:
    for name, field in type(fact).model_fields.items():
        value = getattr(fact, name)
        if field.is_required() or value != field.default:
            yield name, value


def _plain(field: str, value: Any) -> Any:
    """Return a field's value in TOML's types; quantities have their unit."""
    if isinstance(value, BaseModel):
        return {name: _plain(name, one) for name, one in _given(value)}
    if isinstance(value, dict):
        return {str(key): _plain(field, one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(field, one) for one in value]
    if isinstance(value, str | int):
        return value
    unit = next((unit for end, unit in _UNITS.items() if field.endswith(end)), None)
    text = None if unit is None else quantity(value, unit)
    return value if text is None else text
