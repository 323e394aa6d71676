"""What a strategy would take on a machine: seconds a step, and where they go."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paceline.core.breakdown import Breakdown, breakdown
from paceline.core.cost import CostModel, Roofline
from paceline.core.machine import Machine
from paceline.core.memory import replica_nbytes
from paceline.core.plan import COMMUNICATION, Plan
from paceline.core.simulate import makespan_s, period, simulate
from paceline.core.strategy import Strategy, Window, codec_fields
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.tune.chunk import candidates

_WINDOW = 8  # steps: enough for the first, which starts cold, to drop out of the period
_SHORT_WINDOW = 2  # for plans so wide that their steps hardly depend on the one before
_MANY_TASKS = 8_000  # of a step


@dataclass(frozen=True)
class Forecast:
    """What one strategy would take: seconds a step, and where they go.

    `link_nbytes` are the bytes that a step sends in each direction of each link, `memory_nbytes`
    what each device needs, and each host that holds anything. `placement` says which devices it
    takes; on their own they would reach `alone_samples_per_s` together.
    """

    strategy: str
    config: Any
    workers: int
    step_s: float
    samples_per_s: float
    link_nbytes: Mapping[str, float]
    memory_nbytes: Mapping[str, int]
    breakdown: Breakdown
    machine: Machine
    timeline: Timeline
    placement: str = "as listed"
    alone_samples_per_s: float | None = None

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

    @cached_property
    def link_busy(self) -> float:
        """The share of the step in which the busiest link is in use."""
        links = [
            sum(span.duration_s for span in track)
            for resource, track in self.timeline.tracks.items()
            if resource.lane == "wire"
        ]
        return max(links, default=0.0) / self.timeline.num_steps() / self.step_s

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker."""
        return tuple(device.name for device in self.machine.devices[: self.workers])

    @property
    def why(self) -> str:
        """One sentence: what the step's time goes to."""
        parts = self.breakdown
        # Asynchronous devices have steps of their own.
        share = 100 / (parts.compute_s + parts.exposed_s + parts.idle_s)
        computing = f"computes {parts.compute_s * share:.0f} % of the step"
        if not parts.communication_s:
            return f"{computing}; nothing is exchanged"
        return (
            f"{computing}; {parts.exposed_s * share:.0f} % is communication that shows, "
            f"of {parts.communication_s * 1e3:.3g} ms"
        )


def forecast(
    workload: Workload,
    machine: Machine,
    strategy: Strategy,
    config: Any,
    samples_per_step: float,
    cost: CostModel | None = None,
) -> Forecast:
    """Return what a strategy would take on a machine, whose rates price it unless `cost` does.

    `workload` is one worker's part of a step, the largest if the samples do not divide evenly;
    `samples_per_step` are those of all workers. InvalidInput if the strategy does not fit.
    """
    model = cost or Roofline.of(machine)

    def window(num_steps: int) -> Plan:
        return strategy.plan(workload, machine, config, Window(num_steps))

    num_steps = _SHORT_WINDOW if len(window(1)) > _MANY_TASKS else _WINDOW
    plan = window(num_steps)
    timeline = simulate(plan, model)
    step_s = (makespan_s(window(2 * num_steps), model) - timeline.makespan_s) / num_steps
    return Forecast(
        strategy.name,
        config,
        config.workers,
        step_s,
        samples_per_step / step_s,
        {link: nbytes / num_steps for link, nbytes in _link_nbytes(plan).items()},
        memory(workload, machine, strategy, config),
        breakdown(timeline),
        machine,
        timeline,
    )


def rank(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Return the forecasts by throughput, best first."""
    return sorted(forecasts, key=lambda forecast: -forecast.samples_per_s)


def memory(
    workload: Workload, machine: Machine, strategy: Strategy, config: Any
) -> Mapping[str, int]:
    """Return the bytes that each device needs, and each host that holds anything, by name."""
    if strategy.memory is not None:
        return strategy.memory(workload, machine, config)
    devices = machine.first_devices(config.workers)
    return {device.name: replica_nbytes(workload) for device in devices}


def chunk_seconds(
    workload: Workload,
    machine: Machine,
    strategy: Strategy,
    config: Any,
    cost: CostModel | None = None,
) -> dict[int, float]:
    """Return the predicted seconds of a step for each chunk size that a tuner would try.

    Of short windows: many sizes are looked at, and only compared with each other.
    """
    model = cost or Roofline.of(machine)

    def seconds(chunk: int) -> float:
        other = replace(config, chunk=chunk)
        return period(lambda n: strategy.plan(workload, machine, other, Window(n)), model, 1)

    return {chunk: seconds(chunk) for chunk in candidates(len(workload.layers))}


def _link_nbytes(plan: Plan) -> dict[str, float]:
    load: dict[str, float] = {}
    sorts, sort_of = plan.priced_alike
    for number, times in Counter(sort_of).items():
        task = sorts[number]
        if task.kind in COMMUNICATION:
            for resource in task.on:
                if resource.lane == "wire":
                    load[resource.owner] = load.get(resource.owner, 0.0) + times * task.cost.nbytes
    return load
