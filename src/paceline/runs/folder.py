"""The folder of a run or a plan: its name, and the files in it."""

import os
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

import psutil

from paceline.core.errors import InvalidInput
from paceline.core.settings import Record
from paceline.core.timeline import Timeline
from paceline.links.files.writing import write_text
from paceline.planner import Ranking
from paceline.record.trace import write_trace
from paceline.records.config_file import FILE_NAME, written_config
from paceline.records.result import AnyResult, PlanResult
from paceline.report import write_report

_by_torchrun = count(1)  # runs of this process


def new_id(model: str, suffix: str = "") -> str:
    """Return a name for a folder: the time, the model and a suffix such as "-rehearsed"."""
    name = model.replace(":", ".").replace("/", ".")
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name}{suffix}-{uuid4().hex[:4]}"


def id_by_torchrun(model: str, suffix: str = "") -> str:
    """Return a name for the folder of a run under torchrun: the same whenever that starts it again.

    That is the parent of this process, and known by its number and the time of its start. Further
    runs of a program are numbered.
    """
    parent = os.getppid()
    began_s = psutil.Process(parent).create_time()
    began = time.strftime("%Y%m%d-%H%M%S", time.localtime(began_s))
    name = model.replace(":", ".").replace("/", ".")
    own = zlib.crc32(f"{parent} {began_s} {os.environ.get('TORCHELASTIC_RUN_ID')}".encode())
    number = next(_by_torchrun)
    return f"{began}-{name}{suffix}-{own:08x}{'' if number == 1 else f'-{number}'}"


def make_folder(output: Path, run_id: str, *, exists: bool = False) -> Path:
    """Make the folder of a run, unless it `exists`, and return it; InvalidInput if it cannot be."""
    folder = output / run_id
    try:
        folder.mkdir(parents=True, exist_ok=exists)
    except OSError as error:
        raise InvalidInput("output", f"cannot make {folder}: {error.strerror}") from None
    return folder


@contextmanager
def run_folder(
    output: Path, run_id: str, settings: Record, *, exists: bool = False
) -> Iterator[Path]:
    """Make the folder of a run, unless it `exists`, with the run's settings in it.

    One that was made, and in which nothing else is written, is removed in the end. Raises
    InvalidInput if it cannot be made or written to.
    """
    folder = make_folder(output, run_id, exists=exists)
    try:
        with written_config(folder, settings):
            yield folder
    finally:
        if not exists:
            remove_unused(folder)


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run that has written nothing but its settings there, if it can be."""
    with suppress(OSError):  # how the run has ended says more than a folder that stays
        if {path.name for path in folder.iterdir()} <= {FILE_NAME}:
            (folder / FILE_NAME).unlink(missing_ok=True)
            folder.rmdir()


def write_files(folder: Path, result: AnyResult, timelines: Iterable[Timeline]) -> None:
    """Write result.json, trace.json and report.html."""
    write_trace(folder / "trace.json", timelines)
    write_text(folder / "result.json", result.model_dump_json(indent=2) + "\n")
    write_report(folder)


def keep_plan(output: Path, result: PlanResult, ranking: Ranking) -> Path:
    """Write a plan into a folder in `output`, and return the folder."""
    folder = make_folder(output, result.id)
    write_files(folder, result, [ranking[0].timeline] if ranking else [])
    return folder
