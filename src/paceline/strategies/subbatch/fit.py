"""Measure what a plan has to know: each part of a step by itself, one after another.

The steps are real ones, but nothing overlaps: an exchange is over before the next computation
begins, and the body's gradients are exchanged after its backward. So each part takes what it takes
alone, encoding and decoding included, and how they overlap is the plan's business. Afterwards the
model is what it was.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from paceline.core.calibration import Line, linked_in_ring
from paceline.core.cost import Measured, Roofline
from paceline.core.machine import CodecSpeed, Machine
from paceline.core.plan import COMPUTE, Kind
from paceline.core.strategy import Window
from paceline.core.timeline import Span, Timeline
from paceline.core.wire_format import WIRE_FORMATS
from paceline.core.workload import Workload
from paceline.data.dataset import Samples
from paceline.links.group import Group
from paceline.record.clock import clock_for
from paceline.record.merge import clock_offset, gather_timeline
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.lane import Lane
from paceline.strategies.subbatch.learner import Learner, Parallel
from paceline.strategies.subbatch.plan import plan
from paceline.strategies.subbatch.recording import PassRecorder
from paceline.strategies.subbatch.run import body_of, restored
from paceline.training.step import SGD, Share
from paceline.training.this_machine import Speed, this_machine

_NUM_WARM_UP = 2
_FEWEST_STEPS, _MOST_STEPS = 3, 40
_WITHIN_LINKS = CodecSpeed(encode_values_per_s=float("inf"), decode_values_per_s=float("inf"))
_ANY_SPEED = Speed(1e9, 1e9)  # of what was not measured: of nothing
# Weights must not run away in steps that learn nothing.
_LEARNING_RATE = 1e-6
Durations = dict[tuple[str, Kind, str], float]


@dataclass(frozen=True)
class Fitted:
    """This machine as strategy subbatch finds it, and the prices of its plans."""

    machine: Machine
    cost: Measured


def fit(
    parallel: Parallel,
    workload: Workload,
    config: SubBatch,
    group: Group,
    source: Callable[[], Iterator[Share]],
    samples: Samples,
    sgd: SGD,
    seconds: float,
) -> Fitted:
    """Measure for about `seconds`, on all ranks together. `source` begins an epoch of data."""
    restore = restored(parallel)
    machine = this_machine(group, [_ANY_SPEED] * group.world_size)
    device = machine.devices[group.rank].name
    recorder = PassRecorder(clock_for(group.device), device, group.rank)
    lane = Lane(group)
    replica, _ = body_of(parallel, config, group, lane)
    sgd = replace(sgd, learning_rate=_LEARNING_RATE)
    learner = Learner(parallel, replica, config, group, lane, recorder, sgd, 0, samples)
    endless = _repeat(source)
    with lane.one_by_one():
        for _ in range(1 + _NUM_WARM_UP):
            learner.step(endless)
        first, *_, last = recorder.step_ends()
        longest = max(group.gather((last - first) / _NUM_WARM_UP))
        num_steps = max(_FEWEST_STEPS, min(_MOST_STEPS, int(seconds / longest)))
        replica.record(recorder)
        recorder.start_trace(parallel.body)
        for _ in range(num_steps):
            learner.step(endless)
        recorder.stop_trace()
    timeline = gather_timeline(recorder.spans(), clock_offset(group), group)
    replica.close()
    lane.close()
    restore()
    return _fitted(timeline, workload, machine, config)


def _repeat(source: Callable[[], Iterator[Share]]) -> Iterator[Share]:
    while True:
        yield from source()


def _fitted(timeline: Timeline, workload: Workload, machine: Machine, config: SubBatch) -> Fitted:
    computed, exchanged = _medians(timeline.spans)
    machine = _linked(machine)
    durations = dict(computed)
    if config.workers > 1:
        for task in plan(workload, machine, config, Window(1)).tasks:
            if task.kind not in COMPUTE:
                key = (task.on[0].owner, task.kind, task.part)
                durations[key] = exchanged[task.kind, task.part]
    return Fitted(machine, Measured(durations, Roofline.of(machine)))


def _medians(spans: tuple[Span, ...]) -> tuple[Durations, dict[tuple[Kind, str], float]]:
    """Return the median seconds of what each device computes, and of what they exchange."""
    computed, exchanged = (
        defaultdict[tuple[str, Kind, str], list[float]](list),
        defaultdict[tuple[Kind, str], list[float]](list),
    )
    for span in spans:
        if span.kind in COMPUTE:
            computed[span.on[0].owner, span.kind, span.part].append(span.duration_s)
        else:
            exchanged[span.kind, span.part].append(span.duration_s)
    return (
        {key: median(values) for key, values in computed.items()},
        {key: median(values) for key, values in exchanged.items()},
    )


def _linked(machine: Machine) -> Machine:
    """Return the machine whose devices are joined in a ring; what encodes is within the links.

    The seconds of all exchanges are known, so that the links' own speed is never asked for.
    """
    if len(machine.devices) == 1:
        return machine
    linked = linked_in_ring(machine, machine.devices, Line(0.0, 1e-9))
    facts = {"codecs": {one.kernel: _WITHIN_LINKS for one in WIRE_FORMATS.values()}}
    return linked.model_copy(
        update={
            "hosts": tuple(host.model_copy(update=facts) for host in linked.hosts),
            "devices": tuple(device.model_copy(update=facts) for device in linked.devices),
        }
    )
