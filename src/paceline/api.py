"""What a program calls: plan, rehearse and train."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.strategy import Strategy
from paceline.core.timeline import Timeline
from paceline.launching import carry_out, order, under_torchrun
from paceline.machine_file import read_machine
from paceline.models.workload import workload_of
from paceline.planner import Forecast, forecasts_of, rank
from paceline.record.trace import read_timeline
from paceline.report import write_report
from paceline.result import RehearsalResult, Result, read_result
from paceline.strategies import STRATEGIES
from paceline.worker import Verb

_FEW_DEVICES = 8


@dataclass(frozen=True)
class Run:
    """A finished run: its result, and the folder with result.json, trace.json and report.html."""

    result: Result
    folder: Path

    @property
    def accuracy(self) -> float:
        """The share of the test samples that the trained model gets right."""
        return self.result.accuracy

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the traced steps."""
        return read_timeline(self.folder / "trace.json", "measured")

    def report(self, path: str | Path) -> Path:
        """Write the report to `path` too, and return it."""
        return _report(self.folder, path)


@dataclass(frozen=True)
class Rehearsal:
    """A finished rehearsal: its result, and the folder with the same files as a run's."""

    result: RehearsalResult
    folder: Path

    @property
    def timeline(self) -> Timeline:
        """The rehearsed timeline of the traced steps."""
        return read_timeline(self.folder / "trace.json", "rehearsed")

    def report(self, path: str | Path) -> Path:
        """Write the report to `path` too, and return it."""
        return _report(self.folder, path)


def _report(folder: Path, path: str | Path) -> Path:
    written, wanted = write_report(folder), Path(path)
    if not (wanted.exists() and wanted.samefile(written)):
        shutil.copyfile(written, wanted)
    return wanted


def train(model: str, data: str = "digits", **settings: Any) -> Run:
    """Train a model on this machine and return the finished run.

    `model` is a built-in name or "package.module:factory": workers are processes, and each builds
    its own. `settings` are the fields of `paceline.settings.TrainSettings`. Raises InvalidInput for
    what cannot be done, WorkerLost for a worker that died, WorkersFailed for what workers found
    wrong, with their words. Progress goes to standard error.
    """
    folder = _done("train", settings | {"model": model, "data": data})
    result = read_result(folder)
    assert isinstance(result, Result)
    return Run(result, folder)


def rehearse(model: str, **settings: Any) -> Rehearsal:
    """Rehearse a model's training on devices that this machine need not have; nothing is learnt.

    `settings` are the fields of `paceline.settings.RehearseSettings`: `device` or `stretch` among
    them. Raises the same errors as `train`.
    """
    folder = _done("rehearse", settings | {"model": model})
    result = read_result(folder)
    assert isinstance(result, RehearsalResult)
    return Rehearsal(result, folder)


def _done(verb: Verb, settings: dict[str, Any]) -> Path:
    """Do it with workers of our own, and return the folder of the run."""
    if under_torchrun():
        raise InvalidInput(
            f"paceline.{verb} starts workers of its own: run this program without torchrun, or "
            f"`torchrun -m paceline {verb}`"
        )
    wanted = order(verb, settings, quiet=True)
    carry_out(wanted)
    return wanted.settings.output / wanted.run_id


def plan(
    model: str | nn.Module,
    machine: str | Path | Machine,
    batch_size: int = 64,
    input_shape: tuple[int, ...] | None = None,
    workers: int | None = None,
) -> list[Forecast]:
    """Return what each strategy would take on a machine with 1, 2, ... workers, best first.

    With each codec too, where there is something to encode and the machine says how fast that is;
    `paceline.planner.advise` says whether one pays.

    `machine` is a file such as machines/*.toml, `batch_size` the samples of a step over all
    workers, `input_shape` that of one sample; built-in models know theirs. With `workers` only that
    number is looked at. InvalidInput if the model, the machine or the numbers do not fit.
    """
    known = machine if isinstance(machine, Machine) else read_machine(Path(machine))
    if batch_size < 1:
        raise InvalidInput(f"batch_size: must be at least 1, not {batch_size}")
    if input_shape is not None and (not input_shape or min(input_shape) < 1):
        raise InvalidInput(f"input_shape: sizes must be at least 1, not {input_shape}")
    forecasts: list[Forecast] = []
    for count in _worker_counts(known, batch_size, workers):
        workload = workload_of(model, -(-batch_size // count), input_shape)
        for strategy in _strategies(count):
            forecasts += forecasts_of(workload, known, strategy, count, batch_size)
    return rank(forecasts)


def _strategies(workers: int) -> list[Strategy]:
    """Return all strategies; one worker has nobody to exchange with, and all are the same."""
    return list(STRATEGIES.values())[: None if workers > 1 else 1]


def _worker_counts(machine: Machine, batch_size: int, wanted: int | None) -> list[int]:
    """Return the wanted count, or all up to a few, then only doublings and the whole machine."""
    num_devices = len(machine.devices)
    most = min(num_devices, batch_size)
    if wanted is not None:
        if not 1 <= wanted <= most:
            raise InvalidInput(
                f"workers: {wanted} do not fit; machine {machine.name} with batch_size "
                f"{batch_size} allows 1 to {most}"
            )
        return [wanted]
    counts = set(range(1, min(most, _FEW_DEVICES) + 1)) | {most}
    counts |= {_FEW_DEVICES << i for i in range(num_devices.bit_length())}
    return sorted(count for count in counts if count <= most)
