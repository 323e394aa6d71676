"""Steps of a rank in blocks, as they are and recorded, taking turns: what both took."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from torch import nn

from paceline.core.timeline import Span, Timeline
from paceline.exchange.replica import Replica
from paceline.links.group import Group
from paceline.record.clock import Clock
from paceline.record.merge import clock_offset, gather_timeline
from paceline.record.recorder import Recorder
from paceline.training.step import Share, train_step

_MOST_BLOCKS, _FEWEST_A_BLOCK = 5, 4
_NUM_SETTLING = 2  # after an exchange was told of a recorder, or of none: it begins anew


@dataclass
class Blocks:
    """What blocks of steps showed on this rank, without the first step of each block.

    `plain` and `recorded` are seconds by block. `spans` are this rank's, `timelines` those of all
    ranks, one a recorded block. `processor_s` is what a plain step took of each core of this rank.
    """

    plain: list[list[float]] = field(default_factory=list)
    recorded: list[list[float]] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    processor_s: float = 0.0


@dataclass(frozen=True)
class Trainee:
    """A model in training on this rank, and the batches that it is given."""

    model: nn.Module
    replica: Replica
    optimizer: torch.optim.Optimizer
    source: Iterator[Share]

    def step(self, recorder: Recorder) -> None:
        """Take one step together with the others."""
        train_step(self.replica, self.optimizer, self.source, recorder)

    def step_alone(self, recorder: Recorder) -> None:
        """Take one step on the model itself, which exchanges nothing."""
        train_step(self.model, self.optimizer, self.source, recorder)


def split(num_steps: int) -> tuple[int, int]:
    """Return into how many blocks at least so many steps go, and how many each has."""
    num_blocks = max(2, min(_MOST_BLOCKS, num_steps // _FEWEST_A_BLOCK))
    return num_blocks, -(-num_steps // num_blocks)


def measure(
    trainee: Trainee, recorder: Recorder, clock: Clock, group: Group, num_steps: int
) -> Blocks:
    """Take blocks of steps, as they are and recorded; which goes first changes from pair to pair.

    All ranks must call it together.
    """
    num_blocks, size = split(num_steps)
    settling = _NUM_SETTLING if group.world_size > 1 else 0
    found, processor = Blocks(), 0.0

    def block(heard_by: Recorder | None) -> list[float]:
        """Return the seconds of steps, after some more; `heard_by` records them, if any does."""
        trainee.replica.record(heard_by)
        for _ in range(settling):
            trainee.step(recorder)
        if heard_by is not None:
            heard_by.start_trace(trainee.model)
        marks: list[Any] = []
        for _ in range(size + 1):
            trainee.step(recorder)
            marks.append(clock.mark())
        recorder.stop_trace()
        recorder.step_ends()
        return [end - start for start, end in pairwise(clock.seconds(marks))]

    for number in range(num_blocks):
        for recorded in (False, True) if number % 2 == 0 else (True, False):
            group.barrier()
            if recorded:
                found.recorded.append(block(recorder))
                spans = recorder.spans()
                found.spans.append(spans)
                found.timelines.append(gather_timeline(spans, clock_offset(group), group))
            else:
                before = _processor_s()
                found.plain.append(block(None))
                processor += _processor_s() - before
    taken = num_blocks * (size + 1 + settling)
    found.processor_s = processor / taken / len(os.sched_getaffinity(0))
    return found


def _processor_s() -> float:
    usage = getrusage(RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half, as timelines have it of their steps."""
    outer = len(seconds) // 4
    middle = sorted(seconds)[outer : len(seconds) - outer]
    return sum(middle) / len(middle)
