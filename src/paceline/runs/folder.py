"""Name and create the folder of a run or plan, and write its files."""

import os
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from rich.console import Console

from paceline.core.errors import InvalidInput
from paceline.core.settings import Record
from paceline.core.timeline import Timeline
from paceline.links.files import write_text
from paceline.planner import Ranking
from paceline.planner.drawing import drawing
from paceline.record.trace import write_trace
from paceline.records.config_file import FILE_NAME, written_config
from paceline.records.result import AnyResult, PlanResult, RankingRows
from paceline.report import advice, metrics, write_report
from paceline.report.plans import Form, present

_by_torchrun = count(1)  # number of the next run that this process starts under torchrun


def new_id(model: str, suffix: str = "") -> str:
    """Return a unique folder name from the time, the model, and a suffix such as "-rehearsed"."""
    return f"{_prefix(time.time(), model)}{suffix}-{uuid4().hex[:8]}"


def _prefix(began_s: float, model: str) -> str:
    began = time.strftime("%Y%m%d-%H%M%S", time.localtime(began_s))
    return f"{began}-{model.replace(':', '.').replace('/', '.')}"


def id_by_torchrun(model: str, suffix: str = "") -> str:
    """Return a folder name that stays the same when torchrun restarts the run.

    The name contains the start time of torchrun, which is the parent process, and a checksum of its
    process id. A number is appended for the second and later runs of a program.
    """
    parent = os.getppid()
    began_s = psutil.Process(parent).create_time()
    own = zlib.crc32(f"{parent} {began_s} {os.environ.get('TORCHELASTIC_RUN_ID')}".encode())
    number = next(_by_torchrun)
    return f"{_prefix(began_s, model)}{suffix}-{own:08x}{'' if number == 1 else f'-{number}'}"


def make_folder(output: Path, run_id: str, setting: str = "output") -> Path:
    """Create a run's folder, unless it exists, and return it.

    Raises InvalidInput for the setting named `setting` if the folder cannot be created.
    """
    folder = output / run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(setting, f"cannot create {folder}: {error.strerror}") from None
    return folder


@contextmanager
def run_folder(output: Path, run_id: str, settings: Record) -> Iterator[Path]:
    """Create the folder of a run, unless it exists, write run.toml, and yield the folder.

    The folder is removed at the end if it then contains only run.toml. Raises InvalidInput if the
    folder cannot be created or written to.
    """
    folder = make_folder(output, run_id)
    try:
        with written_config(folder, settings):
            yield folder
    finally:
        with suppress(OSError):  # do not hide the run's own error
            if {path.name for path in folder.iterdir()} <= {FILE_NAME}:
                (folder / FILE_NAME).unlink(missing_ok=True)
                folder.rmdir()


def write_files(folder: Path, result: AnyResult, timelines: Iterable[Timeline]) -> None:
    """Write result.json, trace.json and report.html into the folder of a run or plan."""
    write_trace(folder / "trace.json", timelines)
    write_text(folder / "result.json", result.model_dump_json(indent=2) + "\n")
    write_report(folder)


def show_plan(
    out: Console,
    ranking: Ranking,
    output: Path | None,
    title: str,
    *,
    form: Form,
    explain: bool,
    is_measured: bool,
    **fields: Any,
) -> None:
    """Print a ranking; if `output` is given, also save the ranking in a new folder there.

    `explain`: also draw a step of the best plan. `is_measured`: whether a profile measured the
    devices' speeds. `fields`: further fields of the `PlanResult`, which is printed and saved.
    """
    rows = RankingRows.of(ranking)
    found = advice.findings(metrics.of_ranking(rows, is_measured=is_measured))
    result = PlanResult(ranking=rows, findings=found, **fields)
    folder = None
    if output is not None:
        folder = make_folder(output, result.id)
        write_files(folder, result, [ranking[0].timeline] if ranking else [])
    drawn = drawing(ranking[0].timeline, ranking[0].shown_s) if explain and ranking else ""
    present(out, result, title, folder, form=form, drawing=drawn)
