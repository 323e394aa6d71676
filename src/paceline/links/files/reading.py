"""Read a file whole, if it is a file and not larger than its kind may be."""

import os
import stat
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.reading import LARGEST_NUMBER, read_toml


def read_file(path: Path, most: int) -> bytes:
    """Return the bytes of a file of at most so many; InvalidInput says why it cannot be read.

    A pipe or a device is no file: reading it might wait forever, or never end.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(opened, "rb") as file:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise InvalidInput(str(path), "cannot be read: it is no file")
            if found.st_size > most:
                raise _too_large(path, found.st_size, most)
            data = file.read(most + 1)  # it may grow meanwhile
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise InvalidInput(str(path), f"cannot be read: {_reason(error)}") from None
    if len(data) > most:
        raise _too_large(path, len(data), most)
    return data


def read_toml_file(path: Path, most: int, *, largest: float = LARGEST_NUMBER) -> dict[str, Any]:
    """Return the table in a file of TOML."""
    return read_toml(read_file(path, most), str(path), largest=largest)


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _too_large(path: Path, nbytes: int, most: int) -> InvalidInput:
    return InvalidInput(
        str(path),
        f"cannot be read: it has {nbytes:,} bytes",
        hint=f"such a file has at most {most:,}",
    )
