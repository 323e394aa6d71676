"""The outcome of a run, with a plan of the same batches that the workers trained on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.compare import conform
from paceline.core.cost import Roofline
from paceline.core.outcome import Epoch, Outcome, UnevenWorker, Updates
from paceline.core.simulate import simulate
from paceline.core.timeline import Timeline
from paceline.strategies.hogbatch import speed_trial, statistics
from paceline.strategies.hogbatch.coordinator import Coordinator, KnownWorker
from paceline.strategies.hogbatch.policy import SpeedTrial
from paceline.strategies.hogbatch.replica import device_for
from paceline.strategies.hogbatch.speed_trial import Epochs, Prediction, predict, traced_sizes
from paceline.strategies.hogbatch.statistics import BatchLog, Made
from paceline.training.recipes.recipe import Recipe

_SLACK_S = 1e-3  # a layer's hook runs shortly after the layer
_MOST_POINTS = 500


@dataclass(frozen=True)
class FinishedRun:
    """A run whose workers have ended.

    `asked`: the epochs that the run should train. `epochs`: the epochs that it has trained.
    """

    coordinator: Coordinator
    recipe: Recipe
    asked: Epochs
    epochs: Sequence[Epoch]

    def outcome(self, traced: Timeline, peaks: Sequence[int], num_samples: int) -> Outcome:
        """Return the outcome of the run.

        `traced`: the spans of the traced batches. `peaks`: each worker's peak memory in bytes.
        `num_samples`: the number of samples in the trained epochs.
        """
        history, trained_s = self.coordinator.history, self.coordinator.trained_s
        workers = [one.progress for one in self.coordinator.processes.workers]
        trials = [one.trial for one in workers if one.trial is not None]
        prediction = None
        # Predictions assume that all workers train from the first epoch to the last.
        if not history.lost and not history.past and len(trials) == len(workers):
            prediction = predict(self.asked, trials)
        planned, faults = self._replayed(traced, trials)
        known, tokens = self.coordinator.known, self.recipe.tokens_per_sample
        made = history.log.made([one.name for one in known])
        updates = _updates(made, history.log)
        return Outcome(
            timeline=traced,
            predicted=planned,
            config=self.asked.config,
            samples_per_s=num_samples / trained_s,
            tokens_per_s=tokens and tokens * num_samples / trained_s,
            trained_s=trained_s,
            epochs=tuple(self.epochs),
            score=self.recipe.score_name,
            predicted_samples_per_s=prediction.samples_per_s if prediction else None,
            faults=faults,
            lost=tuple(history.lost),
            peak_memory_bytes=tuple(peaks),
            updates=updates,
            device=", ".join(dict.fromkeys(device_for(one.spec).name for one in workers)),
            workers=_workers(known, made, updates, prediction),
            utilisation=statistics.utilisation(made),
            predicted_utilisation=prediction.utilisation if prediction else {},
        )

    def _replayed(
        self, traced: Timeline, trials: Sequence[SpeedTrial]
    ) -> tuple[Timeline, tuple[str, ...]]:
        """Simulate a plan of batches with the traced sizes.

        Returns the simulated timeline, and a text for each difference between plan and trace.
        """
        workload, config = self.asked.workload, self.asked.config
        machine = speed_trial.machine_of(workload, trials)
        specs, sizes = {one.number: one.spec for one in trials}, traced_sizes(traced.spans)
        plan = speed_trial.plan_of_batches(workload, machine, config, specs, sizes)
        faults = tuple(conform(plan, traced, _SLACK_S))
        return simulate(plan, Roofline.of(machine)), faults


def _updates(made: Made, log: BatchLog) -> Updates:
    staleness = statistics.staleness(made)
    missed = sum(staleness.values(), Counter[int]())
    by_worker = {name: sum(one.num_updates for one in own) for name, own in made.items()}
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
    sizes = {name: [(one.end_s, one.num_samples) for one in own] for name, own in made.items()}
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
