"""Rehearse strategy subbatch on each rank: its own steps and exchanges, but paced layers."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, repeat

import torch

from paceline.core.errors import InvalidInput
from paceline.data.dataset import TensorSamples
from paceline.links.group import Group
from paceline.models.paced import PacedSGD
from paceline.models.workload import workload_of
from paceline.planner import Forecast, forecast
from paceline.record.clock import clock_for
from paceline.record.merge import clock_offset, gather_timeline
from paceline.record.recorder import Recorder
from paceline.rehearsal.setup import Setup, times_of
from paceline.rehearsal.steps import NUM_WARM_UP, Rehearsal, num_traced, result_of
from paceline.settings import RehearseSettings
from paceline.strategies import STRATEGIES
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.fit import Fitted, fit
from paceline.strategies.subbatch.lane import Lane
from paceline.strategies.subbatch.learner import Learner, Parallel
from paceline.strategies.subbatch.paced import PacedUpdates, paced_parallel
from paceline.strategies.subbatch.recording import PassRecorder
from paceline.strategies.subbatch.run import body_of
from paceline.training.step import Share

_PROFILE_S = 2.0
_NO_SAMPLES = TensorSamples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True, kw_only=True)
class SplitStandIn(Setup):
    """What stands in for a device that has some outputs of the head; `updates` take their time."""

    parallel: Parallel
    config: SubBatch
    updates: PacedUpdates


def build(settings: RehearseSettings, group: Group) -> SplitStandIn:
    """Make what stands in for the device. InvalidInput if model, device or workers do not fit."""
    if group.world_size != settings.workers:
        raise InvalidInput(f"workers: {settings.workers} asked for, {group.world_size} started")
    assert settings.device is not None  # or the settings would not be valid
    size = -(-settings.batch_size // settings.workers)
    workload = workload_of(settings.model, size, settings.input_shape)
    times, devices = times_of(settings, workload, settings.device)
    config: SubBatch = settings.config()
    parallel = paced_parallel(workload, config, group.rank, times)
    own = settings.batch_size // settings.workers
    own += group.rank < settings.batch_size % settings.workers
    share = Share(torch.zeros(own, 1), torch.zeros(own, dtype=torch.int64), 1.0)
    updates = PacedUpdates(each_s=times.update_s / workload.num_parameters)
    optimizer = PacedSGD(parallel.body.parameters(), 0.0)
    return SplitStandIn(
        settings,
        group,
        devices,
        workload,
        parallel.model,
        optimizer,
        share,
        times,
        parallel=parallel,
        config=config,
        updates=updates,
    )


def measure(setup: SplitStandIn) -> Fitted:
    """Return this machine's exchanges, and the times of the layers that are to be rehearsed."""
    return fit(
        setup.parallel,
        setup.workload,
        setup.config,
        setup.group,
        lambda: repeat(setup.share),
        _NO_SAMPLES,
        setup.updates,
        _PROFILE_S,
    )


def rehearse(
    setup: SplitStandIn, measured: Fitted, run_id: str, advance: Callable[[], None]
) -> Rehearsal:
    """Rehearse on all ranks, which must call it together; `advance` counts the steps."""
    group, predicted = setup.group, _predicted(setup, measured)
    device = measured.machine.devices[group.rank].name
    recorder, lane = PassRecorder(clock_for(group.device), device, group.rank), Lane(group)
    replica, _ = body_of(setup.parallel, setup.config, group, lane)
    learner = Learner(
        parallel=setup.parallel,
        replica=replica,
        config=setup.config,
        group=group,
        lane=lane,
        recorder=recorder,
        sgd=setup.updates,
        seed=0,
        samples=_NO_SAMPLES,
    )
    source = repeat(setup.share)

    def take(number: int) -> None:
        for _ in range(number):
            learner.step(source)
            advance()

    seconds = _timed(take, setup.settings.steps, recorder)
    replica.record(recorder)
    take(NUM_WARM_UP)
    recorder.start_trace(learner.traced)
    take(num_traced(setup.settings))
    recorder.stop_trace()
    spans, offset = recorder.spans(), clock_offset(group)
    replica.close()
    lane.close()
    timeline = gather_timeline(spans, offset, group, "rehearsed")
    result = result_of(setup, run_id, predicted, seconds, timeline, offset, ())
    return Rehearsal(result, predicted.timeline, timeline)


def _timed(take: Callable[[int], None], number: int, recorder: Recorder) -> list[float]:
    """Return how long each of so many steps takes, after a few others."""
    take(NUM_WARM_UP)
    before = recorder.step_ends()[-1:]
    take(number)
    return [end - start for start, end in pairwise(before + recorder.step_ends())]


def _predicted(setup: SplitStandIn, measured: Fitted) -> Forecast:
    """Return what the strategy would take. Layers that wait leave the cores to the exchange."""
    machine = measured.machine
    links = tuple(link.model_copy(update={"uses_cores": False}) for link in machine.links)
    machine = machine.model_copy(update={"links": links})
    strategy, samples = STRATEGIES[setup.settings.strategy], setup.settings.batch_size
    return forecast(setup.workload, machine, strategy, setup.config, samples, measured.cost)
