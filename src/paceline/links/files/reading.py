"""Read whole regular files of limited size."""

import os
import stat
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.reading import LARGEST_NUMBER, read_toml


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a regular file.

    Raises InvalidInput if it has more than `most` bytes, is no regular file or cannot be read.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(opened, "rb") as file:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):  # reading a pipe or device might never end
                raise InvalidInput(str(path), "is not a regular file")
            if found.st_size > most:
                raise _too_large(path, found.st_size, most)
            data = file.read(most + 1)  # the file may grow meanwhile
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a name with a NUL
        raise InvalidInput(str(path), f"cannot be read: {error}") from None
    if len(data) > most:
        raise _too_large(path, len(data), most)
    return data


def read_toml_file(path: Path, most: int, *, largest: float = LARGEST_NUMBER) -> dict[str, Any]:
    """Return the content of a TOML file; `most`: its maximum number of bytes."""
    return read_toml(read_file(path, most), str(path), largest=largest)


def _too_large(path: Path, nbytes: int, most: int) -> InvalidInput:
    return InvalidInput(str(path), f"must have at most {most:,} bytes", got=nbytes)
