"""Compare two chunk searches with a full sweep, for ResNet-152 rehearsed on four P100.

The machine file machines/power8-p100.toml determines the time of each layer, because Le et al. 2018
do not report times for this network.
"""

import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import rehearsed
from torch import nn

from figures import spread
from paceline.core.chunks import (
    ChunkTimes,
    ChunkTuner,
    PredictedSearch,
    RuntimeSearch,
    Trial,
    candidates,
)
from paceline.core.cost import LayerTimes, ProfiledCost, Roofline, layer_times
from paceline.core.machine import Machine
from paceline.core.plan import Kind, PriceKey
from paceline.core.workload import Workload
from paceline.exchange.profile import Probes
from paceline.exchange.replica import ModelReplica
from paceline.exchange.replicas import prober
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.measure.this_machine import Speed, this_machine
from paceline.measure.timing import timed
from paceline.planner import forecast
from paceline.strategies import STRATEGIES
from paceline.strategies.host.config import HostReduce
from paceline.strategies.host.run import replica
from papers.networks import step_of
from trainee import Task, Trainee

_BATCH_SIZE = 12
_ROUNDS, _INTERVAL = 4, 4
_NUM_WARM_UP, _NUM_EXCHANGES = 2, 10
_PAUSE_S = 0.01  # lets threads and cores fall asleep, as they do while a layer computes


class Sweep:
    """An exhaustive search: measures all sizes in every round, in random order."""

    interval = _INTERVAL

    def __init__(self, sizes: tuple[int, ...], num_rounds: int) -> None:
        order = random.Random(0)  # noqa: S311 - no secret
        self._left = [size for _ in range(num_rounds) for size in order.sample(sizes, len(sizes))]
        self.seconds: dict[int, list[float]] = {size: [] for size in sizes}

    @property
    def chunk(self) -> int:
        """The chunk size to use now."""
        return self._left[-1] if self._left else 1

    @property
    def done(self) -> bool:
        """Whether all rounds are over."""
        return not self._left

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The median step time of each measured size."""
        return tuple(Trial(size, None, median(s)) for size, s in self.seconds.items() if s)

    def record(self, seconds: float, times: Sequence[ChunkTimes] = ()) -> None:
        """Record the seconds of a step with the current `chunk`."""
        if self._left:
            steps_of_size = self.seconds[self.chunk]
            steps_of_size.append(seconds)
            if len(steps_of_size) % self.interval == 0:
                self._left.pop()


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Train with both searches and the sweep; return their results and the predictions."""
    workload = step_of("resnet152", _BATCH_SIZE)
    times = layer_times(workload, rehearsed.p100())
    task = Task.paced(workload, times)
    predicted = _predicted(workload, times, group)
    num_layers = len(workload.layers)
    interval = 2 if quick else 10
    searches: dict[str, ChunkTuner] = {
        "Algorithm 1 (step 5, range 5)": RuntimeSearch(num_layers, interval=interval),
        "predicted": PredictedSearch(predicted, interval),
    }
    picked = [_train(task, search, group) for search in searches.values()]
    sizes = {1, 6} if quick else _sizes(num_layers)
    sweep = Sweep(tuple(sorted({*sizes, *picked})), 1 if quick else _ROUNDS)
    _train(task, sweep, group)
    if group.rank != 0:
        return {}
    measured = {trial.chunk: trial.measured_s for trial in sweep.trials}
    best = min(measured, key=measured.__getitem__)
    return {
        "model": f"ResNet-152, {_BATCH_SIZE} images a rank, rehearsed",
        "num_layers": num_layers,
        "best": {"chunk": best, "seconds": measured[best]},
        "searches": {name: _outcome(one, measured) for name, one in searches.items()},
        "sweep": {str(size): spread(seconds) for size, seconds in sweep.seconds.items()},
        "predicted_s": {str(size): seconds for size, seconds in predicted.items()},
    }


def _sizes(num_layers: int) -> set[int]:
    """Return 1 to 16, every fifth size up to 60, and all candidates of `PredictedSearch`."""
    even = {*range(1, 17), *range(20, 65, 5)}
    return {size for size in even if size < num_layers} | {*candidates(num_layers)}


def _predicted(workload: Workload, times: LayerTimes, group: Group) -> dict[int, float]:
    """Return rank 0's step times by candidate, predicted from an exchange measured here."""
    rate = rehearsed.p100()
    speed = Speed(rate.flops_per_s, rate.nbytes_per_s)
    probes = {"host": prober(STRATEGIES["host"], HostReduce(workers=group.world_size), group)}
    bare = this_machine(group, [speed] * group.world_size)
    exchanges = Probes(workload, group, probes)
    clock, rows = clock_for(group.device), []
    for _ in range(_NUM_WARM_UP + _NUM_EXCHANGES):
        time.sleep(_PAUSE_S)
        rows.append([seconds[0] for seconds in timed(exchanges.works, clock, 1)])
    exchanges.close()
    measured = exchanges.measured(group.gather(rows[_NUM_WARM_UP:]), bare)["host"]
    sizes = {}
    if group.rank == 0:
        machine = STRATEGIES["host"].planning.calibrate(bare, measured)
        cost = ProfiledCost(_durations(machine, workload, times), Roofline.of(machine))
        for size in candidates(len(workload.layers)):
            sizes[str(size)] = _forecast(workload, machine, size, cost)
    return {int(size): seconds for size, seconds in group.gather(sizes)[0].items()}


def _durations(machine: Machine, workload: Workload, times: LayerTimes) -> dict[PriceKey, float]:
    """Return the seconds of the paced layers and the update on each device."""
    phases = ((Kind.FORWARD, times.forward_s), (Kind.BACKWARD, times.backward_s))
    parts = {
        (kind, layer.name): seconds
        for kind, phase in phases
        for layer, seconds in zip(workload.layers, phase, strict=True)
    }
    parts[Kind.STEP, ""] = times.update_s
    return {
        PriceKey(d.name, *part): seconds for d in machine.devices for part, seconds in parts.items()
    }


def _forecast(workload: Workload, machine: Machine, chunk: int, cost: ProfiledCost) -> float:
    num_ranks = len(machine.devices)
    config = HostReduce(workers=num_ranks, chunk=chunk)
    samples = workload.batch_size * num_ranks
    return forecast(workload, machine, STRATEGIES["host"], config, samples, cost).step_s


def _train(task: Task, tuner: ChunkTuner, group: Group) -> int:
    """Train until rank 0's tuner is done; return the chunk size that it picked."""
    exchanging = None

    def wrap(module: nn.Module) -> ModelReplica:
        nonlocal exchanging
        exchanging = replica(module, HostReduce(workers=group.world_size), group, tuner=tuner)
        return exchanging

    trainee = Trainee(task, wrap)
    trainee.step()  # the tuner ignores the first step
    while not group.gather(tuner.done)[0]:
        for _ in range(tuner.interval):
            trainee.step()
    assert exchanging is not None
    exchanging.close()
    chunk: int = group.gather(tuner.chunk)[0]
    return chunk


def _outcome(search: ChunkTuner, measured: dict[int, float]) -> dict[str, Any]:
    seconds = measured[search.chunk]
    return {
        "chunk": search.chunk,
        "num_trials": len(search.trials),
        "trials": [trial._asdict() for trial in search.trials],
        "seconds": seconds,
        "slower": seconds / min(measured.values()) - 1,
    }
