"""Forecast what strategies would take on a machine, and rank them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.breakdown import Breakdown, breakdown
from paceline.core.cost import CostModel, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import COMMUNICATION, Plan
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Strategy, Window
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.tune.chunk import candidates

_WINDOW = 8  # steps: enough for the first, which starts cold, to drop out of the period


@dataclass(frozen=True)
class Forecast:
    """What one strategy would take: seconds a step, and where they go.

    `wire_nbytes` are the bytes that a step sends over the busiest link, in one direction.
    """

    strategy: str
    config: Any
    workers: int
    step_s: float
    samples_per_s: float
    wire_nbytes: float
    breakdown: Breakdown
    machine: Machine
    timeline: Timeline

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker."""
        return tuple(device.name for device in self.machine.devices[: self.workers])

    @property
    def why(self) -> str:
        """One sentence: what the step's time goes to."""
        parts, share = self.breakdown, 100 / self.step_s
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

    plan = window(_WINDOW)
    timeline = simulate(plan, model)
    step_s = period(window, model, _WINDOW)
    return Forecast(
        strategy.name,
        config,
        config.workers,
        step_s,
        samples_per_step / step_s,
        _wire_nbytes(plan) / _WINDOW,
        breakdown(timeline),
        machine,
        timeline,
    )


def chunk_seconds(
    workload: Workload,
    machine: Machine,
    strategy: Strategy,
    workers: int,
    cost: CostModel | None = None,
) -> dict[int, float]:
    """Return the predicted seconds of a step for each chunk size that a tuner would try.

    Of short windows: many sizes are looked at, and only compared with each other.
    """
    model = cost or Roofline.of(machine)

    def seconds(chunk: int) -> float:
        config = strategy.config(workers=workers, chunk=chunk)
        return period(lambda n: strategy.plan(workload, machine, config, Window(n)), model, 1)

    return {chunk: seconds(chunk) for chunk in candidates(len(workload.layers))}


def _wire_nbytes(plan: Plan) -> float:
    load: dict[str, float] = {}
    for task in plan.tasks:
        if task.kind in COMMUNICATION:
            for resource in task.on:
                if resource.lane == "wire":
                    load[resource.owner] = load.get(resource.owner, 0.0) + task.cost.nbytes
    return max(load.values(), default=0.0)


def rank(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return the forecasts by throughput, best first."""
    return sorted(forecasts, key=lambda forecast: -forecast.samples_per_s)
