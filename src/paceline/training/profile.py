"""Measure what a plan has to know of this machine: the layers' times and the link between ranks.

The profile takes the real training step, on a copy of the model, on all ranks at once: workers that
share a host slow each other down, and a plan for several must know how fast each is beside the
others.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torch import nn

from paceline.core.cost import Measured, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Cost, Kind
from paceline.core.timeline import Span
from paceline.core.workload import Workload
from paceline.links.group import Group
from paceline.record.clock import clock_for
from paceline.record.recorder import Recorder
from paceline.training.step import SGD, Share, train_step
from paceline.training.this_machine import Reduction, Speed, this_machine

_NUM_WARM_UP = 2
_FEWEST_ROUNDS = 3
_SMALL_NBYTES = 1024
_MOST_ROUNDS = 400
_MOST_TRACED = 100
_LARGEST_NBYTES = 32 * 2**20  # beyond it, twice the bytes take twice the time
Key = tuple[Kind, str]
Exchange = Callable[[], None]


@dataclass(frozen=True)
class Profile:
    """This machine with the link between its ranks, and the seconds of each part of a step."""

    machine: Machine
    cost: Measured


def profile(
    model: nn.Module,
    workload: Workload,
    source: Callable[[], Iterator[Share]],
    sgd: SGD,
    group: Group,
    seconds: float,
    exchange_of: Callable[[int], Exchange],
) -> Profile:
    """Profile `model` for about `seconds`, on all ranks together; the model itself is not touched.

    `workload` describes one rank's part of a step. `source` begins an epoch of training data each
    time that it is called. `exchange_of(nbytes)` returns a function that exchanges gradients of
    that size as the strategy does it. Computing and exchanging take turns, as they do in training:
    ranks arrive at an exchange as unevenly, and find caches and cores as they will then.
    """
    recorder = Recorder(clock_for(group.device), "", group.rank)
    copied = copy.deepcopy(model).train()
    optimizer = sgd.optimizer(copied)
    endless = _repeat(source)
    sizes = _sizes(workload)
    exchanges = [exchange_of(nbytes) for nbytes in sizes] if group.world_size > 1 else []

    def rounds(num_rounds: int) -> list[list[float]]:
        """Return the seconds of a step and of each exchange, one row a round."""
        clock = clock_for(group.device)
        rows = []
        for _ in range(num_rounds):
            marks = [clock.mark()]
            train_step(copied, optimizer, endless, recorder)
            marks.append(clock.mark())
            for exchange in exchanges:
                exchange()
                marks.append(clock.mark())
            rows.append([end - start for start, end in pairwise(clock.seconds(marks))])
        return rows

    slowest = max(min(map(sum, rank)) for rank in group.gather(rounds(_NUM_WARM_UP)))
    num_rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(seconds / 2 / slowest)))
    untraced = rounds(num_rounds)
    recorder.start_trace(copied)
    rounds(min(num_rounds, _MOST_TRACED))
    recorder.stop_trace()
    rows = group.gather(untraced)
    whole = _straggling(rows) * median(row[0] for row in untraced)
    reductions = [
        Reduction(nbytes, median(min(rank[i][1 + j] for rank in rows) for i in range(num_rounds)))
        for j, nbytes in enumerate(sizes if exchanges else ())
    ]
    return _of_ranks(_scaled(recorder.spans(), whole), workload, reductions, group)


def _sizes(workload: Workload) -> tuple[int, int]:
    """Return the bytes of a small and of a large exchange."""
    large = max(2 * _SMALL_NBYTES, min(workload.gradient_nbytes, _LARGEST_NBYTES))
    return _SMALL_NBYTES, large // 4 * 4


def _straggling(rows: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return how much longer the slowest rank of a step takes than the slowest takes as a rule.

    Ranks that wait for each other in every step pay for every delay of any of them, in computing
    or in the exchange that follows. Delays are rare and long, so that the median of both together
    is more than the sum of their medians; the difference counts as computing.
    """
    typical = max(median(row[0] for row in rank) for rank in rows)
    rounds = list(zip(*rows, strict=True))
    exchanges = [min(row[-1] for row in one) if len(one[0]) > 1 else 0.0 for one in rounds]
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
    parts: dict[Key, float],
    workload: Workload,
    reductions: Sequence[Reduction],
    group: Group,
) -> Profile:
    rows = group.gather([[kind.value, part, seconds] for (kind, part), seconds in parts.items()])
    measured = [{(Kind(kind), part): seconds for kind, part, seconds in row} for row in rows]
    machine = this_machine(group, [_speed(workload, row) for row in measured], reductions)
    durations = {
        (device.name, kind, part): seconds
        for device, row in zip(machine.devices, measured, strict=True)
        for (kind, part), seconds in row.items()
    }
    return Profile(machine, Measured(durations, Roofline.of(machine)))


def _speed(workload: Workload, parts: dict[Key, float]) -> Speed:
    work = sum((layer.forward + layer.backward for layer in workload.layers), Cost())
    seconds = sum(s for (kind, _), s in parts.items() if kind in (Kind.FORWARD, Kind.BACKWARD))
    return Speed(work.flops / seconds, work.nbytes / seconds)
