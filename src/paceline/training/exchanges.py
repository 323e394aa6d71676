"""Measure what a strategy's exchange takes by itself: a small one, and that of all layers.

Layers overlap in an exchange of many: while one is summed, the next is on its way. How that adds up
is the plan's business. So what all layers take becomes the seconds of a single large exchange with
which the plan, computing nothing, takes as long.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from paceline.core.calibration import Measurement, Measurements
from paceline.core.cost import CostModel, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import COMPUTE, Task
from paceline.core.simulate import makespan_s
from paceline.core.strategy import Prober, Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.exchange.probe import Probe
from paceline.links.group import Group
from paceline.record.clock import Clock, clock_for

_NUM_WARM_UP = 2
_FEWEST_EXCHANGES, _MOST_EXCHANGES = 3, 20
_SECONDS = 6.0
_PAUSE_S = 0.01  # as long as threads and cores need to fall asleep, as they do beside a layer
_SMALL_NBYTES = 1024
_LARGEST_NBYTES = (
    128 * 2**20
)  # more than caches hold; beyond it, twice the bytes take twice as long
_NUM_HALVINGS = 24


def measure_exchanges(
    workload: Workload, group: Group, probers: Mapping[str, Prober], machine: Machine
) -> dict[str, Measurements]:
    """Measure each strategy's exchanges on the machine, without computing between them."""
    probes = Probes.of(workload, group, probers)
    clock = clock_for(group.device)

    def rounds(num_rounds: int) -> list[list[list[float]]]:
        rows = []
        for _ in range(num_rounds):
            time.sleep(_PAUSE_S)
            rows.append(probes.once(clock))
        return group.gather(rows)

    slowest = max(sum(rank[-1]) for rank in rounds(_NUM_WARM_UP))
    fitting = int(_SECONDS / (slowest + _PAUSE_S))
    ranks = rounds(max(_FEWEST_EXCHANGES, min(_MOST_EXCHANGES, fitting)))
    probes.close()
    return probes.measured(ranks, machine)


@dataclass(frozen=True)
class Probes:
    """An exchange of all layers of each strategy, and a small one."""

    workload: Workload
    probers: Mapping[str, Prober]
    probes: Mapping[str, tuple[Probe, Probe]]

    @classmethod
    def of(cls, workload: Workload, group: Group, probers: Mapping[str, Prober]) -> "Probes":
        """Make them; a single rank has nothing to exchange."""
        layers = exchanging(workload)
        sizes = [[one.nbytes for one in layer.parameters] for layer in layers.in_backward_order]
        made = {
            name: (prober.make(sizes), prober.make([[_SMALL_NBYTES]]))
            for name, prober in probers.items()
        }
        return cls(layers, probers, made if group.world_size > 1 else {})

    def once(self, clock: Clock) -> list[float]:
        """Run each once and return its seconds."""
        marks = [clock.mark()]
        for pair in self.probes.values():
            for probe in pair:
                probe()
                marks.append(clock.mark())
        return differences(clock, marks)

    def measured(
        self, ranks: Sequence[Sequence[Sequence[float]]], machine: Machine
    ) -> dict[str, Measurements]:
        """Return what a single small and a single large exchange take, given all ranks' rounds.

        A rank that comes early waits for the others: the last one to join waits least.
        """
        medians = [median(map(min, zip(*column, strict=True))) for column in _columns(ranks)]
        pairs = zip(medians[::2], medians[1::2], strict=True)
        return {
            name: single(self.probers[name], machine, self.workload, small_s, all_s)
            for name, (all_s, small_s) in zip(self.probes, pairs, strict=True)
        }

    def close(self) -> None:
        """Give back what they hold."""
        for pair in self.probes.values():
            for probe in pair:
                probe.close()


def exchanging(workload: Workload) -> Workload:
    """Return the layers with gradients, which compute nothing; smaller in proportion if too large.

    A model with next to none has one layer that can be told from the small exchange.
    """
    nbytes = workload.gradient_nbytes
    if nbytes < 2 * _SMALL_NBYTES:
        all_layers = (_layer("all", [_parameter("all.weight", 2 * _SMALL_NBYTES)]),)
        return Workload(workload.name, 1, all_layers, (0,), 0)
    share = min(1.0, _LARGEST_NBYTES / nbytes)
    layers = [
        _layer(layer.name, [_parameter(one.name, share * one.nbytes) for one in layer.parameters])
        for layer in workload.in_backward_order
        if layer.parameters
    ]
    return Workload(workload.name, 1, tuple(layers), tuple(range(len(layers))), 0)


def _parameter(name: str, nbytes: float) -> Parameter:
    return Parameter(name, (max(1, int(nbytes / 4)),))


def _layer(name: str, parameters: Sequence[Parameter]) -> Layer:
    return Layer(name, tuple(parameters), 0, Cost(), Cost())


def single(
    prober: Prober, machine: Machine, layers: Workload, small_s: float, all_s: float
) -> Measurements:
    """Return a small and a large exchange with which a plan of these layers takes `all_s`.

    The small one is as measured, unless the layers together take less than their latencies do.
    """
    nbytes = layers.gradient_nbytes

    def pair(small: float, large: float) -> Measurements:
        return Measurement(_SMALL_NBYTES, small), Measurement(nbytes, large)

    def takes(measured: Measurements) -> float:
        found = prober.strategy.calibrate(machine, measured, prober.config)
        plan = prober.strategy.plan(layers, found, prober.config, Window(1))
        return makespan_s(plan, _Exchanging(Roofline.of(found)))

    def alike(scale: float) -> Measurements:
        return pair(scale * small_s, scale * small_s)

    def slower(scale: float) -> Measurements:
        return pair(small_s, scale * small_s)

    if takes(slower(1.0)) > all_s:
        return alike(_where(lambda scale: takes(alike(scale)), all_s, 1e-3, 1.0))
    most = max(2.0, 4 * all_s / small_s)
    return slower(_where(lambda scale: takes(slower(scale)), all_s, 1.0, most))


def _where(of: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return where a rising function has a value, between two positive places."""
    for _ in range(_NUM_HALVINGS):
        middle = (low * high) ** 0.5
        if of(middle) < wanted:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class _Exchanging:
    """Prices what exchanges, and computation at nothing."""

    prices: CostModel

    def seconds(self, task: Task) -> float:
        """Return how long the task holds its resources."""
        return 0.0 if task.kind in COMPUTE else self.prices.seconds(task)


def _columns(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[list[float]]]:
    """Return for each exchange the seconds of each rank in each round."""
    num_exchanges = len(ranks[0][0])
    return [[[row[i] for row in rank] for rank in ranks] for i in range(num_exchanges)]


def differences(clock: Clock, marks: Iterable[Any]) -> list[float]:
    """Return the seconds between each mark and the next one."""
    return [end - start for start, end in pairwise(clock.seconds(list(marks)))]
