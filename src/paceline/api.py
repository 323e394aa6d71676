"""What a program calls: plan, rehearse and train."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.cluster import Cluster
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.strategy import Strategy
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.launching import carry_out, order, under_torchrun
from paceline.machine_file import find_machine
from paceline.models.workload import workload_of
from paceline.planner import Ranking, search
from paceline.planner.sweep import Sweep, parse_range
from paceline.planner.sweep import sweep as sweep_links
from paceline.record.trace import read_timeline
from paceline.report import write_report
from paceline.result import RehearsalResult, Result, read_result
from paceline.strategies import STRATEGIES
from paceline.uneven import order as uneven_order
from paceline.uneven import train_uneven
from paceline.uneven_result import UnevenResult
from paceline.wheel_rehearsal import rehearse_wheel
from paceline.wheel_result import WheelRehearsal, WheelResult
from paceline.wheel_run import train_wheel
from paceline.wheel_settings import validated_wheel, validated_wheel_rehearsal
from paceline.worker import Verb


@dataclass(frozen=True)
class Run:
    """A finished run: its result, and the folder with result.json, trace.json and report.html."""

    result: Result | UnevenResult | WheelResult
    folder: Path

    @property
    def accuracy(self) -> float:
        """The share of the test samples that the trained model gets right.

        Where a sample may have several labels, the precision@1: `result.score` says which.
        """
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

    result: RehearsalResult | WheelRehearsal
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

    With strategy="hogbatch" they are those of `paceline.settings.UnevenSettings`, `policy` may be
    one of them, and the result is a `paceline.uneven_result.UnevenResult`. This process then
    coordinates the workers, and raises InvalidInput for what they found wrong.

    With "subbatch" `options` name the codecs and the head, as {"activations": "dynamic8"}, and
    `result.split` says what travelled and what memory was saved.

    With "wheel" they are those of `paceline.wheel_settings.WheelSettings`, the result is a
    `paceline.wheel_result.WheelResult`, and this process is the hub.
    """
    if settings.get("strategy") == "wheel":
        _check_alone("train")
        with torch.random.fork_rng(devices=[]):
            wanted = validated_wheel(settings | {"model": model, "data": data})
            return Run(*train_wheel(wanted, quiet=True))
    if settings.get("strategy") == "hogbatch":
        return _train_uneven(settings | {"model": model, "data": data})
    folder = _done("train", settings | {"model": model, "data": data})
    result = read_result(folder)
    assert isinstance(result, Result)
    return Run(result, folder)


def _train_uneven(settings: dict[str, Any]) -> Run:
    _check_alone("train")
    with torch.random.fork_rng(devices=[]):  # the program's random numbers are its own
        result, folder = train_uneven(uneven_order(settings), quiet=True)
    return Run(result, folder)


def rehearse(model: str, **settings: Any) -> Rehearsal:
    """Rehearse a model's training on devices that this machine need not have; nothing is learnt.

    `settings` are the fields of `paceline.settings.RehearseSettings`: `device` or `stretch` among
    them. Raises the same errors as `train`.

    With strategy="wheel" they are those of `paceline.wheel_settings.WheelRehearseSettings`, and the
    result is a `paceline.wheel_result.WheelRehearsal`. This process is then the hub.
    """
    if settings.get("strategy") == "wheel":
        _check_alone("rehearse")
        with torch.random.fork_rng(devices=[]):
            wanted = validated_wheel_rehearsal(settings | {"model": model})
            return Rehearsal(*rehearse_wheel(wanted, quiet=True))
    folder = _done("rehearse", settings | {"model": model})
    result = read_result(folder)
    assert isinstance(result, RehearsalResult)
    return Rehearsal(result, folder)


def _done(verb: Verb, settings: dict[str, Any]) -> Path:
    """Do it with workers of our own, and return the folder of the run."""
    _check_alone(verb)
    wanted = order(verb, settings, quiet=True)
    carry_out(wanted)
    return wanted.settings.output / wanted.run_id


def _check_alone(verb: Verb) -> None:
    if under_torchrun():
        raise InvalidInput(
            f"paceline.{verb} starts workers of its own: run this program without torchrun, or "
            f"`torchrun -m paceline {verb}`"
        )


def plan(
    model: str | nn.Module,
    machine: str | Path | Machine,
    batch_size: int = 64,
    input_shape: tuple[int, ...] | None = None,
    workers: int | None = None,
) -> Ranking:
    """Return what each strategy would take on a machine with 1, 2, ... workers, best first.

    A ranking is a sequence of forecasts: of each strategy with each codec that has something to
    encode and whose speed the machine says, each choice of devices, and the best chunk. It says too
    what was `refused` and why, how many workers are `worth` using, and by its `advice` whether a
    codec pays.

    `machine` is a file or the name of one of machines/*.toml, `batch_size` the samples of a step
    over all workers, `input_shape` that of one sample; built-in models know theirs. With `workers`
    only that number is looked at. InvalidInput if the model, the machine or the numbers do not fit.
    """
    question = _question(model, machine, batch_size, input_shape)
    return search(*question, batch_size, workers)


def sweep(
    model: str | nn.Module,
    machine: str | Path | Machine,
    over: str,
    batch_size: int = 64,
    input_shape: tuple[int, ...] | None = None,
    workers: int | None = None,
) -> Sweep:
    """Return the rankings of `plan` along a range of what the links between hosts can do.

    `over` is "bandwidth=100M:10G", in bits a second, or "latency=10u:1m", in seconds; on a machine
    of one host all links have it. Without `workers` all devices are used. InvalidInput as by
    `plan`.
    """
    question = _question(model, machine, batch_size, input_shape)
    return sweep_links(*question, batch_size, parse_range(over), workers)


_Question = tuple[Callable[[int], Workload], Machine, tuple[Strategy, ...]]


def _question(
    model: str | nn.Module,
    machine: str | Path | Machine,
    batch_size: int,
    input_shape: tuple[int, ...] | None,
) -> _Question:
    known = machine if isinstance(machine, Machine) else find_machine(str(machine))
    if batch_size < 1:
        raise InvalidInput(f"batch_size: must be at least 1, not {batch_size}")
    if input_shape is not None and (not input_shape or min(input_shape) < 1):
        raise InvalidInput(f"input_shape: sizes must be at least 1, not {input_shape}")

    def workload(samples: int) -> Workload:
        return workload_of(model, samples, input_shape)

    # Between hosts that no levels join, a hierarchy is what strategy host does.
    names = [name for name in STRATEGIES if name != "hierarchy" or isinstance(known, Cluster)]
    return workload, known, tuple(STRATEGIES[name] for name in names)
