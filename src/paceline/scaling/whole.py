"""A whole study: prepared, resumed, carried out, and written down."""

import hashlib
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from paceline.core.errors import InvalidInput
from paceline.report import write_report
from paceline.scale_result import Cell, ScaleResult
from paceline.scale_settings import ScaleSettings
from paceline.scaling.insights import insights
from paceline.scaling.journal import Head, Journal
from paceline.scaling.progress import StudyProgress
from paceline.scaling.runs import Run
from paceline.scaling.study import Study, carry_out, prepared, swept
from paceline.training.this_machine import facts


def usual_folder(settings: ScaleSettings) -> Path:
    """Return the folder of a study for which none is named: the same for the same settings."""
    text = f"{version('paceline')} {settings.model_dump_json()}"
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Path("runs") / f"scale-{_name(settings)}-{mark}"


def _name(settings: ScaleSettings) -> str:
    return settings.model.replace(":", ".")


def scale(settings: ScaleSettings, folder: Path, screen: Console) -> ScaleResult:
    """Do what is left of a study, and write result.json and report.html into its folder.

    A folder that holds the beginning of the same study is gone on with; an interrupted one keeps
    all finished cells. InvalidInput if model, device, machine or folder do not fit the settings, or
    if no cell has gone well; a cell that fails is otherwise a row that says so.
    """
    study = prepared(settings)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    head = Head(
        id=f"{stamp}-{_name(settings)}-scale", paceline=version("paceline"), settings=settings
    )
    with Journal(folder, head) as journal:
        swept(folder)
        _resumed(journal, screen)
        try:
            _measured(study, journal, screen)
        except KeyboardInterrupt:
            screen.print(
                f"{_number_of(journal.cells)} kept in {folder}; the same command goes on from there"
            )
            raise
        finally:
            swept(folder)
        result = _result(settings, journal)
    (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")
    write_report(folder)
    errors = [cell.error for cell in result.cells if cell.error is not None]
    if len(errors) == len(result.cells):
        raise InvalidInput(f"no cell could be done; the first one: {errors[0]}")
    return result


def _number_of(cells: Sequence[Cell]) -> str:
    return f"{len(cells)} cell{'s' * (len(cells) != 1)}"


def _resumed(journal: Journal, screen: Console) -> None:
    if journal.dropped:
        screen.print("the last line of cells.jsonl was only half written, and is dropped")
    if journal.cells:
        screen.print(f"{_number_of(journal.cells)} kept from before")


def _measured(study: Study, journal: Journal, screen: Console) -> None:
    todo = study.left(journal.cells)
    expected_s = {run: study.expected(run).seconds for run in todo}
    known = {(cell.point, cell.kind) for cell in journal.cells}
    with StudyProgress(screen, list(expected_s.values())) as progress:

        def done(run: Run, cells: list[Cell], taken_s: float) -> None:
            journal.append(cell for cell in cells if (cell.point, cell.kind) not in known)
            progress.done(run, cells, expected_s[run], taken_s)

        carry_out(study, todo, journal.folder, progress.begin, done)


def _result(settings: ScaleSettings, journal: Journal) -> ScaleResult:
    found = {(cell.point, cell.kind): cell for cell in journal.cells}
    cells = tuple(found[point, kind] for point in settings.points for kind in settings.kinds)
    return ScaleResult(
        id=journal.head.id,
        paceline=journal.head.paceline,
        settings=settings,
        machine=facts(torch.device("cpu")),
        cells=cells,
        insights=insights(settings.model, cells),
    )
