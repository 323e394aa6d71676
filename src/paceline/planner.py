"""Forecast what strategies would take on a machine, rank them, and say whether a codec pays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.breakdown import Breakdown, breakdown
from paceline.core.cost import CostModel, Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.plan import COMMUNICATION, Kind, Plan
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Strategy, Window
from paceline.core.timeline import Timeline
from paceline.core.wire_format import wire_format
from paceline.core.workload import Workload
from paceline.tune.chunk import candidates

_WINDOW = 8  # steps: enough for the first, which starts cold, to drop out of the period
# The four 8-bit types are equally fast: one stands for all.
_CODECS = ("half", "bfloat16", "dynamic8", "onebit")
_WORTH = 0.95  # of the step without: predictions are hardly better, and codecs round
_ALL = 0.99  # of a step


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
    def codec(self) -> str | None:
        """The codec by which gradients travel."""
        codec: str | None = getattr(self.config, "codec", None)
        return codec

    @property
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
    codec: str | None = None,
) -> dict[int, float]:
    """Return the predicted seconds of a step for each chunk size that a tuner would try.

    Of short windows: many sizes are looked at, and only compared with each other.
    """
    model = cost or Roofline.of(machine)

    def seconds(chunk: int) -> float:
        config = strategy.config(workers=workers, chunk=chunk, codec=codec)
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


def forecasts_of(
    workload: Workload, machine: Machine, strategy: Strategy, workers: int, samples_per_step: float
) -> list[Forecast]:
    """Return what a strategy would take as it comes, and with each codec that it could use.

    These are the codecs that encode something there, and whose speed the machine says.
    """
    plain = strategy.config(workers=workers)
    found = [forecast(workload, machine, strategy, plain, samples_per_step)]
    formats: dict[tuple[str, float], Forecast] = {}
    for codec in _CODECS if hasattr(plain, "codec") else ():
        config, known = replace(plain, codec=codec), wire_format(codec)
        alike = known.kernel, known.nbytes_per_value
        if alike in formats:
            found.append(replace(formats[alike], config=config))
        elif _encodes(workload, machine, strategy, config):
            formats[alike] = forecast(workload, machine, strategy, config, samples_per_step)
            found.append(formats[alike])
    return found


def _encodes(workload: Workload, machine: Machine, strategy: Strategy, config: Any) -> bool:
    try:
        plan = strategy.plan(workload, machine, config, Window(1))
    except InvalidInput:
        return False
    return any(task.kind is Kind.ENCODE for task in plan.tasks)


@dataclass(frozen=True)
class Advice:
    """Whether a codec pays: the best forecast without one, and the best with one.

    `beside` is the best without one on as many workers as the one with it.
    """

    plain: Forecast
    encoded: Forecast
    beside: Forecast

    @property
    def pays(self) -> bool:
        """Whether the codec makes a step so much faster that it is worth what it rounds."""
        return self.encoded.step_s < _WORTH * self.plain.step_s

    @property
    def speedup(self) -> float:
        """How many times faster a step is with the codec."""
        return self.plain.step_s / self.encoded.step_s

    @property
    def sentence(self) -> str:
        """Say so, and why."""
        plain, encoded = self.plain, self.encoded
        times = f"({_seconds(encoded.step_s)} for {_seconds(plain.step_s)})"
        if not self.pays:
            would = f"{_named(encoded)} would be {_compared(self.speedup)} {times}"
            return f"no codec pays: {self._why_not()}; {would}"
        faster = f"{_named(encoded)} is {_compared(self.speedup)} than"
        alike = (plain.strategy, plain.workers) == (encoded.strategy, encoded.workers)
        without = "without" if alike else f"{_named(plain)} without"
        return (
            f"a codec pays: {faster} {without} {times}; the link is busy "
            f"{100 * self.beside.link_busy:.0f} % of a plain step; codecs round gradients: "
            "compare the accuracy, too"
        )

    def _why_not(self) -> str:
        if self.plain.workers == 1:
            return "one worker alone is faster, and exchanges nothing"
        if not self.plain.link_busy:
            return f"{self.plain.strategy} sends nothing over a link"
        if self.plain.breakdown.compute_s > _ALL * self.plain.step_s:
            return "the exchange hides behind backward"
        if self.speedup > 1:
            return "it saves less than predictions may err"
        return "encoding takes longer than it saves"


def advise(forecasts: Sequence[Forecast]) -> Advice | None:
    """Return whether a codec pays, or None where no forecast has one."""
    ranked = rank(forecasts)
    plain = [forecast for forecast in ranked if forecast.codec is None]
    encoded = next((forecast for forecast in ranked if forecast.codec is not None), None)
    if encoded is None:
        return None
    beside = next(forecast for forecast in plain if forecast.workers == encoded.workers)
    return Advice(plain[0], encoded, beside)


def _named(forecast: Forecast) -> str:
    codec = f" with {forecast.codec}" if forecast.codec else ""
    workers = f"{forecast.workers} worker{'s' * (forecast.workers > 1)}"
    return f"{forecast.strategy}{codec} on {workers}"


def _compared(speedup: float) -> str:
    factor = f"{max(speedup, 1 / speedup):.2f}"
    if factor == "1.00":
        return "as fast"
    return f"{factor}x {'faster' if speedup > 1 else 'slower'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
