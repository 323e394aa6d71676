"""List the runs of a scaling study, start a run in a child process, and compute cells.

A cell is the epoch time of one strategy, number of workers and batch size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.reading import read_json
from paceline.core.timeline import Origin, quartiles
from paceline.links.processes import module_command, output, reason
from paceline.planner.forecast import range_of
from paceline.records.result import RunResult
from paceline.records.scale import Point, ScaleCell, ScaleSettings
from paceline.report.format import counted

_PREFIX = "paceline: "
_FEWEST_STEPS = 5  # number of steps, if a run is needed only for its prediction
_LEARNING_RATE = "0.001"  # keeps deep networks from diverging on random samples
_NOT_PARTS = ("step", "hidden")  # keys of `RunStep.parts` that are not summands of a step


class Crashed(Exception):
    """A run failed in its child process; the text is the reason in one line."""


@dataclass(frozen=True)
class StudyRun:
    """A run that finds a step's time: a training, a rehearsal (emulated layers) or a forecast.

    A run yields a result (cell) for each pair of a point in `points` (strategy, workers, batch
    size, scaling) and a kind in `kinds`, such as measured. Points of strong and weak scaling share
    a run if the steps are equal: two workers that share a batch of 32 have 16 samples each.
    """

    source: Origin
    method: str
    workers: int
    batch_size: int
    kinds: tuple[Origin, ...]
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        """A description of the run for a progress bar."""
        kinds, workers = " and ".join(self.kinds), counted(self.workers, "worker")
        return f"{kinds} {self.method}, {workers}, {self.batch_size}"

    @property
    def keys(self) -> list[tuple[Point, Origin]]:
        """The (point, kind) pairs of the results (cells) that the run yields."""
        return [(point, kind) for point in self.points for kind in self.kinds]


def runs(settings: ScaleSettings) -> Iterator[StudyRun]:
    """Yield all runs of a study, in the order of their results (cells)."""
    steps: dict[tuple[str, int, int], list[Point]] = {}
    for point in settings.points:
        steps.setdefault((point.method, point.workers, point.batch_size), []).append(point)
    kinds: dict[Origin, tuple[Origin, ...]] = {
        one: (one,) for one in (Origin.MEASURED, Origin.REHEARSED) if one in settings.kinds
    }
    if settings.machine is not None:
        kinds[Origin.PREDICTED] = (Origin.PREDICTED,)
    elif Origin.PREDICTED in settings.kinds:
        # Without --machine, a training or rehearsal of the same steps also yields the prediction.
        first = next(iter(kinds), Origin.MEASURED)
        kinds[first] = (*kinds.get(first, ()), Origin.PREDICTED)
    for (method, workers, batch_size), points in steps.items():
        for source, own in kinds.items():
            yield StudyRun(source, method, workers, batch_size, own, tuple(points))


def run_arguments(
    run: StudyRun, settings: ScaleSettings, shape: tuple[int, ...] | None, output: Path
) -> list[str]:
    """Return the arguments with which `paceline` carries out a run and writes into `output`.

    `shape`: shape of random samples; None trains the model on its own data.
    """
    options: dict[str, object] = {
        "strategy": run.method,
        "workers": run.workers,
        "batch-size": run.batch_size,
        "output": output,
    }
    if run.source is Origin.REHEARSED:
        assert settings.device is not None
        options |= {"device": settings.device, "steps": settings.steps}
        if shape := shape or settings.input_shape:
            options["input-shape"] = "x".join(map(str, shape))
    else:
        options |= _samples(run, settings, shape)
        options["profile-s"] = settings.profile_s
    command = "rehearse" if run.source is Origin.REHEARSED else "train"
    texts = chain.from_iterable((f"--{name}", str(value)) for name, value in options.items())
    is_overhead = settings.overhead and run.workers == 1
    with_itself = ["--strategy-option", "exchange_alone=true"] if is_overhead else []
    return [command, settings.model, *texts, *with_itself]


def _samples(
    run: StudyRun, settings: ScaleSettings, shape: tuple[int, ...] | None
) -> dict[str, object]:
    if shape is None:
        return {"steps": num_steps(run, settings)}
    # Every class needs at least one sample.
    samples = max(num_steps(run, settings) * run.batch_size, settings.classes)
    shaped = "x".join(map(str, shape))
    return {
        "data": f"synthetic:{shaped},classes={settings.classes},samples={samples}",
        "epochs": 1,
        "learning-rate": _LEARNING_RATE,
    }


def num_steps(run: StudyRun, settings: ScaleSettings) -> int:
    """Return a repetition's number of steps; it is small if only the prediction is needed."""
    return settings.steps if run.source in run.kinds else _FEWEST_STEPS


def answer(arguments: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """Run `paceline ARGUMENTS --json` in a child process and return its JSON object.

    Raises Crashed with the child's error or exit status. The child and its workers have ended when
    this function returns or raises; they also end if this process is killed.
    """
    try:
        done = output(module_command("paceline", *arguments, "--json"), deadline_s)
    except TimeoutError as error:
        raise Crashed(str(error)) from None
    if done.returncode:
        # Paceline prints its errors with a prefix; for other errors, report the exit status.
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        own = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
        if done.returncode < 0 or not lines:
            raise Crashed(reason(done.returncode))
        raise Crashed(own[-1] if own else f"{reason(done.returncode)}; stderr ends in: {lines[-1]}")
    try:
        found = read_json(done.stdout.encode(), "stdout")
    except InvalidInput:
        problem = "`paceline --json` printed no JSON; does the model or one of its imports print?"
        raise Crashed(problem) from None
    if not isinstance(found, dict):
        raise Crashed("`paceline --json` printed JSON that is not an object")
    return found


@dataclass(frozen=True)
class RunStep:
    """The step of one repetition: its duration, its parts in seconds, and a worker's memory.

    `range_share`: the possible error of a predicted duration, relative to this duration.
    """

    seconds: float
    parts: Mapping[str, float]
    memory_bytes: int
    range_share: float = 0.0

    @property
    def range_s(self) -> tuple[float, float]:
        """The shortest and longest expected duration; both are `seconds` for a measured step."""
        return range_of(self.seconds, self.range_share)

    @property
    def shares(self) -> dict[str, float]:
        """The parts as fractions of the step; without "step" and "hidden", they add up to 1."""
        whole = sum(value for name, value in self.parts.items() if name not in _NOT_PARTS)
        return {name: value / whole if whole else 0.0 for name, value in self.parts.items()}


def steps_of(result: RunResult) -> dict[Origin, RunStep]:
    """Map origins to a run's steps: the measured or rehearsed step, and the predicted step.

    Both steps of a rehearsal get the predicted memory, because emulated layers do not use the
    memory of real layers.
    """
    assert result.comparison is not None  # synchronous runs, such as a study's, have one
    assert result.step_s is not None
    assert result.predicted_step_s is not None
    (plan,) = (row for row in result.plans if row.strategy == result.strategy)
    planned = max(plan.memory_nbytes[name] for name in plan.devices)
    held = planned if result.is_rehearsal else max(result.peak_memory_bytes)
    rows = result.comparison.rows
    predicted = {row.quantity: row.left_s for row in rows}
    happened = {row.quantity: row.right_s for row in rows}
    return {
        result.origin: RunStep(result.step_s, happened, held),
        Origin.PREDICTED: RunStep(result.predicted_step_s, predicted, planned, plan.range_share),
    }


def cell(
    point: Point, kind: Origin, steps: Sequence[RunStep], samples: int, capacity_bytes: float
) -> ScaleCell:
    """Compute a cell (the result for an epoch) from the steps of a run's repetitions.

    `samples`: number of samples in an epoch; with weak scaling, of each worker.
    `capacity_bytes`: memory that is available to a worker.
    """
    number = point.steps_of(samples)
    _, middle_s, _ = quartiles([step.seconds for step in steps])
    shortest_s, longest_s = zip(*(step.range_s for step in steps), strict=True)
    epoch_s = number * middle_s
    parts = {
        f"{name}_s": epoch_s * fmean(step.shares.get(name, 0.0) for step in steps)
        for name in ("forward", "backward", "exposed", "update", "idle", "hidden")
    }
    return ScaleCell(
        **point._asdict(),
        kind=kind,
        epoch_s=epoch_s,
        spread=(number * quartiles(shortest_s)[0], number * quartiles(longest_s)[2]),
        **parts,
        memory_bytes=max(step.memory_bytes for step in steps),
        capacity_bytes=capacity_bytes,
    )
