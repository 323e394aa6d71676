"""The commands `probe`, `env`, `profile`, `scale`, `compare` and `report`."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Json, option, print_json, with_options
from paceline.core.errors import InvalidInput
from paceline.core.reading import validated
from paceline.core.timeline import Origin, Timeline
from paceline.records.profile import ProfileSettings, validated_profile
from paceline.records.scale import ScaleSettings

_STEP_BY_STEP = 2  # maximum number of runs whose steps `compare` compares; losses: no maximum


def probe(
    output: Annotated[
        Path | None, option("PATH", "Machine file to write. Default: HOSTNAME.toml.")
    ] = None,
    workers: Annotated[
        int | None,
        option("INT", "Number of devices to measure. Default: all GPUs, or else 2 CPU workers."),
    ] = None,
    seconds: Annotated[float, option("SECONDS", "Approximate duration of the measurement.")] = 10.0,
    force: Annotated[bool, option("", "Replace an existing file.", "--force")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine's speed (layers, memory, links, codecs), and write a machine file."""
    from paceline.studies.probe.probe_ranks import probe_machine, probe_settings

    how = {"force": force, "as_json": as_json}
    probe_machine(probe_settings(workers, output, seconds=seconds, **how))


def env(as_json: Json = False) -> None:
    """Describe this machine for a bug report: versions, processor, GPUs, causes of slowness."""
    from paceline.studies.env import page, report

    found = report()
    print_json(found) if as_json else typer.echo(page(found))


@with_options(ProfileSettings, leave_out=("deadline_s",))
def profile(values: dict[str, Any], *, as_json: Json = False) -> None:
    """Measure the time and memory of a step, layer by layer, and find the bottleneck."""
    from paceline.studies.profile.profile_ranks import profile_model

    profile_model(validated_profile(values), as_json=as_json)


@with_options(ScaleSettings, leave_out=("classes", "deadline_s"))
def scale(
    values: dict[str, Any],
    *,
    output: Annotated[
        Path | None, option("PATH", "Folder of the study. An interrupted study is continued.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare epoch times by strategy, number of workers and batch size."""
    from paceline.report.scale import cells_table, sentences
    from paceline.report.terminal import console
    from paceline.runs.launching import under_torchrun
    from paceline.studies.scale.study import run_study, usual_folder

    if under_torchrun():
        raise InvalidInput("paceline scale", "starts workers itself; run it without torchrun")
    settings = validated(ScaleSettings, values)
    folder = output or usual_folder(settings)
    result = run_study(settings, folder, console(stderr=True))
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    out = console()
    out.print(cells_table(result.cells))
    for sentence in sentences(result):
        out.print(sentence, soft_wrap=True)
    out.print(f"written    {folder}/result.json, cells.jsonl, report.html", soft_wrap=True)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="Folders of runs; a single run is compared with its prediction.",
        ),
    ],
    page: Annotated[
        Path | None, option("PATH", "HTML file to write, with the losses of all runs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs with each other, or a run with its prediction."""
    first, *others = runs
    if page is not None and not others:
        hint = f"for one run use paceline report {first}"
        raise InvalidInput("page", "requires at least two runs", hint=hint)
    has_printed = len(runs) <= _STEP_BY_STEP
    if has_printed:
        _compare_steps(first, others[0] if others else None, as_json=as_json)
    if page is not None or not has_printed:
        _compare_losses(runs, page, as_json=as_json, has_printed=has_printed)


def _compare_losses(
    runs: Sequence[Path], page: Path | None, *, as_json: bool, has_printed: bool
) -> None:
    """Print tables of runs' losses and updates; write them to the HTML file `page`, if given.

    `has_printed`: whether the command has already printed a comparison of the runs' steps. If so,
    and with `as_json`, prints nothing, because a command prints a single JSON line.
    """
    from paceline.report.comparison import page_of, side_by_side, side_by_side_tables
    from paceline.report.page import write_page
    from paceline.report.terminal import console

    sides = side_by_side(runs)
    if page is not None:
        write_page(page, page_of(sides))
    if not as_json:
        out = console()
        for table in side_by_side_tables(sides):
            out.print(table)
        if page is not None:
            out.print(f"written    {page}", soft_wrap=True)
    elif not has_printed:  # otherwise the comparison of steps has already printed a JSON line
        print_json(sides.model_dump())


def _compare_steps(first: Path, second: Path | None, *, as_json: bool) -> None:
    """Print the differences between the steps of two runs, or of a run and its prediction."""
    from paceline.core.compare import compare as compare_timelines
    from paceline.record.trace import read_timeline
    from paceline.records.result import check_run, read_run
    from paceline.report.comparison import difference_tables, differences
    from paceline.report.tables import comparison_table
    from paceline.report.terminal import TRACED, console, shown

    for folder in filter(None, (first, second)):
        check_run(folder)
    predicted = None if second else read_timeline(first / "trace.json", Origin.PREDICTED)
    left, right = predicted or _happened(first), _happened(second or first)
    try:
        table = compare_timelines(left, right)
    except ValueError as error:
        folders = " or ".join(str(folder) for folder in (first, second) if folder)
        raise InvalidInput(str(folders), str(error)) from None
    changed = None
    if second is not None:
        names = [
            f"{path.name} (rehearsed)" if one.origin is Origin.REHEARSED else path.name
            for path, one in ((first, left), (second, right))
        ]
        table = replace(table, left=names[0], right=names[1])
        changed = differences(read_run(first), read_run(second), table)
    if as_json:
        print_json(asdict(table) | (changed.model_dump() if changed else {}))
        return
    out = console()
    out.print(shown(TRACED, comparison_table(table, two_runs=second is not None)))
    for more in difference_tables(changed, table) if changed else ():
        out.print(more)
    for finding in changed.findings if changed else ():
        out.print(finding.message, soft_wrap=True)


def _happened(folder: Path) -> Timeline:
    """Read what happened in a run: the timeline measured in training or in a rehearsal."""
    from paceline.record.trace import read_timeline, read_trace

    path = folder / "trace.json"
    return read_trace(path).get(Origin.REHEARSED) or read_timeline(path, Origin.MEASURED)


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a run.")],
    rehearsal: Annotated[
        Path | None,
        option(
            "FOLDER", "Folder of a rehearsal (a run on emulated devices) to show next to the run."
        ),
    ] = None,
) -> None:
    """Write report.html again from a run's result.json and trace.json, and print its path."""
    from paceline.report import write_report

    typer.echo(write_report(folder, rehearsal))
