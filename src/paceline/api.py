"""What a program calls: plan and train."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.strategy import Strategy
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.launching import carry_out, new_run_id, under_torchrun
from paceline.machine_file import read_machine
from paceline.models import describe, find
from paceline.planner import Forecast, forecast, rank
from paceline.record.trace import read_timeline
from paceline.report import write_report
from paceline.result import Result, read_result
from paceline.settings import validated_settings
from paceline.strategies import STRATEGIES
from paceline.worker import Order

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
        written, wanted = write_report(self.folder), Path(path)
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
    if under_torchrun():
        raise InvalidInput(
            "paceline.train starts workers of its own: run this program without torchrun, or "
            "`torchrun -m paceline train`"
        )
    chosen = validated_settings(settings | {"model": model, "data": data})
    run_id = new_run_id(chosen)
    carry_out(Order(verb="train", settings=chosen, run_id=run_id, quiet=True))
    folder = chosen.output / run_id
    return Run(read_result(folder), folder)


def plan(
    model: str | nn.Module,
    machine: str | Path | Machine,
    batch_size: int = 64,
    input_shape: tuple[int, ...] | None = None,
    workers: int | None = None,
) -> list[Forecast]:
    """Return what each strategy would take on a machine with 1, 2, ... workers, best first.

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
        workload = _workload(model, -(-batch_size // count), input_shape)
        forecasts += [
            forecast(workload, known, strategy, strategy.config(workers=count), batch_size)
            for strategy in _strategies(count)
        ]
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


def _workload(
    model: str | nn.Module, batch_size: int, input_shape: tuple[int, ...] | None
) -> Workload:
    if isinstance(model, nn.Module):
        name, built, shape = type(model).__name__, model, input_shape
    else:
        architecture = find(model)
        name, shape = model, input_shape or architecture.input_shape
        # A factory of the user's may compute with the tensors that it makes.
        with torch.device("meta" if architecture.num_classes else "cpu"):
            built = architecture.build(None)
    if shape is None:
        raise InvalidInput(
            f"input_shape: model {name} does not say it; write for example 3x224x224"
        )
    return describe(built, torch.zeros(batch_size, *shape), name)
