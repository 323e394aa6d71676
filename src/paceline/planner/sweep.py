"""The crossover chart: what each way would reach as the links between hosts get faster."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal

from paceline.core.cluster import Cluster
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.strategy import Strategy
from paceline.core.workload import Workload
from paceline.planner.ranking import Ranking
from paceline.planner.search import search

Quantity = Literal["bandwidth", "latency"]
_QUANTITIES: dict[str, Quantity] = {"bandwidth": "bandwidth", "latency": "latency"}
_NUM_POINTS = 7
_PREFIXES = {
    "": 1.0,
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
}
_UNITS = {"bandwidth": "(?:bit/s|bit|b)?", "latency": "s?"}
_EXAMPLES = {
    "bandwidth": "bandwidth=100M:10G, in bits a second",
    "latency": "latency=10u:1m, in seconds",
}


@dataclass(frozen=True)
class Range:
    """From where to where a quantity goes, and its values in between, evenly on a log scale."""

    quantity: Quantity
    first: float
    last: float

    @property
    def values(self) -> tuple[float, ...]:
        """All values, first to last."""
        ratio = self.last / self.first
        return tuple(self.first * ratio ** (i / (_NUM_POINTS - 1)) for i in range(_NUM_POINTS))


def parse_range(text: str) -> Range:
    """Return the range of "bandwidth=100M:10G" or "latency=10u:1m"; InvalidInput for others."""
    name, _, both = text.partition("=")
    quantity = _QUANTITIES.get(name)
    if quantity is not None:
        ends = [_number(part, quantity) for part in both.split(":")]
        if len(ends) == 2 and 0 < ends[0] < ends[1] < inf:
            return Range(quantity, *ends)
    examples = " or ".join(_EXAMPLES.values())
    raise InvalidInput(f"sweep: {text!r} is no range from less to more, such as {examples}")


def _number(text: str, quantity: Quantity) -> float:
    match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)\s*([numkMGT]?){_UNITS[quantity]}", text.strip())
    return float(match[1]) * _PREFIXES[match[2]] if match else 0.0


@dataclass(frozen=True)
class Sweep:
    """Rankings along a range; each has at least one forecast."""

    range: Range
    rankings: tuple[Ranking, ...]

    @property
    def series(self) -> dict[str, tuple[float | None, ...]]:
        """Samples a second of each way, by its name: a strategy, with or without a codec."""
        points = [_best_by_way(ranking) for ranking in self.rankings]
        names = dict.fromkeys(name for point in points for name in point)
        return {name: tuple(point.get(name) for point in points) for name in names}

    @property
    def sentences(self) -> list[str]:
        """Say what is best from where to where."""
        found: list[tuple[str, float, float]] = []
        for value, ranking in zip(self.range.values, self.rankings, strict=True):
            best = _way(ranking, 0)
            if found and found[-1][0] == best:
                found[-1] = (best, found[-1][1], value)
            else:
                found.append((best, value, value))
        return [f"{_span(self.range, first, last)}: {name}" for name, first, last in found]


def sweep(
    workload_of: Callable[[int], Workload],
    machine: Machine,
    strategies: Iterable[Strategy],
    batch_size: int,
    over: Range,
    workers: int | None = None,
) -> Sweep:
    """Return the rankings along a range of what links between hosts, or else all links, can do.

    With as many workers as the machine has devices, unless `workers` says how many. InvalidInput
    if nothing can be planned.
    """
    known = tuple(strategies)
    count = min(len(machine.devices), batch_size) if workers is None else workers
    rankings = []
    for value in over.values:
        ranking = search(
            workload_of, _with(machine, over.quantity, value), known, batch_size, count
        )
        if not ranking.forecasts:
            raise InvalidInput(f"sweep: nothing can be planned: {ranking.refused[0].why}")
        rankings.append(ranking)
    return Sweep(over, tuple(rankings))


def _with(machine: Machine, quantity: Quantity, value: float) -> Machine:
    facts = {"bandwidth_bytes_per_s": value / 8}
    if quantity == "latency":
        facts = {"latency_s": value}
    if isinstance(machine, Cluster):
        levels = tuple(level.model_copy(update=facts) for level in machine.levels)
        return machine.model_copy(update={"levels": levels})
    host_of = _hosts_of(machine)
    outside = [len({host_of.get(end, end) for end in link.between}) > 1 for link in machine.links]
    every = not any(outside)
    links = tuple(
        link.model_copy(update=facts) if every or leaves else link
        for link, leaves in zip(machine.links, outside, strict=True)
    )
    return machine.model_copy(update={"links": links})


def _hosts_of(machine: Machine) -> dict[str, str]:
    """Return the host of each device, and of each switch that joins what is in one host."""
    host_of = {host.name: host.name for host in machine.hosts}
    host_of |= {device.name: device.host for device in machine.devices}
    joined: dict[str, set[str]] = {switch.name: set() for switch in machine.switches}
    for link in machine.links:
        for one, other in (link.between, reversed(link.between)):
            if one in joined:
                joined[one].add(host_of.get(other, other))
    return host_of | {name: min(hosts) for name, hosts in joined.items() if len(hosts) == 1}


def _best_by_way(ranking: Ranking) -> dict[str, float]:
    best: dict[str, float] = {}
    for i, forecast in enumerate(ranking):
        best.setdefault(_way(ranking, i), forecast.samples_per_s)
    return best


def _way(ranking: Ranking, number: int) -> str:
    forecast = ranking.forecasts[number]
    return f"{forecast.strategy} + codec" if forecast.codec else forecast.strategy


def _span(over: Range, first: float, last: float) -> str:
    one, other = shown(over, first), shown(over, last)
    return one if one == other else f"{one} to {other}"


def shown(over: Range, value: float) -> str:
    """Return a value of the range with its unit."""
    if over.quantity == "bandwidth":
        return f"{value / 1e9:.3g} Gbit/s" if value >= 1e9 else f"{value / 1e6:.3g} Mbit/s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
