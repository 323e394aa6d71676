"""Predict the step time of a strategy on a machine."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.compare import Breakdown
from paceline.core.cost import CostModel
from paceline.core.durations import duration
from paceline.core.losses import BETWEEN_HOSTS, WITHIN_A_HOST
from paceline.core.machine import Machine
from paceline.core.strategy import StepsToLoss, Strategy, codec_fields, exchange_name
from paceline.core.workload import Workload, replica_nbytes
from paceline.planner.grouping import Windows
from paceline.planner.steady import Steady, devices_of, steady
from paceline.strategies import STRATEGIES

ERROR_BAR = 0.06  # mean relative error of predicted step times (benchmarks/planner)
_SHOWN_SLOWDOWN = 1.005
_ASYNCHRONOUS = (
    "changes training: gradients are stale, because workers do not wait for each other's updates"
)


@dataclass(frozen=True)
class Forecast(Steady):
    """The predicted step time, memory and throughput of a strategy.

    `memory_nbytes`: bytes needed, by the name of a device or of a host that holds tensors.
    `placement`: how devices were chosen, such as "spread" (over hosts). `alone_samples_per_s`:
    total throughput of the workers' devices without any exchange. `is_balanced`: whether the plan
    splits batches by the devices' speeds. `notes`: sentences that complement `why`.
    `is_same_training`: workers compute the same as one worker with the whole batch, except for a
    codec's rounding. `steps_to_loss`: steps needed to reach a loss, relative to synchronous
    training; None if `is_same_training` or if this number is unknown.
    """

    strategy: str
    config: Any
    workers: int
    samples_per_s: float
    memory_nbytes: Mapping[str, int]
    machine: Machine
    placement: str = "as listed"
    alone_samples_per_s: float | None = None
    is_balanced: bool = False
    notes: tuple[str, ...] = ()
    is_same_training: bool = True
    steps_to_loss: StepsToLoss | None = None

    @property
    def exchange(self) -> str:
        """Name of the exchange, such as "host with dynamic8"."""
        return exchange_name(self.strategy, self.config)

    @property
    def learnt_samples_per_s(self) -> float:
        """The throughput with which synchronous training would learn equally fast.

        This is `samples_per_s` divided by `steps_to_loss`; 0 if the strategy changes training and
        `steps_to_loss` is unknown.
        """
        if self.is_same_training:
            return self.samples_per_s
        return self.samples_per_s / self.steps_to_loss.median if self.steps_to_loss else 0.0

    @property
    def codec(self) -> str | None:
        """The first codec of the configuration; None without a codec."""
        codecs = (getattr(self.config, field) for field in codec_fields(self.config))
        return next((codec for codec in codecs if codec is not None), None)

    @property
    def efficiency(self) -> float | None:
        """Throughput relative to `alone_samples_per_s`; None if the latter is unknown."""
        alone = self.alone_samples_per_s
        return None if alone is None else self.samples_per_s / alone

    @property
    def wire_nbytes(self) -> float:
        """Bytes per step over the link and direction that carry the most bytes."""
        return max(self.link_nbytes.values(), default=0.0)

    @property
    def range_share(self) -> float:
        """Half the width of `range_s`, relative to `step_s`."""
        return half_width(self.machine, self.breakdown)

    @property
    def range_s(self) -> tuple[float, float]:
        """Range in seconds in which nine of ten measured median step times should lie."""
        return range_of(self.step_s, self.range_share)

    @property
    def shown_s(self) -> float:
        """Duration of the drawn part of the timeline: from one weight update to the next."""
        return self.step_s * self.steps_per_update

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker."""
        return tuple(device.name for device in self.machine.devices[: self.workers])

    @property
    def why(self) -> str:
        """A sentence about the parts of the step: computation, and exposed communication."""
        parts = self.breakdown
        # Percentages of a device's own step, because asynchronous devices do not step together.
        share = 100 / (parts.compute_s + parts.exposed_s + parts.idle_s)
        text = f"computes {parts.compute_s * share:.0f} % of the step"
        if self.slowdown >= _SHOWN_SLOWDOWN:
            text += f" ({100 * (self.slowdown - 1):.0f} % slower {' and '.join(self.slowed_by)})"
        if not parts.communication_s:
            return f"{text}; nothing is exchanged"
        exposed = f"{parts.exposed_s * share:.0f} % is exposed communication"
        return f"{text}; {exposed}, of {duration(parts.communication_s)} in all"


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
    """Predict a strategy's step on a machine.

    `workload`: step of the worker with the most samples. `samples_per_step`: number of samples over
    all workers. `cost`: predicts the time of each task, by default from the machine's speeds.
    `balanced`: split batches by the devices' speeds, if the strategy can plan such batches. Raises
    InvalidInput if the strategy cannot be planned on this machine.
    """
    windows = Windows(strategy, workload, machine.reached, config, cost, balanced=balanced)
    found = steady(windows)
    step_s, notes = _fed(windows.machine, config.workers, samples_per_step, found.step_s)
    steps_to_loss, caveats = _learning(windows)
    return Forecast(
        **vars(found) | {"step_s": step_s},
        strategy=strategy.name,
        config=config,
        workers=config.workers,
        samples_per_s=samples_per_step / step_s,
        memory_nbytes=memory(workload, windows.machine, strategy, config),
        machine=windows.machine,
        is_balanced=windows.is_balanced,
        notes=tuple(filter(None, (*notes, found.limit, *caveats))),
        is_same_training=not caveats,
        steps_to_loss=steps_to_loss,
    )


def forecast_alone(workload: Workload, machine: Machine) -> Forecast:
    """Predict the step of one worker on the machine's first device."""
    one = STRATEGIES["allreduce"]  # any strategy: one worker exchanges nothing
    return forecast(workload, machine, one, one.config(workers=1), workload.batch_size)


def _learning(windows: Windows) -> tuple[StepsToLoss | None, tuple[str, ...]]:
    """Return `Forecast.steps_to_loss`, and a note if training differs from synchronous training."""
    planning, config = windows.strategy.planning, windows.config
    if config.workers == 1:
        return None, ()
    if planning.steps_to_loss is not None:
        found = planning.steps_to_loss(windows.workload, config)
        return found, (of_learning(found),)
    return None, (_ASYNCHRONOUS,) if planning.is_asynchronous else ()


def of_learning(steps: StepsToLoss | None) -> str:
    """Describe how many steps a strategy needs to reach the loss of synchronous training."""
    if steps is None:
        return "changes training: nobody has measured how many steps it needs to reach a loss"
    ratio = f"{steps.median:.2f}"
    if steps.low != steps.high:
        ratio += f" ({steps.low:.2f} to {steps.high:.2f})"
    return (
        f"changes training: needed {ratio} times as many steps as synchronous training to reach "
        f"the same loss, measured on {steps.measured_on}; other models may differ"
    )


def _fed(
    machine: Machine, workers: int, samples_per_step: float, step_s: float
) -> tuple[float, tuple[str, ...]]:
    """Return a step's seconds, and a note if slow reading of samples lengthens the step."""
    on_host = Counter(device.host for device in devices_of(machine, workers))
    for host in machine.hosts:
        wanted = on_host[host.name] / min(workers, machine.num_devices) * samples_per_step
        if host.samples_per_s is not None and wanted > step_s * host.samples_per_s:
            note = f"limited by {host.name}, which reads {host.samples_per_s:g} samples/s"
            return wanted / host.samples_per_s, (note,)
    return step_s, ()


def memory(
    workload: Workload, machine: Machine, strategy: Strategy, config: Any
) -> Mapping[str, int]:
    """Return the bytes needed, by the name of a device or of a host that holds tensors."""
    if strategy.planning.memory is not None:
        return strategy.planning.memory(workload, machine, config)
    devices = machine.first_devices(config.workers)
    return {device.name: replica_nbytes(workload) for device in devices}


# A measured step should be within `step_s * (1 - h)` and `step_s * (1 + h)`. `half_width` computes
# h = a + b * share; `share` is the fraction of a step in which workers communicate. Each line of
# constants starts with a and b for one source of a machine's speeds:
# - `_PROFILED`: a profile. `share` counts only exposed communication. Fitted to
#   benchmarks/planner, which predicts and then runs each configuration.
# - `_STATED`: a machine file. Fitted to benchmarks/codecs, where seven predicted steps between
#   two hosts were at most 19 % off.
# - `_PUBLISHED`: a machine file with losses from papers (`WITHIN_A_HOST`, `BETWEEN_HOSTS`). Fitted
#   to the tables of benchmarks/scaling_tables, whose links and frameworks differ widely. Only
#   the part of `share` above `_HARDLY_EXCHANGED` counts.
_PROFILED, _PROFILED_EXPOSED = 0.13, 0.13
_QUIET = 0.05  # `_PROFILED` includes this spread of step times; only a larger spread adds to h
_STATED, _STATED_EXCHANGED = 0.13, 0.26
_PUBLISHED, _PUBLISHED_EXCHANGED, _HARDLY_EXCHANGED = 0.07, 2.5, 0.02
_WIDEST = 0.7  # upper limit of h for machine files with losses from papers


def range_of(step_s: float, share: float) -> tuple[float, float]:
    """Return the shortest and longest likely step time; `share`: the forecast's `range_share`."""
    return max(0.0, 1 - share) * step_s, (1 + share) * step_s


def half_width(machine: Machine, parts: Breakdown) -> float:
    """Return half the width of the range of likely step times, relative to the step."""
    whole = parts.compute_s + parts.exposed_s + parts.idle_s
    if not machine.usual_losses.spread:  # 0 for a profiled machine, whose speeds include losses
        unrest = max(0.0, machine.usual_losses.unrest - _QUIET)
        return _PROFILED + _PROFILED_EXPOSED * parts.exposed_s / whole + unrest
    exchanged = min(1.0, parts.communication_s / whole)
    if machine.usual_losses not in (WITHIN_A_HOST, BETWEEN_HOSTS):
        return _STATED + _STATED_EXCHANGED * exchanged
    more = _PUBLISHED_EXCHANGED * max(0.0, exchanged - _HARDLY_EXCHANGED)
    return min(_WIDEST, _PUBLISHED + more)
