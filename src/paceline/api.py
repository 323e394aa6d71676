"""The verbs that a program calls: train, rehearse, plan and sweep."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from torch import nn

from paceline.core.cluster import Cluster
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.strategy import Strategy
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.links.forking import forked_from_here
from paceline.planner import Ranking, search
from paceline.planner.measured import MeasuredRate, calibrated
from paceline.planner.sweep import Sweep, parse_range
from paceline.planner.sweep import sweep as sweep_links
from paceline.recipes.named import given, workload_of
from paceline.recipes.recipe import Recipe
from paceline.record.trace import read_timeline
from paceline.records.machine_file import find_machine
from paceline.records.profile import ProfileResult
from paceline.records.result import RunResult, read_result, read_run
from paceline.report import write_report
from paceline.report.terminal import log_to_stderr
from paceline.runs.launching import (
    carry_out,
    requested,
    take_part,
    under_torchrun,
    with_ranks,
)
from paceline.runs.restarts import Verb
from paceline.strategies import STRATEGIES, find_strategy


@dataclass(frozen=True)
class Run:
    """A finished training or rehearsal: its result, and its folder.

    The folder has result.json, trace.json and report.html.
    """

    result: RunResult
    folder: Path

    @property
    def accuracy(self) -> float | None:
        """The share of the test samples that the trained model gets right.

        Where a sample may have several labels, the precision@1: `result.score` says which. None of
        a rehearsal.
        """
        return self.result.accuracy

    @property
    def timeline(self) -> Timeline:
        """The timeline of the traced steps, measured or rehearsed."""
        return read_timeline(self.folder / "trace.json", self.result.origin)

    def report(self, path: str | Path) -> Path:
        """Write the report to `path` too, and return it."""
        written, wanted = write_report(self.folder), Path(path)
        if not (wanted.exists() and wanted.samefile(written)):
            shutil.copyfile(written, wanted)
        return wanted


def train(
    model: str | Recipe,
    data: str | None = None,
    *,
    strategy: str = "allreduce",
    options: Mapping[str, Any] | None = None,
    policy: str | None = None,
    codec: str | None = None,
    workers: int | str = 2,
    batch_size: int = 64,
    epochs: int | None = None,
    steps: int | None = None,
    optimizer: str | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    learning_rate: float | None = None,
    momentum: float | None = None,
    schedule: str | None = None,
    warmup_steps: int = 0,
    precision: Literal["float32", "bfloat16"] = "float32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    evaluate_every: int | None = None,
    seed: int = 0,
    balance: Literal["auto"] | None = None,
    force: bool = False,
    checkpoint_every: str = "300s",
    keep: int = 2,
    resume: str | Path | None = None,
    restarts: int = 0,
    profile_s: float | None = None,
    deadline_s: float = 30.0,
    wait_s: float = 600.0,
    port: int = 0,
    bind: str | None = None,
    keys: str | Path | None = None,
    run: str | None = None,
    output: str | Path = "runs",
    tensorboard: str | Path | None = None,
) -> Run:
    """Train a model on this machine and return the finished run.

    `model` is a built-in name, "package.module:factory" or a recipe. Workers are processes, and
    each builds its own; a recipe's are forked from this one. Under torchrun this is one of them.
    The other arguments are the fields of `paceline.TrainSettings`, which describe themselves; None
    stands for the default that the strategy or the model has. With `resume`, what is left at its
    default here is as in that run. Raises InvalidInput
    for what cannot be done, WorkerLost for a worker that died, WorkersFailed for what workers found
    wrong, with their words. Progress goes to standard error. A strategy with a hub or a coordinator
    has that in this process.
    """
    return _done("train", train, locals())


def rehearse(
    model: str | Recipe,
    *,
    device: str | None = None,
    stretch: float | tuple[float, ...] | None = None,
    strategy: str = "allreduce",
    options: Mapping[str, Any] | None = None,
    policy: str | None = None,
    codec: str | None = None,
    workers: int | str = 2,
    batch_size: int = 64,
    balance: Literal["auto"] | None = None,
    forward_ms: float | None = None,
    backward_ms: float | None = None,
    update_ms: float | None = None,
    input_shape: tuple[int, ...] | None = None,
    steps: int = 20,
    chunk_search: Literal["runtime", "predicted"] | None = None,
    search_step: int | None = None,
    search_range: int | None = None,
    interval: int | None = None,
    profile_s: float | None = None,
    deadline_s: float = 30.0,
    wait_s: float = 600.0,
    port: int = 0,
    bind: str | None = None,
    keys: str | Path | None = None,
    run: str | None = None,
    output: str | Path = "runs",
) -> Run:
    """Rehearse a model's training on devices that this machine need not have; nothing is learnt.

    The arguments are the fields of `paceline.RehearseSettings`: `device` or `stretch` among them.
    Raises the same errors as `train`.
    """
    return _done("rehearse", rehearse, locals())


def _done(verb: Verb, called: Callable[..., Run], arguments: Mapping[str, Any]) -> Run:
    # Arguments that `called` has by default are not passed on: the strategy may have others.
    parameters = signature(called).parameters
    values = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in arguments.items()
        if value is not None and value != parameters[name].default
    }
    with ExitStack() as stack:
        if isinstance(values["model"], Recipe):
            if "bind" in values:
                raise InvalidInput(
                    "bind: workers of other machines cannot have an object of this program; name "
                    "the recipe as package.module:factory"
                )
            values["model"] = stack.enter_context(given(values["model"]))
            if not under_torchrun():
                stack.enter_context(forked_from_here())
        log_to_stderr()
        if under_torchrun():
            return Run(*take_part(requested(verb, with_ranks(values), quiet=True)))
        folder = carry_out(requested(verb, values, quiet=True))
    return Run(read_run(folder), folder)


def plan(
    model: str | nn.Module | Recipe,
    machine: str | Path | Machine,
    batch_size: int = 64,
    input_shape: tuple[int, ...] | None = None,
    workers: int | None = None,
    strategies: Sequence[str | Strategy] | None = None,
    measured: str | float | None = None,
    profile: str | Path | None = None,
) -> Ranking:
    """Forecast each strategy on a machine with 1, 2, ... workers, and rank them, best first.

    A ranking is a sequence of forecasts: of each strategy with each codec that has something to
    encode and whose speed the machine says, each choice of devices, and the best chunk. It says too
    what was `refused` and why, how many workers are `worth` using, and by its `advice` whether a
    codec pays.

    `machine` is a file or the name of one of machines/*.toml, `batch_size` the samples of a step
    over all workers, `input_shape` that of one sample; recipes and built-in models know theirs.
    With `workers` only that number is looked at, with `strategies` only these: names,
    package.module:record, or records. `measured`: the samples a second that one of the devices
    reaches by itself, such as "350/s", or "350/s@128" in batches of 128 samples; without them, in
    batches of a worker's size if `workers` says how many, or else of `batch_size`; `profile`: the
    folder or result.json of `paceline profile` with one worker on such a device, which says the
    same. InvalidInput if the model, the machine or the numbers do not fit.
    """
    return search(
        *_question(model, machine, batch_size, input_shape, strategies, workers, measured, profile),
        batch_size,
        workers,
    )


def sweep(
    model: str | nn.Module | Recipe,
    machine: str | Path | Machine,
    over: str,
    batch_size: int = 64,
    input_shape: tuple[int, ...] | None = None,
    workers: int | None = None,
    strategies: Sequence[str | Strategy] | None = None,
    measured: str | float | None = None,
    profile: str | Path | None = None,
) -> Sweep:
    """Return the rankings of `plan` along a range of what the links between hosts can do.

    `over` is "bandwidth=100M:10G", in bits a second, or "latency=10u:1m", in seconds; on a machine
    of one host all links have it. Without `workers` all devices are used. InvalidInput as by
    `plan`.
    """
    question = _question(
        model, machine, batch_size, input_shape, strategies, workers, measured, profile
    )
    return sweep_links(*question, batch_size, parse_range(over), workers)


def _question(
    model: str | nn.Module | Recipe,
    machine: str | Path | Machine,
    batch_size: int,
    input_shape: tuple[int, ...] | None,
    strategies: Sequence[str | Strategy] | None,
    workers: int | None,
    measured: str | float | None,
    profile: str | Path | None,
) -> tuple[Callable[[int], Workload], Machine, tuple[Strategy, ...]]:
    known = machine if isinstance(machine, Machine) else find_machine(str(machine))
    if batch_size < 1:
        raise InvalidInput(f"batch_size: must be at least 1, not {batch_size}")
    if input_shape is not None and (not input_shape or min(input_shape) < 1):
        raise InvalidInput(f"input_shape: sizes must be at least 1, not {input_shape}")
    if strategies is None:
        on_cluster = isinstance(known, Cluster)
        strategies = [one for one in STRATEGIES.values() if on_cluster or not one.is_for_clusters]
    named = (find_strategy(one) if isinstance(one, str) else one for one in strategies)
    workload = partial(workload_of, model, input_shape=input_shape)
    if measured is not None and profile is not None:
        raise InvalidInput("measured, profile: each says how fast a device is; give one of them")
    if measured is not None:
        own = -(-batch_size // (workers or 1))
        known = calibrated(known, workload, MeasuredRate.parse(measured), own)
    elif profile is not None:
        known = calibrated(known, workload, _profiled(Path(profile), model), batch_size)
    return workload, known, tuple(named)


def _profiled(path: Path, model: object) -> MeasuredRate:
    """Return the rate in a profile's folder or result.json; InvalidInput if it has none."""
    result = read_result(path.parent if path.is_file() else path)
    if not isinstance(result, ProfileResult) or result.settings.workers != 1:
        raise InvalidInput(
            f"profile: {path} is not of `paceline profile` with one worker, which measures a "
            "device by itself"
        )
    if isinstance(model, str) and model != result.settings.model:
        raise InvalidInput(f"profile: {path} is of model {result.settings.model}, not {model}")
    size = result.settings.batch_size
    return MeasuredRate(size / result.step.median_s, size)
