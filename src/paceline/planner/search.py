"""Forecast strategies with various options, numbers of workers and devices; rank the forecasts."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Machine
from paceline.core.plan import without_collection
from paceline.core.strategy import Strategy
from paceline.core.workload import Workload
from paceline.planner.admission import GAIN
from paceline.planner.alternatives import Alternatives, rates
from paceline.planner.forecast import Forecast, forecast, forecast_alone

_NUM_DIGITS = 12  # significant digits of compared throughputs, to ignore rounding errors
_FEW_DEVICES = 8
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_LISTED = "as listed"
# Limits for strategies that plan the tasks of every worker. `_MOST_LAYERS`: maximum of layers times
# workers, which takes about 5 s to plan. `_MOST_UNASKED`: maximum number of workers if the user has
# not set their number.
_MOST_LAYERS, _MOST_UNASKED = 2**15, 128


def rank(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Sort forecasts by throughput, best first.

    Strategies that learn differently from synchronous training come last: first those that reach
    a loss soonest, then those for which this time is unknown.
    """

    def place(one: Forecast) -> tuple[bool, float, float]:
        rates = one.learnt_samples_per_s, one.samples_per_s
        learnt, trained = (float(f"{rate:.{_NUM_DIGITS}g}") for rate in rates)
        return not one.is_same_training, -learnt, -trained

    return sorted(forecasts, key=place)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A strategy that cannot be used on a number of workers, and the reason."""

    strategy: str
    workers: int
    placement: str
    why: str


@dataclass(frozen=True)
class Ranking(Sequence[Forecast]):
    """Forecasts, best first, and the refused strategies.

    `alone`: best forecast of one worker, for comparison; None if `forecasts` already include it.
    """

    forecasts: tuple[Forecast, ...]
    refused: tuple[Refusal, ...]
    alone: Forecast | None = None

    def __len__(self) -> int:
        return len(self.forecasts)

    @overload
    def __getitem__(self, index: int) -> Forecast: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Forecast]: ...
    def __getitem__(self, index: int | slice) -> Forecast | Sequence[Forecast]:
        return self.forecasts[index]

    @cached_property
    def best_of(self) -> dict[int, Forecast]:
        """The best forecast for each number of workers."""
        best: dict[int, Forecast] = {}
        for one in self.forecasts:
            best.setdefault(one.workers, one)
        return dict(sorted(best.items()))

    @property
    def worth(self) -> int | None:
        """The smallest number of workers with a throughput within 2 % of the best.

        None if nothing can be compared: all forecasts have the same number of workers, above 1.
        """
        if len(self.best_of) < 2 and set(self.best_of) != {1}:
            return None
        most = self.forecasts[0].samples_per_s
        return next(
            workers
            for workers, forecast in self.best_of.items()
            if forecast.samples_per_s * GAIN >= most
        )


def placements(machine: Machine, workers: int) -> dict[str, Machine]:
    """Return a variant of the machine for each way to choose devices, by name.

    The names are "as listed", "spread" (over hosts) and "fastest". In each variant the chosen
    devices come first; rank 0 uses the first device, and so on. If two ways choose the same
    devices, only the first of them is returned.
    """
    turns, of_host = dict[str, int](), Counter[str]()
    for device in machine.devices:  # for "spread": each device's number on its host, from 0
        turns[device.name] = of_host[device.host]
        of_host[device.host] += 1
    chosen: dict[frozenset[str], tuple[str, Machine]] = {}
    for name, devices in (
        (_LISTED, machine.first_devices(min(workers, machine.num_devices))),
        ("spread", sorted(machine.devices, key=lambda device: turns[device.name])),
        ("fastest", sorted(machine.devices, key=lambda device: -device.flops_per_s)),
    ):
        taken = frozenset(device.name for device in devices[:workers])
        chosen.setdefault(taken, (name, _with_first(machine, taken)))
    return dict(chosen.values())


def _with_first(machine: Machine, names: Collection[str]) -> Machine:
    """Return the machine with the named devices first."""
    ordered = tuple(sorted(machine.devices, key=lambda device: device.name not in names))
    if ordered == machine.devices:
        return machine
    return machine.model_copy(update={"devices": ordered})


def worker_counts(
    machine: Machine, batch_size: int, wanted: int | None, shares_devices: bool = False
) -> list[int]:
    """Return the numbers of workers to compare, or only the wanted number.

    For a machine: 1 to 8, then 16, 32, ..., and the number of devices. For a cluster: 1, then the
    numbers of devices on 1, 2, 4, ... and all nodes. `shares_devices`: the wanted number may exceed
    the number of devices. Raises InvalidInput if the wanted number is too large or below 1.
    """
    num_devices, of_node = machine.num_devices, len(machine.devices)
    most = min(num_devices, batch_size)
    if wanted is not None:
        most = batch_size if shares_devices else most
        if not 1 <= wanted <= most:
            raise _too_many(machine, batch_size, wanted, most)
        return [wanted]
    if num_devices > of_node:
        nodes = num_devices // of_node
        counts = {1} | {of_node * min(1 << i, nodes) for i in range(nodes.bit_length() + 1)}
    else:
        counts = set(range(1, min(most, _FEW_DEVICES) + 1)) | {most}
        counts |= {_FEW_DEVICES << i for i in range(num_devices.bit_length())}
    return sorted(count for count in counts if count <= most)


def _too_many(
    machine: Machine, batch_size: int, wanted: int, most: int, *more: str
) -> InvalidInput:
    problem = f"must be from 1 to {most} on {machine.name} with a batch of {batch_size}"
    return InvalidInput("workers", problem, got=wanted, hint="; ".join(more))


@without_collection()
def search(
    workload_of: Callable[[int], Workload],
    machine: Machine,
    strategies: Iterable[Strategy],
    batch_size: int,
    workers: int | None = None,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Ranking:
    """Forecast all strategies; return the forecasts, best first, and the refusals.

    `workload_of`: returns a worker's part of a step, given the worker's number of samples.
    `batch_size`: number of samples over all workers. `workers`: number of workers to plan, by
    default several numbers; one worker is always forecast, too, for comparison. `options`: fields
    of the strategies' configurations, which the comparison with one worker ignores. Raises
    InvalidInput if there are too many workers for the machine or the batch.
    """
    known = tuple(strategies)
    question = _Search(workload_of, machine, known, batch_size, asked=workers is not None)
    forecasts: list[Forecast] = []
    refused: list[Refusal] = []
    sharing = {one.name for one in known if one.planning.shares_devices}
    counts = worker_counts(machine, batch_size, workers, bool(sharing))
    for count in counts:
        own = options if question.asked or count > 1 else NO_OPTIONS
        found, why = question.with_workers(count, own)
        forecasts += found
        refused += why
    fit = min(machine.num_devices, batch_size)
    if workers is not None and workers > fit and not forecasts:
        reasons = [f"{one.strategy}: {one.why}" for one in refused if one.strategy in sharing]
        raise _too_many(machine, batch_size, workers, fit, *reasons)
    alone = question.with_workers(1, NO_OPTIONS)[0] if 1 not in counts else []
    best_alone = next(iter(rank(alone)), None)
    return Ranking(tuple(rank(forecasts)), tuple(refused), best_alone)


@dataclass(frozen=True)
class _Search:
    """The arguments of a search, and a cache of the devices' throughputs.

    `asked`: whether the user has set the number of workers. `_speeds`: throughput of a device that
    trains alone, by the batch size and the device's rates.
    """

    workload_of: Callable[[int], Workload]
    machine: Machine
    strategies: Sequence[Strategy]
    batch_size: int
    asked: bool
    _speeds: dict[tuple[float, ...], float] = field(default_factory=dict)

    def with_workers(
        self, count: int, options: Mapping[str, Any]
    ) -> tuple[list[Forecast], list[Refusal]]:
        """Forecast all strategies on a number of workers; return the forecasts and refusals."""
        forecasts: list[Forecast] = []
        refused: list[Refusal] = []
        # The worker with the most samples determines the step time.
        workload = self.workload_of(-(-self.batch_size // count))
        for strategy in self.strategies if count > 1 else self.strategies[:1]:
            try:
                part = _part(self.machine, strategy, workload, count, self.asked)
            except InvalidInput as error:
                refused.append(Refusal(strategy.name, count, _LISTED, str(error)))
                continue
            whole = part is self.machine
            for name, place in (placements(part, count) if whole else {_LISTED: part}).items():
                alone = self.alone(workload, place, count)
                ways = Alternatives(workload, place, strategy, self.batch_size)
                found, why = ways.forecasts(count, options)
                forecasts += [
                    replace(one, placement=name, alone_samples_per_s=alone) for one in found
                ]
                if why is not None:
                    refused.append(Refusal(strategy.name, count, name, why))
        return forecasts, refused

    def alone(self, workload: Workload, place: Machine, count: int) -> float:
        """Return the total throughput of the workers' devices if each of them trains alone."""
        # A cluster lists the devices of one node, and all other nodes have equal devices.
        is_cluster = self.machine.num_devices > len(self.machine.devices)
        chosen = self.machine if is_cluster else place
        nodes, rest = divmod(count, len(chosen.devices))
        own = [self._speed(workload, chosen, one) for one in chosen.devices]
        if count > self.machine.num_devices:  # several workers on a device do not make it faster
            return sum(own)
        return nodes * sum(own) + sum(own[:rest])

    def _speed(self, workload: Workload, machine: Machine, device: Device) -> float:
        """Return the throughput of a device that trains alone."""
        alike = (workload.batch_size, *rates(device))
        if alike not in self._speeds:
            own = _with_first(machine, {device.name})
            self._speeds[alike] = forecast_alone(workload, own).samples_per_s
        return self._speeds[alike]


def forecast_one(
    workload_of: Callable[[int], Workload],
    machine: Machine,
    strategy: Strategy,
    config: Any,
    batch_size: int,
    *,
    balanced: bool = False,
    any_chunk: bool = False,
) -> Forecast:
    """Forecast a strategy with a given configuration, on the machine's first devices.

    `any_chunk`: choose the best chunk, as `search` does. `balanced`: split batches by the devices'
    speeds. Raises InvalidInput if the strategy cannot be planned on this machine, or if a device or
    host has too little memory.
    """
    shares_devices = strategy.planning.shares_devices
    (count,) = worker_counts(machine, batch_size, config.workers, shares_devices)
    workload = workload_of(-(-batch_size // count))
    part = _part(machine, strategy, workload, count, asked=True)
    ways = Alternatives(workload, part, strategy, batch_size)
    config = ways.with_chunk(config, () if any_chunk else ("chunk",))
    if problem := ways.shortage(config):
        raise InvalidInput("batch_size", problem)
    found = forecast(workload, part, strategy, config, batch_size, balanced=balanced)
    question = _Search(workload_of, machine, (strategy,), batch_size, asked=True)
    return replace(found, alone_samples_per_s=question.alone(workload, part, count))


def _part(
    machine: Machine, strategy: Strategy, workload: Workload, count: int, asked: bool
) -> Machine:
    """Return the machine, or the part of a cluster, that a plan of `count` workers uses.

    `asked`: whether the user has set the number of workers.
    """
    part = machine.for_workers(count, strategy.planning.symmetric)
    # If the strategy is not `symmetric`, a plan contains the tasks of every worker, so planning
    # many workers takes too long.
    most = max(_MOST_UNASKED, _MOST_LAYERS // len(workload.layers)) if asked else _MOST_UNASKED
    if not strategy.planning.symmetric and part is not machine and count > most:
        raise InvalidInput(
            "workers",
            f"must be at most {most}: strategy {strategy.name} takes too long to plan for more",
            got=count,
            hint="" if asked else f"pass --workers {count}, if the model has few layers",
        )
    return part
