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

import torch
import torch.distributed as dist
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

_NUM_WARM_UP = 5
_SMALL_NBYTES = 1024
_MOST_STEPS = 400
_MOST_TRACED = 100
_NUM_REDUCTIONS = 40
Key = tuple[Kind, str]


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
    exchange_nbytes: int,
) -> Profile:
    """Profile `model` for about `seconds`, on all ranks together; the model itself is not touched.

    `workload` describes one rank's part of a step. `source` begins an epoch of training data each
    time that it is called. The link is measured with messages of up to `exchange_nbytes`.
    """
    recorder = Recorder(clock_for(group.device), "", group.rank)
    copied = copy.deepcopy(model).train()
    optimizer = sgd.optimizer(copied)
    endless = _repeat(source)

    def steps(num_steps: int) -> list[float]:
        group.barrier()
        for _ in range(num_steps):
            train_step(copied, optimizer, endless, recorder)
        return [end - start for start, end in pairwise(recorder.step_ends())]

    slowest = max(group.gather(median(steps(_NUM_WARM_UP))))
    num_steps = max(_NUM_WARM_UP, min(_MOST_STEPS, int(seconds / 2 / slowest)))
    whole = median(steps(num_steps))
    recorder.start_trace(copied)
    steps(min(num_steps, _MOST_TRACED))
    recorder.stop_trace()
    parts = _scaled(recorder.spans(), whole)
    return _of_ranks(parts, workload, _reductions(group, exchange_nbytes), group)


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


def _reductions(group: Group, nbytes: int) -> tuple[Reduction, Reduction] | None:
    """Measure a small and a large all-reduce between all ranks; None if there is one rank."""
    if group.world_size == 1:
        return None
    small, large = _SMALL_NBYTES, max(nbytes, 2 * _SMALL_NBYTES)
    return (
        Reduction(small, _all_reduce_seconds(group, small)),
        Reduction(large, _all_reduce_seconds(group, large)),
    )


def _all_reduce_seconds(group: Group, nbytes: int) -> float:
    """Return the median seconds of an all-reduce, as the rank sees it that joins it last."""
    values = torch.zeros(nbytes // 4, device=group.device)
    clock = clock_for(group.device)
    durations = []
    for repeat in range(_NUM_WARM_UP + _NUM_REDUCTIONS):
        group.barrier()
        marks = [clock.mark()]
        dist.all_reduce(values)
        marks.append(clock.mark())
        start, end = clock.seconds(marks)
        if repeat >= _NUM_WARM_UP:
            durations.append(end - start)
    return float(median(min(row) for row in zip(*group.gather(durations), strict=True)))


def _of_ranks(
    parts: dict[Key, float],
    workload: Workload,
    reductions: tuple[Reduction, Reduction] | None,
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
