"""Carry out a profile: have workers measure, search for the largest batch, say what it means."""

import os
import sys
from pathlib import Path

from paceline.core.errors import InvalidInput
from paceline.launching import check_cores, new_run_id, under_torchrun
from paceline.links.launch import launch
from paceline.profile_result import ProfileResult, read_profile
from paceline.profile_settings import ProfileSettings
from paceline.profiling.insights import insights_of
from paceline.profiling.rank import Order
from paceline.profiling.search import find_largest
from paceline.profiling.shown import summary, tables
from paceline.report import write_report
from paceline.tables import console

_SILENT = "99"  # torch.profiler's library tells standard error of each start


def carry_out(settings: ProfileSettings, *, as_json: bool = False, debug: bool = False) -> None:
    """Profile, write result, trace and report, and print the result.

    Raises InvalidInput or WorkerLost for what the workers could not say themselves, and
    WorkersFailed for what they have said.
    """
    if under_torchrun():
        raise InvalidInput("profile starts its workers itself; run it without torchrun")
    check_cores(settings.workers)
    order = Order(settings=settings, run_id=new_run_id(settings), debug=debug)
    command = [sys.executable, "-m", "paceline.profiling.rank", order.model_dump_json()]
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    launch(command, settings.workers, settings.port)
    folder = settings.output / order.run_id
    result = _finished(folder, settings)
    out = console()
    if as_json:
        out.print_json(result.model_dump_json())
        return
    for table in tables(result):
        out.print(table)
    out.print(summary(result, str(folder)), soft_wrap=True)


def _finished(folder: Path, settings: ProfileSettings) -> ProfileResult:
    """Add to the result what only this process can find, and write it with its report.

    Until the search is done, what the workers have measured is there without it.
    """
    result = read_profile(folder)
    assert result is not None, "the workers write a profile"
    result = _written(folder, result)
    if settings.largest_batch:
        largest = find_largest(settings, console(stderr=True).print)
        result = _written(folder, result.model_copy(update={"largest": largest}))
    return result


def _written(folder: Path, result: ProfileResult) -> ProfileResult:
    """Write the result with what it says, and its report, and return it."""
    result = result.model_copy(update={"insights": tuple(insights_of(result))})
    (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")
    write_report(folder)
    return result
