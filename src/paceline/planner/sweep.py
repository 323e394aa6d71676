"""Vary the speed of the links between hosts, and chart each strategy's throughput."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import inf, log10
from typing import Any, Literal, get_args

from paceline.core.cluster import Cluster
from paceline.core.errors import InvalidInput
from paceline.core.facts import rounded
from paceline.core.machine import Machine
from paceline.core.strategy import Strategy
from paceline.core.workload import Workload
from paceline.planner.forecast import Forecast
from paceline.planner.search import NO_OPTIONS, Ranking, search

Quantity = Literal["bandwidth", "latency"]
_NUM_POINTS = 7
_PREFIXES = dict(zip("numkKMGT", (1e-9, 1e-6, 1e-3, 1e3, 1e3, 1e6, 1e9, 1e12), strict=True))
# A bandwidth requires a prefix, and a latency requires a prefix or "s". A plain number would mean
# single bits per second or whole seconds, and is probably a mistake.
_UNITS = {"bandwidth": "([kMGT])(?:bit/s|bit|b)?", "latency": "([num]|(?=s))s?"}
_EXAMPLES = "write bandwidth=100M:10G (bit/s) or latency=10u:1m (seconds)"


@dataclass(frozen=True)
class Range:
    """A range of bandwidths (bit/s) or latencies (s), evenly spaced on a log scale."""

    quantity: Quantity
    first: float
    last: float

    @property
    def values(self) -> tuple[float, ...]:
        """The seven values of the range, from `first` to `last`."""
        ratio = self.last / self.first
        return tuple(self.first * ratio ** (i / (_NUM_POINTS - 1)) for i in range(_NUM_POINTS))


def parse_range(text: str) -> Range:
    """Parse a range such as "bandwidth=100M:10G" or "latency=10u:1m"."""
    name, _, both = text.partition("=")
    for quantity in get_args(Quantity):
        if quantity == name:
            number = rf"([0-9]+(?:\.[0-9]+)?)\s*{_UNITS[quantity]}"
            found = [re.fullmatch(number, part.strip()) for part in both.split(":")]
            ends = [float(one[1]) * _PREFIXES.get(one[2], 1.0) if one else 0.0 for one in found]
            if len(ends) == 2 and 0 < ends[0] < ends[1] < inf:
                return Range(quantity, *ends)
    raise InvalidInput("sweep", "must be a rising range with units", got=text, hint=_EXAMPLES)


@dataclass(frozen=True)
class Sweep:
    """A ranking of strategies for each value of a range; no ranking is empty."""

    range: Range
    rankings: tuple[Ranking, ...]

    @property
    def series(self) -> dict[str, tuple[float | None, ...]]:
        """Samples per second for each value of the range, by the name of a strategy.

        A strategy with a codec has a separate entry. None replaces a throughput if the strategy was
        refused at this value.
        """
        points: list[dict[str, float]] = []
        for ranking in self.rankings:
            points.append({})
            for forecast in ranking:  # best first, so `setdefault` keeps the best
                points[-1].setdefault(_label(forecast), forecast.samples_per_s)
        names = dict.fromkeys(name for point in points for name in point)
        return {name: tuple(point.get(name) for point in points) for name in names}

    @property
    def sentences(self) -> list[str]:
        """Lines such as "1 Gbit/s to 5 Gbit/s: host": the best strategy of a part of the range."""
        sentences = []
        pairs = zip(self.range.values, self.rankings, strict=True)
        for name, stretch in groupby(pairs, key=lambda pair: _label(pair[1][0])):
            values = [shown(self.range, value) for value, _ in stretch]
            ends = dict.fromkeys((values[0], values[-1]))
            sentences.append(f"{' to '.join(ends)}: {name}")
        return sentences


def sweep(
    workload_of: Callable[[int], Workload],
    machine: Machine,
    strategies: Iterable[Strategy],
    batch_size: int,
    over: Range,
    workers: int | None = None,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Sweep:
    """Rank strategies while the bandwidth or latency of links between hosts takes several values.

    On a machine with one host, all links take these values. `workers`: number of workers, by
    default one per device. `options`: as for `search`. Raises InvalidInput if no strategy can be
    planned at one of the values.
    """
    known = tuple(strategies)
    count = min(len(machine.devices), batch_size) if workers is None else workers
    rankings = []
    for value in over.values:
        ranking = search(
            workload_of,
            with_links(machine, over.quantity, value),
            known,
            batch_size,
            count,
            options,
        )
        if not ranking.forecasts:
            problem = f"has no plan at {shown(over, value)}: {ranking.refused[0].why}"
            raise InvalidInput("sweep", problem)
        rankings.append(ranking)
    return Sweep(over, tuple(rankings))


def with_links(machine: Machine, quantity: Quantity, value: float) -> Machine:
    """Set the bandwidth (bit/s) or latency (s) of all links between hosts.

    If no link connects two hosts, all links are changed.
    """
    facts = {"latency_s": value}
    if quantity == "bandwidth":
        facts = {"bandwidth_bytes_per_s": value / 8}
    if isinstance(machine, Cluster):
        levels = tuple(level.model_copy(update=facts) for level in machine.levels)
        return machine.model_copy(update={"levels": levels})
    # Maps each host, device, and switch inside a host to the host's name.
    host_of = {host.name: host.name for host in machine.hosts}
    host_of |= {device.name: device.host for device in machine.devices}
    joined: dict[str, set[str]] = {switch.name: set() for switch in machine.switches}
    for link in machine.links:
        for one, other in (link.between, reversed(link.between)):
            if one in joined:
                joined[one].add(host_of.get(other, other))
    host_of |= {name: min(hosts) for name, hosts in joined.items() if len(hosts) == 1}
    outside = [len({host_of.get(end, end) for end in link.between}) > 1 for link in machine.links]
    every = not any(outside)
    links = tuple(
        link.model_copy(update=facts) if every or leaves else link
        for link, leaves in zip(machine.links, outside, strict=True)
    )
    return machine.model_copy(update={"links": links})


def _label(forecast: Forecast) -> str:
    return f"{forecast.strategy} + codec" if forecast.codec else forecast.strategy


def shown(over: Range, value: float) -> str:
    """Format a value of the range with its unit."""
    return rounded(value, "bit/s" if over.quantity == "bandwidth" else "s")


_ROWS = 16
_STRIDE = 9  # columns of the chart from one value of the range to the next
_MARKS = "abcdefghijklmnopqrstuvwxyz"


def chart(found: Sweep) -> str:
    """Draw each strategy's throughput along the range as text."""
    series = found.series
    names = sorted(series, key=lambda name: -(series[name][-1] or 0.0))
    values = [value for line in series.values() for value in line if value is not None]
    low, high = log10(min(values)), log10(max(values))
    extent = (high - low) or 1.0
    num_columns = _STRIDE * (len(found.range.values) - 1) + 1
    grid = [[" "] * num_columns for _ in range(_ROWS)]
    for mark, name in reversed(list(zip(_MARKS, names, strict=False))):
        rows = [
            None if value is None else round((_ROWS - 1) * (high - log10(value)) / extent)
            for value in series[name]
        ]
        # Draw a mark at each value of the range, and dots between neighbouring values.
        for column in range(num_columns):
            number, i = divmod(column, _STRIDE)
            row, after = rows[number], rows[min(number + 1, len(rows) - 1)]
            if row is not None and i == 0:
                grid[row][column] = mark
            elif row is not None and after is not None:
                between = round(row + (after - row) * i / _STRIDE)
                if grid[between][column] == " ":
                    grid[between][column] = "."
    top, bottom = f"{10**high:.4g}", f"{10**low:.4g}"
    width = max(len(top), len(bottom))
    labels = [top, *[""] * (_ROWS - 2), bottom]
    lines = [f"{label:>{width}} |{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    ends = [shown(found.range, value) for value in (found.range.first, found.range.last)]
    gap = " " * max(1, len(grid[0]) - sum(map(len, ends)))
    lines.append(f"{'':>{width}}  {ends[0]}{gap}{ends[1]}")
    lines.append(f"{'':>{width}}  samples/s against {found.range.quantity}")
    lines += [f"{'':>{width}}  {mark} {name}" for mark, name in zip(_MARKS, names, strict=False)]
    return "\n".join(lines)
