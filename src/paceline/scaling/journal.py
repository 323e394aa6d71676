"""The folder of a study: what was asked for, and a line for each finished cell.

A cell that stands in the journal is on the disk, and is not measured again. A last line that was
only half written, because the study was killed then, is dropped.
"""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.core.errors import InvalidInput
from paceline.scale_result import Cell
from paceline.scale_settings import ScaleSettings
from paceline.settings import first_fault

_HEAD, _CELLS = "study.json", "cells.jsonl"


class Head(BaseModel):
    """Which study the folder is of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    paceline: str
    settings: ScaleSettings


class _Version(BaseModel):
    """The one field that every version writes."""

    paceline: str


class Journal:
    """The cells of a study in a folder, which is made if it is not there.

    InvalidInput if the folder holds another study, one of another version of Paceline, or one that
    is under way, or if it cannot be written. `dropped` says whether a line was.
    """

    def __init__(self, folder: Path, head: Head) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _locked(folder / _CELLS)
        except OSError as error:
            raise InvalidInput(f"output: cannot write to {folder}: {error.strerror}") from None
        try:
            self.head = _agreed(folder / _HEAD, head)
            self._cells, self.dropped = _read(self._file, folder / _CELLS)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All finished cells, in the order in which they were."""
        return tuple(self._cells)

    def append(self, cells: Iterable[Cell]) -> None:
        """Write the cells; when this returns they survive whatever happens."""
        new = tuple(cells)
        text = "".join(f"{cell.model_dump_json()}\n" for cell in new)
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._cells += new


def _locked(path: Path) -> BinaryIO:
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InvalidInput(f"output: another study is under way in {path.parent}") from None
    return file


def _agreed(path: Path, head: Head) -> Head:
    """Return the head that the folder has, or write this one; they must ask for the same."""
    if not path.exists():
        partly = path.with_suffix(".part")
        with partly.open("w") as file:
            file.write(head.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partly.replace(path)
        return head
    text = path.read_bytes()
    try:
        version = _Version.model_validate_json(text).paceline
        if version != head.paceline:
            raise InvalidInput(
                f"output: {path.parent} is of Paceline {version}, and this is {head.paceline}; "
                "name another folder"
            )
        found = Head.model_validate_json(text)
    except ValidationError as error:
        raise InvalidInput(f"{path}: {first_fault(error)}") from None
    for field in ScaleSettings.model_fields:
        begun, asked = getattr(found.settings, field), getattr(head.settings, field)
        if begun != asked:
            raise InvalidInput(
                f"output: {path.parent} was begun with {field} {_shown(begun)}, not "
                f"{_shown(asked)}; name another folder"
            )
    return found


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _read(file: BinaryIO, path: Path) -> tuple[list[Cell], bool]:
    """Return the cells of the file, and whether its last line was dropped from it."""
    file.seek(0)
    cells: list[Cell] = []
    good = 0
    lines = file.read().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            cell = Cell.model_validate_json(line)
        except ValidationError as error:
            if number < len(lines):
                raise InvalidInput(f"{path}: line {number}: {first_fault(error)}") from None
            break
        if not line.endswith(b"\n"):
            break
        cells.append(cell)
        good += len(line)
    dropped = good < sum(map(len, lines))
    if dropped:
        file.truncate(good)
    file.seek(0, os.SEEK_END)
    return cells, dropped
