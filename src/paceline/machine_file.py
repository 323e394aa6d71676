"""Read machines/*.toml, and find devices in them."""

import tomllib
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Machine
from paceline.settings import validated


def read_machine(path: Path) -> Machine:
    """Return the machine of a TOML file; InvalidInput names the file and the field or line."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: not TOML: {error}") from None
    machine: Machine = validated(TypeAdapter(Machine), values, str(path))
    return machine


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
