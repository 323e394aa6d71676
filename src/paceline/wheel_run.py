"""Train with strategy wheel: what `paceline train --strategy wheel` and `paceline hub` do.

This process is the hub. It starts the bodies of this machine, or waits for those of others; it
tests the model after each epoch, and writes the run's folder.
"""

import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_model

from paceline.core.errors import InvalidInput
from paceline.core.timeline import Timeline
from paceline.models import describe
from paceline.planner import Forecast, forecast
from paceline.record.trace import write_trace
from paceline.report import write_report
from paceline.report.format import duration, nbytes, number, share
from paceline.result import EpochRow
from paceline.runs import make_folder
from paceline.strategies import STRATEGIES
from paceline.strategies.hogbatch.optimizers import optimizer_of
from paceline.strategies.wheel.crew import threads_each
from paceline.strategies.wheel.order import LOOPBACK, Fitted, Run
from paceline.strategies.wheel.outcome import Outcome
from paceline.strategies.wheel.run import train
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, Purpose
from paceline.strategies.wheel.timeline import idle_shares
from paceline.tables import console
from paceline.training.fitted import fitted
from paceline.training.loop import Epoch
from paceline.training.this_machine import facts
from paceline.wheel_live import Live
from paceline.wheel_result import PurposeRow, WheelResult
from paceline.wheel_settings import WheelSettings
from paceline.wire.keys import load_hub

_MOST_PER_CORE = 4
_COLD_STEPS = 2
_NUMBERS = ("counted", "by the formula")


def train_wheel(
    settings: WheelSettings, *, as_json: bool = False, quiet: bool = False
) -> tuple[WheelResult, Path]:
    """Train, and return the result and the folder that it was written to.

    The result goes to standard output, `as_json` or as a table, unless `quiet`; progress goes to
    standard error. Raises InvalidInput and WorkerLost as `wheel.run.train` does.
    """
    out, err = console(quiet=quiet), console(stderr=True)

    def say(text: str) -> None:
        err.print(text, soft_wrap=True)

    run = build(settings)
    began = time.strftime("%Y%m%d-%H%M%S")
    folder = make_folder(settings, f"{began}-{settings.model.replace(':', '.')}-{uuid4().hex[:4]}")
    if settings.bind is None:
        run = replace(run, run_id=folder.name)
    say(
        f"{settings.model}: {run.workload.num_parameters:,} parameters in "
        f"{len(run.workload.layers)} layers; {settings.workers} workers, {run.config.lanes} a "
        "device"
    )
    found: list[Forecast | None] = []

    def begun(fitted: Fitted | None) -> None:
        found.append(predict(run, fitted))
        if found[0] is not None:
            say(f"predicted {duration(found[0].step_s)} a step: {found[0].why}")

    def report(epoch: Epoch) -> None:
        say(
            f"epoch {epoch.number + 1}/{settings.epochs}: train loss {epoch.train_loss:.4f}, "
            f"test loss {epoch.test_loss:.4f}, accuracy {epoch.accuracy:.2%}"
        )

    def prepared(address: str, pids: dict[int, tuple[int, ...]]) -> None:
        if settings.bind is not None:
            say(f"listening on {address}; waiting for {settings.workers} workers")

    with Live(err, len(run.data.train) * run.epochs) as live:
        told = replace(run, report=report, begun=begun, prepared=prepared)
        outcome = train(replace(told, look=live.look, say=say))
    result, shown = result_of(run, settings, folder.name, outcome, found[0])
    save_model(run.model, str(folder / "model.safetensors"))
    write_trace(folder / "trace.json", shown)
    (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")
    write_report(folder)
    if as_json:
        out.print_json(result.model_dump_json())
    else:
        _show(result, folder, out)
    return result, folder


def build(settings: WheelSettings) -> Run:
    """Load the data, build the model and describe it. InvalidInput if they do not fit."""
    config = settings.config()
    make = optimizer_of(settings.optimizer, settings.learning_rate, settings.momentum)
    model, data, name, num_classes, shape = fitted(settings.model, settings.data, settings.seed)
    size = ceil(settings.batch_size / settings.workers)
    workload = describe(model, torch.zeros(size, *data.sample_shape), settings.model)
    own, bodies = _devices(ceil(config.workers / config.lanes), settings)
    if settings.bind is None:
        torch.set_num_threads(threads_each(len(bodies)))
    return Run(
        model_name=name,
        num_classes=num_classes,
        data_name=settings.data,
        input_shape=shape,
        model=model,
        workload=workload,
        data=data,
        config=config,
        make=make,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        seed=settings.seed,
        device=torch.device(own),
        devices=bodies if settings.bind is None else None,
        address=settings.bind or LOOPBACK,
        run_id=settings.run,
        keys=None if settings.keys is None else load_hub(settings.keys),
        profile_s=settings.profile_s,
        deadline_s=settings.deadline_s,
        wait_s=settings.wait_s,
        snapshots=settings.snapshots,
        snapshot_s=settings.snapshot_s,
        resume=settings.resume,
    )


def _devices(num_bodies: int, settings: WheelSettings) -> tuple[str, tuple[str, ...]]:
    """Return the hub's device and those of the bodies here: GPUs, if there are enough."""
    gpus = torch.cuda.device_count()
    if settings.bind is not None:
        return ("cuda:0" if gpus else "cpu"), ()
    if gpus > num_bodies:
        return "cuda:0", tuple(f"cuda:{number + 1}" for number in range(num_bodies))
    if gpus == num_bodies:
        return "cpu", tuple(f"cuda:{number}" for number in range(num_bodies))
    cores = len(os.sched_getaffinity(0))
    if num_bodies + 1 > _MOST_PER_CORE * cores:
        raise InvalidInput(
            f"workers: {num_bodies} processes and the hub do not fit on {cores} cores; "
            f"at most {_MOST_PER_CORE} can share one"
        )
    return "cpu", ("cpu",) * num_bodies


def predict(run: Run, fitted: Fitted | None) -> Forecast | None:
    """Return what the plan says of a run on the machine that was found; None if there is none."""
    if fitted is None:
        return None
    machine, cost = fitted
    samples = len(run.data.train) / run.steps_per_epoch
    return forecast(run.workload, machine, STRATEGIES["wheel"], run.config, samples, cost)


def measured_step_s(outcome: Outcome, workers: int) -> float | None:
    """Return the mean seconds in which each worker takes a step; None of too short a run."""
    ends = outcome.tally.update_ends_s[_COLD_STEPS * workers :]
    if len(ends) < 2:
        return None
    return (ends[-1] - ends[0]) / (len(ends) - 1) * workers


def result_of(
    run: Run, settings: WheelSettings, run_id: str, outcome: Outcome, planned: Forecast | None
) -> tuple[WheelResult, tuple[Timeline, ...]]:
    """Return the result, and the timelines of the traced steps: as planned, and as measured."""
    tally = outcome.tally
    if not tally.epochs:
        raise InvalidInput("epochs: no worker was there to the end of the first one")
    last = tally.epochs[-1]
    result = WheelResult(
        id=run_id,
        settings=settings,
        machine=facts(run.device),
        epochs=tuple(EpochRow(**asdict(epoch)) for epoch in tally.epochs),
        accuracy=last.accuracy,
        loss=last.test_loss,
        trained_s=outcome.trained_s,
        samples_per_s=tally.num_samples / max(outcome.trained_s, 1e-9),
        measured_step_s=measured_step_s(outcome, settings.workers),
        **served(outcome, planned),
    )
    return result, ((planned.timeline,) if planned else ()) + (outcome.traced,)


def served(outcome: Outcome, planned: Forecast | None) -> dict[str, Any]:
    """Return the fields of what a hub found, of a run as of a rehearsal."""
    updates, bodies = outcome.updates, dict.fromkeys(outcome.bodies.values())
    return {
        "head": outcome.config.head or "",
        "updates": updates.version,
        "steps": updates.steps,
        "staleness": dict(updates.staleness),
        "mean_staleness": updates.mean_staleness,
        "purposes": purposes_of(outcome),
        "wire_nbytes": outcome.wire_nbytes,
        "predicted_step_s": planned.step_s if planned else None,
        "idle_shares": idle_shares(outcome.traced, bodies),
        "predicted_idle_shares": idle_shares(planned.timeline, bodies) if planned else {},
        "lost": tuple(outcome.tally.lost),
        "faults": outcome.faults,
        "peak_memory_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,),
    }


def purposes_of(outcome: Outcome) -> tuple[PurposeRow, ...]:
    """Return the bytes of each purpose, and of those between this hub and its child hubs."""
    within = tuple(
        PurposeRow(
            purpose=purpose.value,
            travels=purpose in (*TO_HUB, *FROM_HUB),
            nbytes=outcome.nbytes[purpose],
            formula_nbytes=outcome.formula_nbytes[purpose],
        )
        for purpose in Purpose
    )
    return within + rows_between(outcome.between)


def rows_between(between: Mapping[str, tuple[int, int]]) -> tuple[PurposeRow, ...]:
    """Return the bytes of what two hubs have exchanged."""
    return tuple(
        PurposeRow(purpose=purpose, travels=True, nbytes=counted, formula_nbytes=formula)
        for purpose, (counted, formula) in between.items()
    )


def purposes_table(title: str, rows: Sequence[PurposeRow]) -> Table:
    """Return bytes by purpose as a table."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("purpose", "counted", "by the formula", ""):
        table.add_column(column, justify="right" if column in _NUMBERS else "left")
    for row in rows:
        where = "" if row.travels else "within the hub"
        table.add_row(row.purpose, nbytes(row.nbytes), nbytes(row.formula_nbytes), where)
    return table


def _show(result: WheelResult, folder: Path, out: Console) -> None:
    out.print(purposes_table("Bytes by purpose", result.purposes))
    predicted, measured = result.predicted_step_s, result.measured_step_s
    if predicted is not None and measured is not None:
        out.print(f"step       predicted {duration(predicted)}, measured {duration(measured)}")
    out.print(f"staleness  {result.mean_staleness:.2f} on average, of {result.updates:,} updates")
    out.print(f"accuracy   {share(result.accuracy)} of the test samples, loss {result.loss:.4f}")
    out.print(f"throughput {number(result.samples_per_s)} samples/s")
    files = "result.json, trace.json, report.html, model.safetensors"
    out.print(f"written    {folder}/{files}", soft_wrap=True)
