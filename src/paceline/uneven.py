"""Train on uneven workers: what `paceline train --strategy hogbatch` does.

This process is the coordinator; it starts the workers, tests the model after each epoch, and writes
the run's folder.
"""

import os
import time
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_model

from paceline.core.cost import Roofline
from paceline.core.errors import InvalidInput
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.timeline import Timeline
from paceline.models import describe
from paceline.planner.joining import Training, judge
from paceline.record.trace import write_trace
from paceline.report import write_report
from paceline.result import EpochRow
from paceline.runs import make_folder
from paceline.settings import UnevenSettings, validated_uneven
from paceline.strategies.hogbatch import statistics
from paceline.strategies.hogbatch.coordinator import Coordinator
from paceline.strategies.hogbatch.fit import Trial
from paceline.strategies.hogbatch.history import changes
from paceline.strategies.hogbatch.plan import plan
from paceline.strategies.hogbatch.policy import Worker, policy_of
from paceline.strategies.hogbatch.replay import replay, traced_sizes
from paceline.strategies.hogbatch.run import Outcome, Run, train
from paceline.strategies.hogbatch.worker import Learning
from paceline.strategies.hogbatch.workers import parse_workers
from paceline.tables import console, epoch_line, uneven_summary, workers_table
from paceline.training.fitted import fitted
from paceline.training.loop import Epoch
from paceline.training.objective import objective_of
from paceline.training.this_machine import facts
from paceline.uneven_result import UnevenResult, WorkerRow

_NUM_TRIALS = 2  # of each worker
_MOST_POINTS = 500
_MOST_PLANNED = 8192  # samples, or so many of the largest batches:
_MOST_BATCHES_PLANNED = 50


def order(values: dict[str, Any]) -> UnevenSettings:
    """Return the settings of these values, with the workers checked.

    A number may stand for `workers`, and `policy` for the option of that name.
    """
    fields = dict(values)
    if fields.pop("port", 0):
        raise InvalidInput("port: workers of strategy hogbatch meet at none; leave it out")
    policy, options = fields.pop("policy", None), fields.get("options", {})
    if policy is not None and isinstance(options, dict):
        if options.get("policy", policy) != policy:
            raise InvalidInput(f"policy: {policy!r}, but options say {options['policy']!r}")
        fields["options"] = options | {"policy": policy}
    if isinstance(fields.get("workers"), int):
        fields["workers"] = str(fields["workers"])
    settings = validated_uneven(fields)
    parse_workers(settings.workers, len(os.sched_getaffinity(0)))
    return settings


def train_uneven(
    settings: UnevenSettings, *, as_json: bool = False, quiet: bool = False
) -> tuple[UnevenResult, Path]:
    """Train, and return the result and the folder that it was written to.

    The result goes to standard output, `as_json` or as a table, unless `quiet`; progress goes to
    standard error. Raises InvalidInput and WorkerLost as `hogbatch.run.train` does; InvalidInput,
    too, if a worker does not help, unless the settings say `force`.
    """
    out, err = console(quiet=quiet), console(stderr=True)
    run = build(settings)
    score = objective_of(run.data).name
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.model.replace(':', '.')}"
    folder = make_folder(settings, f"{run_id}-{uuid4().hex[:4]}")
    err.print(
        f"{settings.model}: {run.workload.num_parameters:,} parameters in "
        f"{len(run.workload.layers)} layers; workers {', '.join(map(str, run.specs))}"
    )
    with _progress(len(run.data.train) * run.epochs, err) as progress:
        samples = progress.add_task("training", total=len(run.data.train) * run.epochs)

        def report(epoch: Epoch) -> bool:
            err.print(epoch_line(epoch, settings.epochs, score))
            return False

        def advance(size: int) -> None:
            if err.is_terminal:
                progress.advance(samples, size)

        def admit(coordinator: Coordinator) -> None:
            if not settings.force:
                check_admission(run, coordinator)

        watched = replace(run, report=report, advance=advance, say=err.print, begun=admit)
        outcome = train(watched)
    result, shown = result_of(run, settings, folder.name, outcome)
    save_model(run.model, str(folder / "model.safetensors"))
    write_trace(folder / "trace.json", shown)
    (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")
    write_report(folder)
    if as_json:
        out.print_json(result.model_dump_json())
    else:
        out.print(workers_table(result))
        out.print(uneven_summary(result, str(folder)))
    return result, folder


def _progress(total: int, err: Console) -> Progress:
    return Progress(console=err, transient=True, disable=not err.is_terminal or total == 0)


def build(settings: UnevenSettings) -> Run:
    """Load the data, build the model and describe it. InvalidInput if they do not fit."""
    specs = parse_workers(settings.workers, len(os.sched_getaffinity(0)))
    model, data, name, num_classes, _ = fitted(settings.model, settings.data, settings.seed)
    workload = describe(model, torch.zeros(settings.batch_size, *data.sample_shape), settings.model)
    learning = Learning(
        model=name,
        num_classes=num_classes,
        optimizer=settings.optimizer,
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
        seed=settings.seed,
    )
    return Run(
        learning=learning,
        model=model,
        workload=workload,
        data=data,
        specs=specs,
        config=settings.config(len(specs)),
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        deadline_s=settings.deadline_s,
        trial_s=settings.profile_s / _NUM_TRIALS,
    )


def check_admission(run: Run, coordinator: Coordinator) -> None:
    """Refuse workers that do not help, by what they have tried: InvalidInput says which, and why.

    One that joins later is not asked about.
    """
    hands = [one for one in coordinator.hands if one.speed is not None and not one.is_gone]
    trials = [Trial(one.number, one.spec, one.tried) for one in hands]
    cores = len(os.sched_getaffinity(0))
    training = Training(run.workload, run.config, len(run.data.train), run.epochs, cores)
    reasons = [verdict.why for verdict in judge(training, trials) if not verdict.helps]
    if reasons:
        raise InvalidInput(f"{'; '.join(reasons)} (--force has all take part)")


class _Prediction(NamedTuple):
    """What the plan says of a run: each worker's share of the updates, and samples a second."""

    shares: dict[str, float]
    samples_per_s: float


def predict(run: Run, outcome: Outcome) -> _Prediction | None:
    """Return what the plan says of the run with what the trials measured.

    None if workers were lost or joined late, or differ in their threads: the plan knows neither.
    """
    threads = {spec.threads for spec in run.specs if spec.kind == "cpu"} or {1}
    if outcome.lost or len(threads) > 1 or len(outcome.specs) != len(run.specs):
        return None
    config = replace(run.config, threads=threads.pop())
    steps = ceil(_num_planned(run, outcome) / (run.batch_size * config.workers))
    planned = plan(run.workload, outcome.machine, config, Window(steps))
    timeline = simulate(planned, Roofline.of(outcome.machine))
    done = sum(statistics.num_samples(timeline).values())
    specs = dict(zip(outcome.names, run.specs, strict=True))
    updates = {
        device: sum(min(specs[device].threads, size) for _, size in sizes)
        for device, sizes in statistics.batch_sizes(timeline).items()
    }
    total = sum(updates.values())
    shares = {device: made / total for device, made in updates.items()}
    return _Prediction(shares, done / timeline.makespan_s)


def _num_planned(run: Run, outcome: Outcome) -> int:
    """Return how many samples the plan hands out: enough for batch sizes to settle."""
    speeds = [speed or 1.0 for speed in outcome.speeds]
    workers = [
        Worker(spec.kind, spec.threads, speed)
        for spec, speed in zip(run.specs, speeds, strict=True)
    ]
    policy = policy_of(run.config, workers, run.batch_size)
    largest = max(policy.largest_batch(number) for number in range(len(workers)))
    most = max(_MOST_PLANNED, _MOST_BATCHES_PLANNED * largest)
    return min(len(run.data.train) * len(outcome.epochs), most)


def result_of(
    run: Run, settings: UnevenSettings, run_id: str, outcome: Outcome
) -> tuple[UnevenResult, tuple[Timeline, ...]]:
    """Return the result, and the timelines of the traced batches: as planned, and as measured."""
    timeline = outcome.history.timeline(outcome.names)
    last = outcome.epochs[-1]
    prediction = predict(run, outcome)
    sizes = statistics.batch_sizes(timeline)
    result = UnevenResult(
        id=run_id,
        settings=settings,
        machine=facts(torch.device("cpu")),
        workers=_rows(outcome, timeline, prediction),
        updates=outcome.history.updates(outcome.names),
        utilisation=dict.fromkeys(outcome.names, 0.0) | statistics.utilisation(timeline),
        epochs=tuple(EpochRow(**asdict(epoch)) for epoch in outcome.epochs),
        accuracy=last.accuracy,
        score=objective_of(run.data).name,
        loss=last.test_loss,
        trained_s=outcome.trained_s,
        samples_per_s=len(run.data.train) * len(outcome.epochs) / outcome.trained_s,
        predicted_samples_per_s=prediction.samples_per_s if prediction else None,
        staleness={name: dict(found) for name, found in statistics.staleness(timeline).items()},
        batch_sizes={name: tuple(points) for name, points in changes(sizes).items()},
        update_gaps=tuple(outcome.history.gaps(outcome.names, _MOST_POINTS)),
        lost=outcome.lost,
        faults=outcome.faults,
        peak_memory_bytes=tuple(outcome.peaks.values()),
    )
    return result, (_as_planned(run, outcome), outcome.traced)


def _as_planned(run: Run, outcome: Outcome) -> Timeline:
    """Return the traced batches as the plan has them, with the prices of the trials."""
    numbers = {name: number for number, name in enumerate(outcome.names)}
    sizes = traced_sizes(outcome.traced.spans, numbers)
    planned = replay(run.workload, outcome.machine, dict(enumerate(outcome.specs)), sizes)
    return simulate(planned, Roofline.of(outcome.machine))


def _rows(
    outcome: Outcome, timeline: Timeline, prediction: _Prediction | None
) -> tuple[WorkerRow, ...]:
    updates = outcome.history.updates(outcome.names)
    samples = statistics.num_samples(timeline)
    total = sum(updates.values())
    return tuple(
        WorkerRow(
            name=name,
            spec=str(spec),
            tried_samples_per_s=speed,
            samples=samples.get(name, 0),
            updates_share=updates[name] / total,
            predicted_share=prediction.shares.get(name, 0.0) if prediction else None,
        )
        for name, spec, speed in zip(outcome.names, outcome.specs, outcome.speeds, strict=True)
    )
