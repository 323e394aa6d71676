"""Keep the finished cells of a scaling study on disk, so that the study can be continued.

A cell is the epoch time of one strategy, number of workers and batch size. study.json contains the
study's settings, and cells.jsonl a line for each finished cell, which is not measured again. If a
killed study left an incomplete last line, the line is dropped.
"""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Self

from pydantic import BaseModel, TypeAdapter

from paceline.core.errors import InvalidInput
from paceline.core.reading import read_finite_record, read_record
from paceline.core.settings import Record
from paceline.links.files import limits, read_file, write_text
from paceline.records.scale import ScaleCell, ScaleSettings

_HEADER, _CELLS = "study.json", "cells.jsonl"


class JournalHeader(Record):
    """The content of study.json: a study's id, Paceline's version and the study's settings."""

    id: str
    paceline: str
    settings: ScaleSettings


class _Version(BaseModel):
    """The part of study.json that every version of Paceline can read: the version that wrote it."""

    paceline: str


_VERSION, _HEADER_RECORD = TypeAdapter(_Version), TypeAdapter(JournalHeader)
_CELL = TypeAdapter(ScaleCell)


class Journal:
    """Keeps the finished cells of a study in a folder, which is created if missing.

    Raises InvalidInput if the folder cannot be written, is used by another process, or contains a
    study of another version or with other settings. `dropped`: whether an incomplete last line of
    cells.jsonl was dropped.
    """

    def __init__(self, folder: Path, header: JournalHeader) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / _CELLS).open("a+b")
            # The kernel releases this lock when the process ends, even by SIGKILL.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InvalidInput("output", "is in use by another study", got=str(folder)) from None
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise InvalidInput("output", problem, got=str(folder)) from None
        try:
            self.header = _agreed(folder / _HEADER, header)
            self.cells, self.dropped = _read(self._file, folder / _CELLS)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, cells: Iterable[ScaleCell]) -> None:
        """Append cells to the journal, and wait until the cells are on disk."""
        new = tuple(cells)
        text = "".join(f"{cell.model_dump_json()}\n" for cell in new)
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.cells += new


def _agreed(path: Path, header: JournalHeader) -> JournalHeader:
    """Return the header in the file `path`; if there is no file, first write `header` to it.

    Raises InvalidInput if the file's header has another version or other settings than `header`.
    """
    if not path.exists():
        write_text(path, header.model_dump_json(indent=2) + "\n")
        return header
    text = read_file(path, limits.JOURNAL_HEADER)
    version = read_finite_record(_VERSION, text, str(path)).paceline
    if version != header.paceline:
        problem = f"has a study by Paceline {version}, but this is Paceline {header.paceline}"
        raise InvalidInput("output", problem, hint="name another folder")
    found = read_record(_HEADER_RECORD, text, str(path))
    for field in ScaleSettings.model_fields:
        begun, asked = getattr(found.settings, field), getattr(header.settings, field)
        if begun != asked:
            was, now = (
                ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                for value in (begun, asked)
            )
            problem = f"has a study with {field} {was}, but {field} is now {now}"
            raise InvalidInput("output", problem, hint="name another folder")
    return found


def _read(file: BinaryIO, path: Path) -> tuple[list[ScaleCell], bool]:
    """Return the cells in an open file, and whether an incomplete last line was dropped."""
    cells: list[ScaleCell] = []
    good = 0
    lines = read_file(path, limits.JOURNAL).splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            cell = read_finite_record(_CELL, line, f"{path}: line {number}")
        except InvalidInput:
            if number < len(lines):
                raise
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
