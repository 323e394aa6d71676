"""Commands that look at finished runs: compare, report."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import (
    Debug,
    Json,
    print_json,
)
from paceline.core.errors import InvalidInput
from paceline.core.timeline import Timeline


def compare(
    first: Annotated[Path, typer.Argument(help="The folder of a run.")],
    second: Annotated[
        Path | None, typer.Argument(help="Another run; without it, as it was predicted.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what differs between two runs, or between a run and its prediction."""
    from paceline.core.compare import compare as compare_timelines
    from paceline.record.trace import read_timeline
    from paceline.report.differences import differences, read_any
    from paceline.result import ComparisonTable
    from paceline.tables import comparison_table, console, difference_tables

    left = _happened(first) if second else read_timeline(first / "trace.json", "predicted")
    right = _happened(second or first)
    try:
        table = ComparisonTable.of(compare_timelines(left, right))
    except ValueError as error:
        folders = " or ".join(str(folder) for folder in (first, second) if folder)
        raise InvalidInput(f"{folders}: {error}") from None
    changed = None
    if second is not None:
        names = {"left": _name(first, left), "right": _name(second, right)}
        table = table.model_copy(update=names)
        changed = differences(read_any(first), read_any(second), table)
    if as_json:
        print_json(table.model_dump() | (changed.model_dump() if changed else {}))
        return
    out = console()
    out.print(comparison_table(table, two_runs=second is not None))
    for more in difference_tables(changed, table) if changed else ():
        out.print(more)
    for sentence in changed.sentences if changed else ():
        out.print(sentence, soft_wrap=True)


def _happened(folder: Path) -> Timeline:
    """Return what was measured or, of a rehearsal, rehearsed."""
    from paceline.record.trace import read_timeline, read_trace

    path = folder / "trace.json"
    rehearsed = read_trace(path).get("rehearsed")
    return rehearsed or read_timeline(path, "measured")


def _name(folder: Path, timeline: Timeline) -> str:
    return f"{folder.name} (rehearsed)" if timeline.origin == "rehearsed" else folder.name


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    rehearsal: Annotated[
        Path | None, typer.Option(help="The folder of a rehearsal of it, to be shown beside it.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a run's report.html anew, from its result.json and trace.json."""
    from paceline.report import write_report

    path = write_report(folder, rehearsal)
    if as_json:
        print_json({"report": str(path)})
    else:
        typer.echo(path)
