"""Measure what a plan has to know of this machine: the layers' times and the link between ranks.

The profile takes the real training step, on a copy of the model, on all ranks at once: workers that
share a host slow each other down, and a plan for several must know how fast each is beside the
others.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from paceline.core.calibration import Measurements
from paceline.core.cost import Measured, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Kind
from paceline.core.strategy import Exchange, Prober
from paceline.core.timeline import Span
from paceline.core.workload import Workload
from paceline.links.group import Group
from paceline.record.clock import clock_for
from paceline.record.recorder import Recorder
from paceline.training.exchanges import Probes, differences
from paceline.training.step import Share, train_step
from paceline.training.this_machine import Speed, this_machine

_NUM_WARM_UP = 2
_FEWEST_ROUNDS = 3
_MOST_ROUNDS = 400
_MOST_TRACED = 100
Key = tuple[Kind, str]


@dataclass(frozen=True)
class Profile:
    """This machine, the seconds of each part of a step, and of each strategy's exchange.

    The machine has no links yet: what a link gives depends on how a strategy uses it, and each
    strategy derives its own from its small and its large exchange (`Exchange.calibrate`).
    """

    machine: Machine
    durations: Mapping[tuple[str, Kind, str], float]
    exchanges: Mapping[str, Measurements]

    def calibrated(self, strategy: Exchange, config: Any = None) -> tuple[Machine, Measured]:
        """Return the machine as the strategy finds it, and the prices of its plans.

        `config` is the one with which its exchange was measured; None: that of the strategy as it
        comes.
        """
        machine = self.machine
        if strategy.name in self.exchanges:
            machine = strategy.calibrate(machine, self.exchanges[strategy.name], config)
        return machine, Measured(self.durations, Roofline.of(machine))


def profile(
    model: nn.Module,
    workload: Workload,
    source: Callable[[], Iterator[Share]],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    group: Group,
    seconds: float,
    probers: Mapping[str, Prober],
) -> Profile:
    """Profile `model` for about `seconds`, on all ranks together; the model itself is not touched.

    `workload` describes one rank's part of a step. `source` begins an epoch of training data each
    time that it is called. `probers` make, for each strategy, what exchanges gradients of a size as
    that strategy does. Computing and exchanging take turns, as they do in training: ranks arrive at
    an exchange as unevenly, and find caches and cores as they will then.
    """
    recorder = Recorder(clock_for(group.device), "", group.rank)
    copied = copy.deepcopy(model).train()
    optimizer = optimizer_of(copied)
    endless = _repeat(source)
    probes = Probes.of(workload, group, probers)

    def rounds(num_rounds: int) -> list[list[float]]:
        """Return the seconds of a step and of each exchange, one row a round."""
        clock = clock_for(group.device)
        rows = []
        for _ in range(num_rounds):
            marks = [clock.mark()]
            train_step(copied, optimizer, endless, recorder)
            marks.append(clock.mark())
            rows.append([*differences(clock, marks), *probes.once(clock)])
        return rows

    slowest = max(min(map(sum, rank)) for rank in group.gather(rounds(_NUM_WARM_UP)))
    num_rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(seconds / 2 / slowest)))
    untraced = rounds(num_rounds)
    recorder.start_trace(copied)
    rounds(min(num_rounds, _MOST_TRACED))
    recorder.stop_trace()
    probes.close()
    rows = group.gather(untraced)
    whole = _straggling(rows) * median(row[0] for row in untraced)
    machine, durations = _of_ranks(_scaled(recorder.spans(), whole), workload, group)
    exchanges = probes.measured([[row[1:] for row in rank] for rank in rows], machine)
    return Profile(machine, durations, exchanges)


def _straggling(rows: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return how much longer the slowest rank of a step takes than the slowest takes as a rule.

    Ranks that wait for each other in every step pay for every delay of any of them, in computing
    or in the exchange that follows. Delays are rare and long, so that the median of both together
    is more than the sum of their medians; the difference counts as computing.
    """
    typical = max(median(row[0] for row in rank) for rank in rows)
    rounds = list(zip(*rows, strict=True))
    exchanges = [min(row[1] for row in one) if len(one[0]) > 1 else 0.0 for one in rounds]
    steps = [max(row[0] for row in one) for one in rounds]
    together = median(a + b for a, b in zip(steps, exchanges, strict=True)) - median(exchanges)
    return float(together / typical)


def _repeat(source: Callable[[], Iterator[Share]]) -> Iterator[Share]:
    while True:
        yield from source()


def _scaled(spans: Sequence[Span], whole_s: float) -> dict[Key, float]:
    """Return the median seconds of each part, scaled so that together they take `whole_s`.

    Tracing costs a little in each layer; the untraced step knows how long all of it takes.
    """
    durations: dict[Key, list[float]] = defaultdict(list)
    for span in spans:
        durations[span.kind, span.part].append(span.duration_s)
    medians = {key: median(values) for key, values in durations.items()}
    scale = whole_s / sum(medians.values())
    return {key: scale * seconds for key, seconds in medians.items()}


def _of_ranks(
    parts: dict[Key, float], workload: Workload, group: Group
) -> tuple[Machine, dict[tuple[str, Kind, str], float]]:
    """Return this machine, and the seconds of each part on each device."""
    rows = group.gather([[kind.value, part, seconds] for (kind, part), seconds in parts.items()])
    measured = [{(Kind(kind), part): seconds for kind, part, seconds in row} for row in rows]
    machine = this_machine(group, [_speed(workload, row) for row in measured])
    durations = {
        (device.name, kind, part): seconds
        for device, row in zip(machine.devices, measured, strict=True)
        for (kind, part), seconds in row.items()
    }
    return machine, durations


def _speed(workload: Workload, parts: dict[Key, float]) -> Speed:
    seconds = sum(s for (kind, _), s in parts.items() if kind in (Kind.FORWARD, Kind.BACKWARD))
    return Speed.of(workload, seconds)
