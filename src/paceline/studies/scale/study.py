"""Carry out the runs of a scaling study, and write each finished cell to the journal.

A cell is the epoch time of one strategy, number of workers and batch size.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from math import inf
from pathlib import Path

import torch
from rich import progress
from rich.console import Console

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.reading import validated
from paceline.core.timeline import Origin
from paceline.core.workload import Workload
from paceline.links.files import write_text
from paceline.links.rendezvous import check_gpus, device_of_rank
from paceline.links.signals import Stopped
from paceline.measure.this_machine import facts, memory_bytes
from paceline.planner import forecast_one
from paceline.records.config_file import write_config
from paceline.records.machine_file import KnownDevice, find_device, find_machine
from paceline.records.result import RunResult
from paceline.records.scale import ScaleCell, ScaleResult, ScaleSettings
from paceline.report import advice, write_report
from paceline.report.format import counted, duration
from paceline.report.metrics import of_study
from paceline.runs.folder import new_id
from paceline.strategies import find_exchange
from paceline.studies.scale import study_runs
from paceline.studies.scale.journal import Journal, JournalHeader
from paceline.studies.scale.study_runs import Crashed, RunStep, StudyRun
from paceline.training.models import describe, find
from paceline.training.recipes.named import own_recipe, takes_any_data, workload_of

_SCRATCH = "under-way-"  # prefix of temporary folders of runs


@dataclass(frozen=True)
class ScalingStudy:
    """A study: settings, emulated device (or None), machine to predict for (or None), and model.

    `shape`: shape of a random sample; None for a model that is trained on its own data.
    `workload(n)` describes a worker's training step with n samples.
    """

    settings: ScaleSettings
    device: KnownDevice | None
    machine: Machine | None
    shape: tuple[int, ...] | None
    workload: Callable[[int], Workload]

    def repeats(self, run: StudyRun) -> int:
        """Return how often to repeat a run: once for a forecast, else as in the settings."""
        return 1 if run.source is Origin.PREDICTED else self.settings.repeats

    def repetition(self, run: StudyRun, number: int, folder: Path) -> dict[Origin, RunStep]:
        """Carry out a run once; return its step keyed by origin: measured, rehearsed or predicted.

        A child process trains, or rehearses (trains with emulated layers), in a temporary subfolder
        of `folder`. `number`: number of the repetition, from 1. Raises Crashed or InvalidInput if
        the run fails or times out.
        """
        if run.batch_size < run.workers:
            raise Crashed(f"a batch of {run.batch_size} is too small for {run.workers} workers")
        if run.source is Origin.PREDICTED:
            return {Origin.PREDICTED: self.predicted(run)}
        try:
            # Use a subfolder: if this process is killed, the next start of the study removes it.
            with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
                output = Path(scratch)
                arguments = study_runs.run_arguments(run, self.settings, self.shape, output)
                result = study_runs.answer(arguments, self.settings.deadline_s)
        except Crashed as error:
            which = f"repetition {number} of {self.repeats(run)}: " if number > 1 else ""
            raise Crashed(f"{which}{error}") from None
        return study_runs.steps_of(validated(RunResult, result, "its result: "))

    def predicted(self, run: StudyRun) -> RunStep:
        """Predict a run's step on the first devices of `machine`.

        A strategy that sends layers in chunks is predicted with the fastest chunk size. Raises
        InvalidInput if the machine lacks devices, links or memory.
        """
        assert self.machine is not None
        strategy, size = find_exchange(run.method), run.batch_size
        config = strategy.config(workers=run.workers)
        found = forecast_one(self.workload, self.machine, strategy, config, size, any_chunk=True)
        fullest_nbytes = max(found.memory_nbytes[name] for name in found.devices)
        return RunStep(found.step_s, found.breakdown.seconds, fullest_nbytes, found.range_share)

    def cells(self, run: StudyRun, steps: Sequence[Mapping[Origin, RunStep]]) -> list[ScaleCell]:
        """Compute a run's cells (epoch results) from the step that each repetition returned."""
        samples = self.settings.samples
        # Unless another machine or device is meant, workers share this machine's memory equally.
        capacity = memory_bytes() / run.workers
        if run.source is Origin.PREDICTED and self.machine is not None:
            capacity = min(device.memory_bytes for device in self.machine.devices)
        elif run.source is Origin.REHEARSED and self.device is not None:
            capacity = self.device.device.memory_bytes
        return [
            study_runs.cell(point, kind, [found[kind] for found in steps], samples, capacity)
            for point, kind in run.keys
        ]


def study_of(settings: ScaleSettings) -> ScalingStudy:
    """Find the device and machine of the settings; build and describe the model.

    A model trained on random samples has one output for each class. Raises InvalidInput if the
    model cannot be built, if its input shape is unknown, or if the forward pass fails with every
    batch size. If it fails with only some batch sizes, the study reports errors for these.
    """
    device = None if settings.device is None else find_device(settings.device)
    machine = None if settings.machine is None else find_machine(settings.machine)
    shape: tuple[int, ...] | None = None
    if takes_any_data(settings.model):
        shape = _shape_of(settings)
        classes = settings.classes if settings.trains else None
        architecture = find(settings.model)
        with torch.device("meta" if architecture.num_classes else "cpu"):
            model = architecture.build(classes if architecture.num_classes else None).train()
        workload = cache(lambda size: describe(model, torch.zeros(size, *shape), settings.model))
    else:
        if settings.input_shape is not None and own_recipe(settings.model) is None:
            _shape_of(settings)  # raises InvalidInput if the model cannot train with this shape
        workload = cache(lambda size: workload_of(settings.model, size, settings.input_shape))
    for size in sorted(settings.batch_size, reverse=True):
        with suppress(InvalidInput):
            workload(size)
            break
    else:
        workload(min(settings.batch_size))  # all sizes failed: raises InvalidInput again
    return ScalingStudy(settings, device, machine, shape, workload)


def _shape_of(settings: ScaleSettings) -> tuple[int, ...]:
    usual = find(settings.model).input_shape
    shape = settings.input_shape or usual
    if shape is None:
        problem = f"is required for model {settings.model}"
        raise InvalidInput("input_shape", problem, hint="write for example 3x224x224")
    if settings.trains and usual is not None and shape != usual:
        problem = f"must be {'x'.join(map(str, usual))} to train {settings.model}"
        raise InvalidInput("input_shape", problem, got="x".join(map(str, shape)))
    return shape


def do_runs(
    study: ScalingStudy,
    todo: Sequence[StudyRun],
    folder: Path,
    begin: Callable[[StudyRun], None],
) -> Iterator[tuple[StudyRun, list[ScaleCell]]]:
    """Carry out runs; after each repetition, yield the run and its finished results (cells).

    Before the run's last repetition, the list of cells is empty. If the run fails, its cells
    contain the error. `begin(run)` is called before each repetition. Runs that differ only in the
    strategy take turns after each repetition, each time in another order. Thus a machine that slows
    down affects all strategies equally.
    """
    groups: dict[object, list[StudyRun]] = {}
    for run in todo:
        groups.setdefault((run.source, run.workers, run.batch_size), []).append(run)
    turns: list[tuple[StudyRun, int]] = []
    for group in groups.values():
        for number in range(1, study.repeats(group[0]) + 1):
            first = (number - 1) % len(group)
            turns += [(run, number) for run in (*group[first:], *group[:first])]
    steps: dict[StudyRun, list[dict[Origin, RunStep]]] = {run: [] for run in todo}
    failed = set()
    for run, number in turns:
        cells: list[ScaleCell] = []
        try:
            if run not in failed:
                begin(run)
                steps[run].append(study.repetition(run, number, folder))
                cells = study.cells(run, steps[run]) if number == study.repeats(run) else []
        except (Crashed, InvalidInput) as error:
            failed.add(run)
            cells = [ScaleCell(**at._asdict(), kind=of, error=str(error)) for at, of in run.keys]
        yield run, cells


def usual_folder(settings: ScaleSettings) -> Path:
    """Return a study's default folder; its name contains a hash of the settings."""
    text = f"{version('paceline')} {settings.model_dump_json()}"
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Path("runs") / f"scale-{settings.model.replace(':', '.')}-{mark}"


def run_study(settings: ScaleSettings, folder: Path, screen: Console) -> ScaleResult:
    """Begin or continue a study until it is complete; write result.json and report.html.

    Results (cells) that `folder` already contains are not measured again. The cell of a failed run
    contains the error. `screen`: console for the progress. Raises InvalidInput if the model,
    device, machine or folder does not fit the settings, or if all cells fail.
    """
    if settings.trains:
        check_gpus(max(point.workers for point in settings.points))
    study = study_of(settings)
    known = {"id": new_id(settings.model, "-scale"), "paceline": version("paceline")}
    with Journal(folder, JournalHeader(settings=settings, **known)) as journal:
        _remove_scratch(folder)
        write_config(folder, settings)
        if journal.dropped:
            screen.print("dropped the incomplete last line of cells.jsonl")
        if journal.cells:
            screen.print(f"{counted(len(journal.cells), 'cell')} kept from an earlier run")
        try:
            _measure(study, journal, screen)
        except Stopped as stopped:
            kept = f"{counted(len(journal.cells), 'cell')} kept in {folder}"
            stopped.why = f"; {kept}; the same command continues the study"
            raise
        finally:
            _remove_scratch(folder)
    result = _result(settings, journal)
    write_text(folder / "result.json", result.model_dump_json(indent=2) + "\n")
    write_report(folder)
    errors = [cell.error for cell in result.cells if cell.error is not None]
    if len(errors) == len(result.cells):
        raise InvalidInput("cells", f"have all failed, the first with: {errors[0]}")
    return result


def _result(settings: ScaleSettings, journal: Journal) -> ScaleResult:
    """Return the result of a complete study, with its cells in the order of the settings."""
    found = {(cell.point, cell.kind): cell for cell in journal.cells}
    cells = tuple(found[point, kind] for point in settings.points for kind in settings.kinds)
    return ScaleResult(
        **dict(journal.header),
        machine=facts(device_of_rank() if settings.trains else torch.device("cpu")),
        cells=cells,
        findings=advice.findings(of_study(cells)),
    )


def _remove_scratch(folder: Path) -> None:
    """Remove the temporary folders that killed runs left in a study's folder."""
    for path in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(path, ignore_errors=True)


def _measure(study: ScalingStudy, journal: Journal, screen: Console) -> None:
    """Carry out the runs whose results are not yet in the journal; show progress on `screen`."""
    known = {(cell.point, cell.kind) for cell in journal.cells}
    todo = [run for run in study_runs.runs(study.settings) if not known.issuperset(run.keys)]
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
        speed_estimate_period=inf,
    ) as bar:
        task = bar.add_task("", total=sum(map(study.repeats, todo)))
        bar.advance(task, 0)  # the estimate of the remaining time starts its clock here

        def begin(run: StudyRun) -> None:
            bar.update(task, description=run.label)

        for run, cells in do_runs(study, todo, journal.folder, begin):
            bar.advance(task)
            if cells:
                journal.append(cell for cell in cells if (cell.point, cell.kind) not in known)
                if not screen.is_terminal:
                    screen.print(_progress_line(bar.tasks[0], run, cells[0]), soft_wrap=True)


def _progress_line(task: progress.Task, run: StudyRun, first: ScaleCell) -> str:
    epoch = f"failed: {first.error}" if first.epoch_s is None else duration(first.epoch_s)
    left = timedelta(seconds=task.time_remaining or 0)
    done = f"{task.completed:.0f}/{task.total or 0:.0f}: {run.label}: {epoch}"
    return f"{done}; about {left} left" if left else done
