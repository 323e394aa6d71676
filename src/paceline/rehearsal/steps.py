"""The steps of a rehearsal on each rank, and what they come to."""

import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import pairwise, repeat
from statistics import quantiles
from typing import Any

from paceline.core.compare import compare, conform
from paceline.core.strategy import Window
from paceline.core.timeline import Span, Timeline
from paceline.data.balanced import BalancedSampler
from paceline.exchange.balanced import Balanced
from paceline.exchange.replica import Replica
from paceline.models.stretched import stretch
from paceline.planner import Forecast
from paceline.record.clock import clock_for
from paceline.record.merge import ClockOffset, clock_offset, gather_timeline
from paceline.record.recorder import Recorder
from paceline.rehearsal.prediction import predict
from paceline.rehearsal.setup import Setup
from paceline.result import ComparisonTable, PlanRow, RehearsalResult, TrialRow
from paceline.runs import SLACK_S
from paceline.settings import RehearseSettings
from paceline.strategies import find_exchange, find_in_step
from paceline.training.profile import Profile
from paceline.training.step import Share, train_step
from paceline.training.this_machine import facts
from paceline.tune.chunk import ChunkTuner, PredictedSearch, RuntimeSearch, candidates

NUM_WARM_UP = 2
_MOST_TRACED = 20
_INTERVAL = 10
_MOST_ROUNDS = 10


def num_steps(settings: RehearseSettings) -> int:
    """Return how many steps are taken, without those of a search."""
    return 2 * NUM_WARM_UP + settings.steps + num_traced(settings)


def num_traced(settings: RehearseSettings) -> int:
    """Return how many of them are traced."""
    return min(settings.steps, _MOST_TRACED)


@dataclass(frozen=True)
class Rehearsal:
    """What all ranks have found: the result, and both timelines."""

    result: RehearsalResult
    predicted: Timeline
    rehearsed: Timeline


def rehearse(
    setup: Setup, measured: Profile, run_id: str, advance: Callable[[], None]
) -> Rehearsal:
    """Rehearse on all ranks, which must call it together; `advance` counts the steps."""
    tuner = _tuner(setup, measured)
    stretched = None
    if setup.settings.stretch is not None:
        stretched = stretch(setup.model, setup.settings.stretch_of(setup.group.rank))
    device = measured.machine.devices[setup.group.rank].name
    steps = _Steps(setup, _replica(setup, tuner), device)
    if tuner is not None:
        steps.search(tuner)
    if setup.batches is not None:
        steps.settle(setup.batches)
    config, trials = _found(setup, measured, tuner)
    seconds = steps.timed(setup.settings.steps, advance)
    spans, offset = steps.traced(num_traced(setup.settings), advance)
    steps.close()
    if stretched is not None:
        stretched.remove()
    timeline = gather_timeline(spans, offset, setup.group, "rehearsed")
    forecast = predict(setup, measured, config)
    result = result_of(setup, run_id, forecast, seconds, timeline, offset, trials)
    return Rehearsal(result, forecast.timeline, timeline)


def _replica(setup: Setup, tuner: ChunkTuner | None) -> Replica:
    run = import_module(find_exchange(setup.settings.strategy).run)
    tuning = {} if tuner is None else {"tuner": tuner}
    replica: Replica = run.replica(setup.model, setup.settings.config(), setup.group, **tuning)
    if setup.batches is None:
        return replica
    return Balanced(replica, setup.model, setup.group, setup.batches, weighs=False)


def _shares(setup: Setup) -> Iterator[Share]:
    """Yield this rank's part of each step, of which there are as many as anybody takes."""
    if setup.batches is None or setup.whole is None:
        yield from repeat(setup.share)
        return
    inputs, targets, _ = setup.whole
    per_sample = setup.group.world_size / len(targets)
    while True:
        for own in setup.batches:
            yield Share(inputs[: len(own)], targets[: len(own)], len(own) * per_sample)


class _Steps:
    """Takes the steps, all with the same share."""

    def __init__(self, setup: Setup, replica: Replica, device: str) -> None:
        self._setup, self._replica = setup, replica
        self._recorder = Recorder(clock_for(setup.group.device), device, setup.group.rank)
        self._source = _shares(setup)

    def search(self, tuner: ChunkTuner) -> None:
        """Take steps until the tuner, whose times are those of rank 0, is done."""
        self._take(1)  # which only shows in which order gradients become ready
        while not self._setup.group.gather(tuner.done)[0]:
            self._take(tuner.interval)

    def settle(self, batches: BalancedSampler) -> None:
        """Take steps until the shares of a batch, which are the same on all ranks, stay."""
        for _ in range(_MOST_ROUNDS):
            before = batches.shares
            self._take(_INTERVAL)
            if batches.shares == before:
                return

    def timed(self, number: int, advance: Callable[[], None]) -> list[float]:
        """Return how long each of so many steps takes, after a few others."""
        self._take(NUM_WARM_UP, advance)
        before = self._recorder.step_ends()[-1:]
        self._take(number, advance)
        return [end - start for start, end in pairwise(before + self._recorder.step_ends())]

    def traced(
        self, number: int, advance: Callable[[], None]
    ) -> tuple[Sequence[Span], ClockOffset]:
        """Return the spans of so many steps, after a few that show the exchange its recorder."""
        self._replica.record(self._recorder)
        self._take(NUM_WARM_UP, advance)
        self._recorder.start_trace(self._setup.model)
        self._take(number, advance)
        self._recorder.stop_trace()
        return self._recorder.spans(), clock_offset(self._setup.group)

    def close(self) -> None:
        """Give back what the exchange holds."""
        self._replica.close()

    def _take(self, number: int, advance: Callable[[], None] = lambda: None) -> None:
        for _ in range(number):
            train_step(self._replica, self._setup.optimizer, self._source, self._recorder)
            advance()


def _tuner(setup: Setup, measured: Profile) -> ChunkTuner | None:
    settings, num_layers = setup.settings, len(setup.workload.layers)
    interval = settings.interval or _INTERVAL
    if settings.chunk_search == "runtime":
        given = {"step": settings.search_step, "range": settings.search_range}
        sizes = {name: value for name, value in given.items() if value is not None}
        return RuntimeSearch(num_layers, interval=interval, **sizes)
    if settings.chunk_search == "predicted":
        return PredictedSearch(_predicted(setup, measured, candidates(num_layers)), interval)
    return None


def _predicted(setup: Setup, measured: Profile, chunks: Sequence[int]) -> dict[int, float]:
    """Return the predicted seconds of a step with each chunk; rank 0's word holds for all."""
    config, group, predicted = setup.settings.config(), setup.group, {}
    for chunk in chunks:
        own = predict(setup, measured, replace(config, chunk=chunk)) if group.rank == 0 else None
        # Told one by one: for deep networks all of them may take longer than ranks wait.
        predicted[chunk] = group.gather(own and own.step_s)[0]
    return predicted


def _found(
    setup: Setup, measured: Profile, tuner: ChunkTuner | None
) -> tuple[Any, tuple[TrialRow, ...]]:
    """Return the configuration that is rehearsed, and what a search has tried."""
    config = setup.settings.config()
    if tuner is None:
        return config, ()
    chosen, trials = setup.group.gather([tuner.chunk, tuner.trials])[0]
    predicted = _predicted(setup, measured, [chunk for chunk, _, _ in trials])
    rows = (
        TrialRow(chunk=chunk, predicted_s=predicted[chunk], rehearsed_s=seconds)
        for chunk, _, seconds in trials
    )
    return replace(config, chunk=chosen), tuple(rows)


def result_of(
    setup: Setup,
    run_id: str,
    forecast: Forecast,
    seconds: Sequence[float],
    rehearsed: Timeline,
    offset: ClockOffset,
    trials: tuple[TrialRow, ...],
) -> RehearsalResult:
    """Bring together what all ranks have to say of a rehearsal. They must call it together."""
    settings, group = setup.settings, setup.group
    plan = find_in_step(settings.strategy).plan(
        setup.workload, forecast.machine, forecast.config, Window(rehearsed.num_steps())
    )
    slack_s = SLACK_S + 2 * max(group.gather(offset.error_s))
    lower_s, median_s, upper_s = quantiles(seconds, n=4, method="inclusive")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RehearsalResult(
        id=run_id,
        settings=settings,
        machine=facts(group.device),
        devices=setup.devices,
        config=asdict(forecast.config),
        plan=PlanRow.of(forecast),
        trials=trials,
        predicted_step_s=forecast.step_s,
        rehearsed_step_s=median_s,
        lower_quartile_s=lower_s,
        upper_quartile_s=upper_s,
        samples_per_s=settings.batch_size / median_s,
        comparison=ComparisonTable.of(compare(forecast.timeline, rehearsed)),
        faults=tuple(conform(plan, rehearsed, slack_s)),
        peak_memory_bytes=tuple(group.gather(peak)),
        shares=None if setup.batches is None else setup.batches.shares,
    )
