"""The runs of a study: which cells each of them gives, and the command that does it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.timeline import Origin
from paceline.scale_settings import Point, ScaleSettings

Source = Literal["train", "rehearse", "forecast"]
TIMED: dict[Source, Origin] = {
    "train": "measured",
    "rehearse": "rehearsed",
    "forecast": "predicted",
}
_FEWEST_STEPS = 5  # of a run that is only there for its prediction
_LEARNING_RATE = "0.001"  # deep networks must not run away on random samples


@dataclass(frozen=True)
class Run:
    """A step to be timed, and the cells that it gives.

    Cells of strong and of weak scaling whose steps are the same share a run: two workers that share
    a batch of 32 do what two workers do that have 16 samples each.
    """

    source: Source
    method: str
    workers: int
    batch_size: int
    kinds: tuple[Origin, ...]
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        """What a progress bar calls it."""
        plural = "s" * (self.workers > 1)
        return f"{self.source} {self.method}, {self.workers} worker{plural}, {self.batch_size}"


def runs(settings: ScaleSettings) -> Iterator[Run]:
    """Yield the runs that all cells need, in the order of the cells."""
    steps: dict[tuple[str, int, int], list[Point]] = {}
    for point in settings.points:
        steps.setdefault((point.method, point.workers, point.batch_size), []).append(point)
    sources = tuple(_sources(settings))
    for (method, workers, batch_size), points in steps.items():
        for source, kinds in sources:
            yield Run(source, method, workers, batch_size, kinds, tuple(points))


def compared(todo: Iterable[Run]) -> list[list[Run]]:
    """Return the runs in groups that differ in nothing but their method."""
    groups: dict[tuple[Source, int, int], list[Run]] = {}
    for run in todo:
        groups.setdefault((run.source, run.workers, run.batch_size), []).append(run)
    return list(groups.values())


def _sources(settings: ScaleSettings) -> Iterator[tuple[Source, tuple[Origin, ...]]]:
    """Yield where the kinds of cells come from: a run predicts, too, before it measures."""
    kinds = settings.kinds
    unpredicted = settings.predict and settings.machine is None
    if "measured" in kinds:
        yield "train", ("measured", "predicted") if unpredicted else ("measured",)
        unpredicted = False
    if "rehearsed" in kinds:
        yield "rehearse", ("rehearsed", "predicted") if unpredicted else ("rehearsed",)
        unpredicted = False
    if unpredicted:
        yield "train", ("predicted",)
    if settings.machine is not None:
        yield "forecast", ("predicted",)


def command(run: Run, settings: ScaleSettings, shape: tuple[int, ...], output: Path) -> list[str]:
    """Return the arguments of `paceline` that do a run and leave what it writes in `output`.

    `shape` is that of a sample.
    """
    shaped = "x".join(map(str, shape))
    common = {
        "strategy": run.method,
        "workers": run.workers,
        "batch-size": run.batch_size,
        "output": output,
    }
    if run.source == "rehearse":
        assert settings.device is not None
        own = {"device": settings.device, "steps": settings.steps, "input-shape": shaped}
        return ["rehearse", settings.model, *_options(common | own)]
    own = {
        "data": f"synthetic:{shaped},classes={settings.classes},samples={_samples(run, settings)}",
        "epochs": 1,
        "profile-s": settings.profile_s,
        "learning-rate": _LEARNING_RATE,
        "seed": settings.seed,
    }
    return ["train", settings.model, *_options(common | own)]


def _samples(run: Run, settings: ScaleSettings) -> int:
    """Return how many samples make the steps that are to be taken; each class needs one."""
    return max(num_steps(run, settings) * run.batch_size, settings.classes)


def num_steps(run: Run, settings: ScaleSettings) -> int:
    """Return how many steps a repetition is asked for; the fewest if it is there to predict."""
    return settings.steps if run.kinds[0] == TIMED[run.source] else _FEWEST_STEPS


def _options(values: Mapping[str, object]) -> Iterable[str]:
    for name, value in values.items():
        yield from (f"--{name}", str(value))
