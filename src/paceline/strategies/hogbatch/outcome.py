"""The outcome of a run, with a plan of the same batches that the workers trained on."""

from collections import Counter
from collections.abc import Sequence

from paceline.core.compare import conform
from paceline.core.cost import Roofline
from paceline.core.outcome import Epoch, Outcome, UnevenWorker, Updates
from paceline.core.simulate import simulate
from paceline.core.timeline import Origin, Span, Timeline
from paceline.strategies.hogbatch import statistics
from paceline.strategies.hogbatch.coordinator import Coordinator, KnownWorker
from paceline.strategies.hogbatch.messages import SpeedTrial
from paceline.strategies.hogbatch.replica import device_for
from paceline.strategies.hogbatch.speed_trial import (
    Epochs,
    Prediction,
    machine_of,
    plan_of_batches,
    predict,
    traced_sizes,
)
from paceline.strategies.hogbatch.statistics import BatchLog, Made
from paceline.training.recipes.recipe import Recipe

_SLACK_S = 1e-3  # a layer's hook runs shortly after the layer
_MOST_POINTS = 500


def outcome_of(
    coordinator: Coordinator,
    recipe: Recipe,
    asked: Epochs,
    epochs: Sequence[Epoch],
    decisions: Sequence[str],
    left: Sequence[tuple[list[Span], int]],
) -> Outcome:
    """Return the outcome of a run whose workers have ended.

    `asked`: the epochs that the run should train. `epochs`: the epochs that it has trained.
    `left`: each worker's traced spans, and its peak memory in bytes.
    """
    trained_s = coordinator.trained_s
    workers = [one.progress for one in coordinator.processes.workers]
    trials = [one.trial for one in workers if one.trial is not None]
    prediction = None
    # Predictions assume that all workers train from the first epoch to the last.
    if not coordinator.lost and not coordinator.past and len(trials) == len(workers):
        prediction = predict(asked, trials)
    traced = Timeline((span for spans, _ in left for span in spans), Origin.MEASURED)
    planned, faults = _replayed(traced, asked, trials)
    known, tokens = coordinator.known, recipe.tokens_per_sample
    made = coordinator.log.made([one.name for one in known])
    updates = _updates(made, coordinator.log)
    num_samples = coordinator.scheduler.num_samples
    return Outcome(
        timeline=traced,
        predicted=planned,
        config=asked.config,
        samples_per_s=num_samples / trained_s,
        tokens_per_s=tokens and tokens * num_samples / trained_s,
        trained_s=trained_s,
        epochs=tuple(epochs),
        score=recipe.score_name,
        predicted_samples_per_s=prediction.samples_per_s if prediction else None,
        faults=faults,
        lost=tuple(coordinator.lost),
        peak_memory_bytes=tuple(peak for _, peak in left),
        updates=updates,
        device=", ".join(dict.fromkeys(device_for(one.spec).name for one in workers)),
        workers=_workers(known, made, updates, prediction),
        utilisation=statistics.utilisation(made),
        predicted_utilisation=prediction.utilisation if prediction else {},
        decisions=tuple(decisions),
    )


def _replayed(
    traced: Timeline, asked: Epochs, trials: Sequence[SpeedTrial]
) -> tuple[Timeline, tuple[str, ...]]:
    """Simulate a plan of batches with the traced sizes.

    Returns the simulated timeline, and a text for each difference between plan and trace.
    """
    machine = machine_of(asked.workload, trials)
    sizes = traced_sizes(traced.spans)
    plan = plan_of_batches(asked.workload, machine, asked.config, trials, sizes)
    return simulate(plan, Roofline.of(machine)), tuple(conform(plan, traced, _SLACK_S))


def _updates(made: Made, log: BatchLog) -> Updates:
    staleness = statistics.staleness(made)
    missed = sum(staleness.values(), Counter[int]())
    by_worker = {name: sum(one.updates for one in own) for name, own in made.items()}
    return Updates(
        count=sum(by_worker.values()),
        by_worker=by_worker,
        staleness={name: dict(own) for name, own in staleness.items()},
        mean_staleness=sum(n * times for n, times in missed.items()) / max(1, missed.total()),
        gaps=tuple(log.gaps(len(made), _MOST_POINTS)),
    )


def _workers(
    known: Sequence[KnownWorker], made: Made, updates: Updates, prediction: Prediction | None
) -> tuple[UnevenWorker, ...]:
    sizes = {name: [(one.ended_s, one.size) for one in own] for name, own in made.items()}
    return tuple(
        UnevenWorker(
            name=name,
            spec=spec,
            tried_samples_per_s=tried,
            samples=sum(size for _, size in sizes[name]),
            updates_share=updates.by_worker[name] / updates.count,
            predicted_share=prediction.shares.get(name, 0.0) if prediction else None,
            batch_sizes=tuple(statistics.changes(sizes[name])),
        )
        for name, spec, tried in known
    )
