"""Read regular files of limited size, and write files that are complete or absent."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.reading import LARGEST_NUMBER, read_toml


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a regular file.

    Raises InvalidInput if `path` has more than `most` bytes, is no regular file or is unreadable.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(opened, "rb") as file:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):  # reading a pipe or device might never end
                raise InvalidInput(str(path), "is not a regular file")
            # Read no more than the limit, because the file may grow meanwhile.
            data = file.read(most + 1) if found.st_size <= most else b""
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # `path` contains a NUL
        raise InvalidInput(str(path), f"cannot be read: {error}") from None
    nbytes = max(found.st_size, len(data))
    if nbytes > most:
        raise InvalidInput(str(path), f"must have at most {most:,} bytes", got=nbytes)
    return data


def read_toml_file(path: Path, most: int, *, largest: float = LARGEST_NUMBER) -> dict[str, Any]:
    """Read a TOML file of at most `most` bytes, without numbers above `largest`."""
    return read_toml(read_file(path, most), str(path), largest=largest)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path for writing; rename it to `path` if the block succeeds.

    If the block fails, the temporary file is removed.
    """
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
