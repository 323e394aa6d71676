"""Read machines/*.toml."""

import tomllib
from pathlib import Path

from pydantic import TypeAdapter

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
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
