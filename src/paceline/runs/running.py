"""The functions `train` and `rehearse`, and the run that they return."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import InvalidInput
from paceline.core.timeline import Timeline
from paceline.links.forking import forked_from_here
from paceline.record.trace import read_timeline
from paceline.records.result import RunResult, read_run
from paceline.report import write_report
from paceline.report.terminal import log_to_stderr
from paceline.runs.launching import carry_out, requested, take_part, under_torchrun
from paceline.runs.restarts import Verb
from paceline.training.recipes.named import given
from paceline.training.recipes.recipe import Recipe


@dataclass(frozen=True)
class Run:
    """A finished training or rehearsal, with its result and folder.

    The folder contains result.json, trace.json and report.html.
    """

    result: RunResult
    folder: Path

    @property
    def accuracy(self) -> float | None:
        """The share of test samples classified correctly by the model; None for a rehearsal."""
        return self.result.accuracy

    @property
    def timeline(self) -> Timeline:
        """The timeline of the traced steps of the training or rehearsal."""
        return read_timeline(self.folder / "trace.json", self.result.origin)

    def report(self, path: str | Path) -> Path:
        """Copy the report to `path`, and return `path`."""
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
    keep_all: bool = False,
    checkpoint_every: str = "300s",
    keep_checkpoints: int = 2,
    resume: str | Path | None = None,
    max_restarts: int = 0,
    elastic: bool = False,
    lighthouse: str | None = None,
    worker_ids: str | None = None,
    exchange_alone: bool = False,
    profile_s: float | None = None,
    deadline_s: float = 30.0,
    wait_s: float = 600.0,
    listen: str | None = None,
    keys: str | Path | None = None,
    run_name: str | None = None,
    output: str | Path = "runs",
    tensorboard: str | Path | None = None,
) -> Run:
    """Train a model on this machine and return the finished run.

    `model` is a built-in name, "package.module:factory" or a recipe; the workers of a recipe are
    forked from this process. The other arguments are fields of `paceline.TrainSettings`; None
    selects the default of the strategy or of the model. With `resume`, arguments left at their
    default take the values of the resumed run. Raises InvalidInput for unusable arguments,
    WorkerLost for a worker that died, and WorkersFailed for an error in the workers. Under
    torchrun, this process is one rank. A hub or coordinator also runs in this process.
    """
    return _done("train", train, locals())


def rehearse(
    model: str | Recipe,
    *,
    device: str | None = None,
    slowdown: float | tuple[float, ...] | None = None,
    strategy: str = "allreduce",
    options: Mapping[str, Any] | None = None,
    codec: str | None = None,
    workers: int | str = 2,
    batch_size: int = 64,
    balance: Literal["auto"] | None = None,
    forward_ms: float | None = None,
    backward_ms: float | None = None,
    update_ms: float | None = None,
    input_shape: tuple[int, ...] | None = None,
    steps: int = 20,
    exchange_alone: bool = False,
    profile_s: float | None = None,
    deadline_s: float = 30.0,
    wait_s: float = 600.0,
    listen: str | None = None,
    keys: str | Path | None = None,
    run_name: str | None = None,
    output: str | Path = "runs",
) -> Run:
    """Rehearse a model's training on emulated devices; nothing is learned.

    The arguments are fields of `paceline.RehearseSettings`. Either `device` or `slowdown` is
    required. Raises the same errors as `train`.
    """
    return _done("rehearse", rehearse, locals())


def _done(verb: Verb, called: Callable[..., Run], arguments: Mapping[str, Any]) -> Run:
    # Drop arguments left at their default: a strategy may define its own defaults.
    parameters = signature(called).parameters
    values = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in arguments.items()
        if value is not None and value != parameters[name].default
    }
    if not isinstance(values["model"], str | Recipe):
        hint = "each worker builds its own model"
        problem = f"must be a name or a paceline.Recipe, not {type(values['model']).__name__}"
        raise InvalidInput("model", problem, hint=hint)
    with ExitStack() as stack:
        if isinstance(values["model"], Recipe):
            if "listen" in values:
                hint = "pass the model by a name such as package.module:factory"
                raise InvalidInput("listen", "cannot be combined with a Recipe", hint=hint)
            values["model"] = stack.enter_context(given(values["model"]))
            if not under_torchrun():
                stack.enter_context(forked_from_here())
        log_to_stderr()
        request = requested(verb, values, quiet=True)
        if under_torchrun():
            return Run(*take_part(request))
        folder = carry_out(request)
    return Run(read_run(folder), folder)
