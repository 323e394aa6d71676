"""A study: run after run, each cell into the journal as soon as it is known."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from paceline.core.cost import Roofline, compute_lane
from paceline.core.errors import InvalidInput
from paceline.core.pace import layer_times
from paceline.core.timeline import Origin
from paceline.machine_file import KnownDevice, find_device, find_machine
from paceline.result import RehearsalResult, Result
from paceline.scale_result import Cell
from paceline.scale_settings import Point, ScaleSettings
from paceline.scaling.children import Crashed, answer
from paceline.scaling.predicted import Predicted
from paceline.scaling.remaining import Expectation
from paceline.scaling.runs import Run, command, compared, num_steps, runs
from paceline.scaling.steps import Step, cell, measured_steps, rehearsed_steps
from paceline.scaling.subject import Subject, subject_of

_SCRATCH = "under-way-"  # what runs write, of which nothing is kept
_START_S = 8.0  # of a command with its workers: imports and rendezvous
_FLOPS_PER_S = 2e10  # of a core: the order of magnitude, which the first run puts right
_MORE_STEPS = 10  # that a run takes to warm up, and to be traced
_Key = tuple[Point, Origin]


@dataclass(frozen=True)
class Study:
    """A study whose settings fit its model, its device and its machine; see `prepared`."""

    settings: ScaleSettings
    subject: Subject
    memory_bytes: int

    @cached_property
    def _predicted(self) -> Predicted:
        assert self.settings.machine is not None
        return Predicted(self.subject, find_machine(self.settings.machine))

    def left(self, finished: Iterable[Cell]) -> list[Run]:
        """Return the runs that give a cell which is not finished."""
        known = {(one.point, one.kind) for one in finished}
        return [run for run in runs(self.settings) if not known.issuperset(_keys(run))]

    def repeats(self, run: Run) -> int:
        """Return how many repetitions a run has; a forecast comes out the same each time."""
        return 1 if run.source == "forecast" else self.settings.repeats

    def repetition(self, run: Run, number: int, folder: Path) -> dict[Origin, Step]:
        """Do a run once, in a child of its own, and return what it found.

        Raises Crashed or InvalidInput if it failed or was not done in time. Nothing stays in the
        folder.
        """
        if run.batch_size < run.workers:
            raise Crashed(f"a batch of {run.batch_size} cannot be shared by {run.workers} workers")
        if run.source == "forecast":
            return {"predicted": self._predicted.step(run.method, run.workers, run.batch_size)}
        try:
            return self._in_child(run, folder)
        except Crashed as error:
            which = f"repetition {number} of {self.repeats(run)}: " if number > 1 else ""
            raise Crashed(f"{which}{error}") from None

    def cells(self, run: Run, steps: Sequence[Mapping[Origin, Step]]) -> list[Cell]:
        """Return the cells of a run whose repetitions found these steps."""
        return [
            cell(
                point,
                kind,
                [found[kind] for found in steps],
                self.settings.samples,
                self._capacity(run),
            )
            for point, kind in _keys(run)
        ]

    def _in_child(self, run: Run, folder: Path) -> dict[Origin, Step]:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
            arguments = command(run, self.settings, self.subject.shape, Path(scratch))
            said = answer(arguments, self.settings.deadline_s)
        if run.source == "rehearse":
            return rehearsed_steps(RehearsalResult.model_validate(said))
        return measured_steps(Result.model_validate(said))

    def _capacity(self, run: Run) -> float:
        """Return what a worker may use: its device's memory, or its part of this machine's."""
        if run.source == "forecast":
            return self._predicted.capacity_bytes
        if run.source == "rehearse":
            return self._device.device.memory_bytes
        return self.memory_bytes / run.workers

    @cached_property
    def _device(self) -> KnownDevice:
        assert self.settings.device is not None
        return find_device(self.settings.device)

    def expected(self, run: Run) -> Expectation:
        """Return about how long a run takes, to be put right by those that have ended."""
        if run.source == "forecast":
            return Expectation(0.5, 0.0, 0)
        settings, share = self.settings, -(-run.batch_size // run.workers)
        start_s = _START_S + settings.profile_s
        repeats = self.repeats(run)
        steps = repeats * (num_steps(run, settings) + _MORE_STEPS)
        return Expectation(repeats * start_s, self._step_s(run) * share, steps)

    def _step_s(self, run: Run) -> float:
        """Return about the seconds of a step for each sample of a worker."""
        if run.source == "rehearse":
            return self._paced_s
        return self.subject.flops * max(1.0, run.workers / _cores()) / _FLOPS_PER_S

    @cached_property
    def _paced_s(self) -> float:
        known = self._device
        rate = Roofline.of(known.machine).rates[compute_lane(known.device.name)]
        times = layer_times(self.subject.workload(self.subject.usual_size), rate)
        whole_s = sum(times.forward_s) + sum(times.backward_s) + times.update_s
        return whole_s / self.subject.usual_size


def prepared(settings: ScaleSettings) -> Study:
    """Return the study. InvalidInput if its model, device or machine cannot be used."""
    if settings.device is not None:
        find_device(settings.device)
    if settings.machine is not None:
        find_machine(settings.machine)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Study(settings, subject_of(settings), memory_bytes)


def swept(folder: Path) -> None:
    """Remove what a killed study has left in its folder."""
    for path in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(path, ignore_errors=True)


@dataclass
class _Repeated:
    """What a run has found so far, and the seconds that it took."""

    steps: list[dict[Origin, Step]] = field(default_factory=list)
    taken_s: float = 0.0
    failed: bool = False


def carry_out(
    study: Study,
    todo: Sequence[Run],
    folder: Path,
    begin: Callable[[Run], None],
    done: Callable[[Run, list[Cell], float], None],
) -> None:
    """Do the runs. `done` is given each one's cells, as soon as they are known, and its seconds.

    The repetitions of runs that differ in their method alone take turns, and which goes first
    changes, so that a machine that slows down slows all methods.
    """
    for group in compared(todo):
        repeated = {run: _Repeated() for run in group}
        for number in range(1, study.repeats(group[0]) + 1):
            first = (number - 1) % len(group)
            for run in (*group[first:], *group[:first]):
                if not repeated[run].failed:
                    begin(run)
                    _repeat(study, run, number, folder, repeated[run], done)


def _repeat(
    study: Study,
    run: Run,
    number: int,
    folder: Path,
    so_far: _Repeated,
    done: Callable[[Run, list[Cell], float], None],
) -> None:
    """Do a run once more. What fails is said in its cells, and ends it."""
    started = time.monotonic()
    cells: list[Cell] = []
    try:
        so_far.steps.append(study.repetition(run, number, folder))
        if len(so_far.steps) == study.repeats(run):
            cells = study.cells(run, so_far.steps)
    except (Crashed, InvalidInput) as error:
        so_far.failed = True
        cells = [Cell(**point._asdict(), kind=kind, error=str(error)) for point, kind in _keys(run)]
    so_far.taken_s += time.monotonic() - started
    if cells:
        done(run, cells, so_far.taken_s)


def _keys(run: Run) -> list[_Key]:
    return [(point, kind) for point in run.points for kind in run.kinds]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
