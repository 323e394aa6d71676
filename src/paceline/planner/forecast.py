"""Forecasts: the predicted seconds of a strategy's step on a machine."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.after_backward import AfterBackward
from paceline.core.compare import Breakdown
from paceline.core.cost import CostModel
from paceline.core.durations import duration
from paceline.core.machine import Machine
from paceline.core.steps_to_loss import UNKNOWN, StepsToLoss
from paceline.core.strategy import Strategy, codec_fields
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload, replica_nbytes
from paceline.planner.grouping import Windows
from paceline.planner.ranges import half_width
from paceline.planner.steady import Steady, devices_of

_SHOWN_SLOWDOWN = 1.005
_ASYNCHRONOUS = (
    "not the same training: workers do not wait for each other, and their gradients are of "
    "parameters that others have changed meanwhile"
)
# Mean absolute error of a predicted step: benchmarks/planner.
ERROR_BAR = 0.06


@dataclass(frozen=True)
class Forecast:
    """The prediction for one strategy: seconds per step, and the parts of the step.

    `link_nbytes`: bytes that a step sends over each direction of a link. `memory_nbytes`: bytes
    that each device needs, and each host that holds tensors. `wire_s`: seconds in which the busiest
    link is in use. `placement`: the devices used. `alone_samples_per_s`: their total throughput
    without any exchange. `is_balanced`: the plan gives workers parts that follow their speeds.
    `notes`: sentences in addition to `why`. `steps_per_update`: steps between two updates in the
    timeline, more than one if workers take several steps between exchanges. `slowdown`: factor by
    which computation takes longer than undisturbed (`core.losses`), caused by `slowed_by`.
    `after_backward`: communication left after backward, if the strategy reports it.
    `is_same_training`: whether it computes what one worker with the whole batch would, except for a
    codec's rounding; otherwise `steps_to_loss` compares the steps to the same loss, if known.
    """

    strategy: str
    config: Any
    workers: int
    step_s: float
    samples_per_s: float
    link_nbytes: Mapping[str, float]
    memory_nbytes: Mapping[str, int]
    wire_s: float
    breakdown: Breakdown
    machine: Machine
    timeline: Timeline
    placement: str = "as listed"
    alone_samples_per_s: float | None = None
    is_balanced: bool = False
    notes: tuple[str, ...] = ()
    steps_per_update: float = 1.0
    slowdown: float = 1.0
    slowed_by: tuple[str, ...] = ()
    after_backward: AfterBackward | None = None
    is_same_training: bool = True
    steps_to_loss: StepsToLoss | None = None

    @property
    def learnt_samples_per_s(self) -> float:
        """The samples of synchronous training to the same loss a second; 0 if that is unknown."""
        if self.is_same_training:
            return self.samples_per_s
        return self.samples_per_s / self.steps_to_loss.median if self.steps_to_loss else 0.0

    @property
    def codec(self) -> str | None:
        """The codec by which anything travels."""
        codecs = (getattr(self.config, field) for field in codec_fields(self.config))
        return next((codec for codec in codecs if codec is not None), None)

    @property
    def efficiency(self) -> float | None:
        """Samples a second over what the devices would reach on their own; None if not known."""
        alone = self.alone_samples_per_s
        return None if alone is None else self.samples_per_s / alone

    @property
    def wire_nbytes(self) -> float:
        """The bytes that a step sends over the busiest link, in one direction."""
        return max(self.link_nbytes.values(), default=0.0)

    @property
    def link_busy(self) -> float:
        """The share of the step in which the busiest link is in use."""
        return self.wire_s / self.step_s

    @property
    def range_share(self) -> float:
        """How far from `step_s` the median of measured steps is meant to be at most, as a share."""
        return half_width(self.machine, self.breakdown)

    @property
    def range_s(self) -> tuple[float, float]:
        """The seconds between which that median is meant to lie in nine of ten cases."""
        return (1 - self.range_share) * self.step_s, (1 + self.range_share) * self.step_s

    def surely_faster_than(self, other: "Forecast") -> bool:
        """Return True if it trains more samples a second wherever in their ranges both are."""
        slowest, fastest = 1 + self.range_share, 1 - other.range_share
        return self.samples_per_s / slowest > other.samples_per_s / fastest

    @property
    def shown_s(self) -> float:
        """The seconds between two updates of the timeline, of which a drawing shows one."""
        return self.step_s * self.steps_per_update

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker."""
        return tuple(device.name for device in self.machine.devices[: self.workers])

    @property
    def why(self) -> str:
        """One sentence about the parts of the step's time."""
        parts = self.breakdown
        # Asynchronous devices have steps of their own.
        share = 100 / (parts.compute_s + parts.exposed_s + parts.idle_s)
        computing = f"computes {parts.compute_s * share:.0f} % of the step"
        if self.slowdown >= _SHOWN_SLOWDOWN:
            longer = f"{100 * (self.slowdown - 1):.0f} % longer than undisturbed"
            computing += f", {longer}: {', and '.join(self.slowed_by)}"
        if not parts.communication_s:
            return f"{computing}; nothing is exchanged"
        return (
            f"{computing}; {parts.exposed_s * share:.0f} % is communication that shows, "
            f"of {duration(parts.communication_s)}"
        )


def forecast(
    workload: Workload,
    machine: Machine,
    strategy: Strategy,
    config: Any,
    samples_per_step: float,
    cost: CostModel | None = None,
    *,
    balanced: bool = False,
) -> Forecast:
    """Predict a strategy on a machine, priced by the machine's rates or by `cost`.

    `workload` is one worker's part of a step, the largest if the samples do not divide evenly;
    `samples_per_step` are those of all workers. `balanced`: with parts that follow the workers'
    speeds, if the strategy plans them. InvalidInput if the strategy does not fit.
    """
    windows = Windows(strategy, workload, machine.reached, config, cost, balanced=balanced)
    return forecast_of(windows, samples_per_step)


def forecast_of(windows: Windows, samples_per_step: float) -> Forecast:
    """Predict a strategy by its windows of steps."""
    machine, config, steady = windows.machine, windows.config, Steady.of(windows)
    step_s, notes = _fed(machine, config.workers, samples_per_step, steady.step_s)
    learns_as, caveats = _learning(windows)
    limit = windows.strategy.planning.limit
    limiting = limit(machine, config, steady.outline) if limit else None
    return Forecast(
        windows.strategy.name,
        config,
        config.workers,
        step_s,
        samples_per_step / step_s,
        steady.link_nbytes,
        memory(windows.workload, machine, windows.strategy, config),
        steady.wire_s,
        steady.breakdown,
        machine,
        steady.timeline,
        is_balanced=windows.is_balanced,
        notes=(*notes, *([limiting] if limiting else []), *caveats),
        steps_per_update=steady.steps_per_update,
        slowdown=steady.slowdown,
        slowed_by=steady.slowed_by,
        after_backward=steady.after_backward,
        is_same_training=not caveats,
        steps_to_loss=learns_as,
    )


def _learning(windows: Windows) -> tuple[StepsToLoss | None, tuple[str, ...]]:
    """Return the steps to a loss, if known, and what differs from synchronous training."""
    planning, config = windows.strategy.planning, windows.config
    if planning.steps_to_loss is not None and config.workers > 1:
        found = planning.steps_to_loss(windows.workload, config)
        return found, (UNKNOWN if found is None else found.sentence,)
    return None, (_ASYNCHRONOUS,) if planning.is_asynchronous and config.workers > 1 else ()


def _fed(
    machine: Machine, workers: int, samples_per_step: float, step_s: float
) -> tuple[float, tuple[str, ...]]:
    """Return the seconds of a step of workers that wait for samples if hosts do not keep up."""
    devices = devices_of(machine, workers)
    on_host = Counter(device.host for device in devices)
    for host in machine.hosts:
        if host.samples_per_s is not None and on_host[host.name]:
            share = on_host[host.name] / min(workers, machine.num_devices)
            wanted = share * samples_per_step
            if wanted > step_s * host.samples_per_s:
                step_s = wanted / host.samples_per_s
                note = f"{host.name} reads {host.samples_per_s:g} samples/s, which is what limits"
                return step_s, (note,)
    return step_s, ()


def memory(
    workload: Workload, machine: Machine, strategy: Strategy, config: Any
) -> Mapping[str, int]:
    """Return the bytes that each device needs, and each host that holds anything, by name."""
    if strategy.planning.memory is not None:
        return strategy.planning.memory(workload, machine, config)
    devices = machine.first_devices(config.workers)
    return {device.name: replica_nbytes(workload) for device in devices}
