"""Search over strategies, codecs, chunks, numbers of workers and placements."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Machine
from paceline.core.plan import without_collection
from paceline.core.strategy import Strategy
from paceline.core.workload import Workload
from paceline.planner.alternatives import Alternatives, rates
from paceline.planner.forecast import Forecast, forecast
from paceline.planner.ranking import Ranking, Refusal, rank
from paceline.strategies import find_exchange

_FEW_DEVICES = 8
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_LISTED = "as listed"
_ALONE = "allreduce"  # one worker exchanges nothing: all strategies are the same
# Of a strategy each of whose tasks is planned: layers of all workers, for a plan in about 5 s, and
# workers that any network may have, which are also the most that are looked at without being asked.
_MOST_LAYERS, _MOST_UNASKED = 2**15, 128


def placements(machine: Machine, workers: int) -> dict[str, Machine]:
    """Return the machine with the devices that workers take put first, by the name of the choice.

    The choices that differ are: as listed, spread over hosts, the fastest. Within each the order of
    the machine is kept, which is that of the ranks.
    """
    turns, of_host = dict[str, int](), Counter[str]()
    for device in machine.devices:  # the first of each host, then the second of each, and so on
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
    """Return the machine with these devices put first, or itself if they are."""
    ordered = tuple(sorted(machine.devices, key=lambda device: device.name not in names))
    if ordered == machine.devices:
        return machine
    return machine.model_copy(update={"devices": ordered})


def worker_counts(
    machine: Machine, batch_size: int, wanted: int | None, shares_devices: bool = False
) -> list[int]:
    """Return the wanted count, or all up to a few, then only doublings and the whole machine.

    Of a cluster one worker, and then whole nodes. With `shares_devices` there may be more workers
    than devices, if so many are wanted.
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
    fits = f"machine {machine.name} with batch_size {batch_size} allows 1 to {most}"
    return InvalidInput("workers", "; ".join((f"{wanted} do not fit", fits, *more)))


@without_collection()
def search(
    workload_of: Callable[[int], Workload],
    machine: Machine,
    strategies: Iterable[Strategy],
    batch_size: int,
    workers: int | None = None,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Ranking:
    """Return all forecasts, best first, and what was refused and why.

    `workload_of` describes one worker's part of a step by its samples; `batch_size` are the samples
    of a step over all workers. Where one number of `workers` is asked for, one worker is forecast
    as well, to judge it by. `options` are fields of all strategies' configurations, but for one
    worker beside more. InvalidInput if so many workers do not fit.
    """
    known = tuple(strategies)
    question = _Search(workload_of, machine, known, batch_size, asked=workers is not None)
    forecasts: list[Forecast] = []
    refused: list[Refusal] = []
    sharing = {one.name for one in known if one.planning.shares_devices}
    counts = worker_counts(machine, batch_size, workers, bool(sharing))
    for count in counts:
        # A worker that is looked at beside others is what any strategy makes of one.
        own = options if question.asked or count > 1 else NO_OPTIONS
        found, why = question.with_workers(count, own)
        forecasts += found
        refused += why
    fit = min(machine.num_devices, batch_size)
    if workers is not None and workers > fit and not forecasts:
        told = [f"{one.strategy}: {one.why}" for one in refused if one.strategy in sharing]
        raise _too_many(machine, batch_size, workers, fit, *told)
    alone = question.with_workers(1, NO_OPTIONS)[0] if 1 not in counts else []
    best_alone = next(iter(rank(alone)), None)
    return Ranking(tuple(rank(forecasts)), tuple(refused), batch_size, best_alone)


@dataclass(frozen=True)
class _Search:
    """The question that is searched; `asked`: only one number of workers is wanted.

    `_speeds` has the samples a second of devices that train alone, by what makes them as fast.
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
        """Return the forecasts of all strategies on so many workers, and what was refused."""
        forecasts: list[Forecast] = []
        refused: list[Refusal] = []
        # Where samples do not divide evenly, the worker with the most decides the step's time.
        workload = self.workload_of(-(-self.batch_size // count))
        # One worker has nobody to exchange with, and all strategies are the same.
        for strategy in self.strategies if count > 1 else self.strategies[:1]:
            try:
                places = self._places(strategy, workload, count)
            except InvalidInput as error:
                refused.append(Refusal(strategy.name, count, _LISTED, str(error)))
                continue
            for name, place in places.items():
                alone = self.alone(workload, place, count)
                ways = Alternatives(workload, place, strategy, self.batch_size)
                found, why = ways.forecasts(count, options)
                forecasts += [
                    replace(one, placement=name, alone_samples_per_s=alone) for one in found
                ]
                if why is not None:
                    refused.append(Refusal(strategy.name, count, name, why))
        return forecasts, refused

    def _places(self, strategy: Strategy, workload: Workload, count: int) -> dict[str, Machine]:
        part = _part(self.machine, strategy, workload, count, self.asked)
        return placements(part, count) if part is self.machine else {_LISTED: part}

    def alone(self, workload: Workload, place: Machine, count: int) -> float:
        """Return the samples a second of so many devices of a place that train alone."""
        # Of a cluster every node has the same devices.
        is_cluster = self.machine.num_devices > len(self.machine.devices)
        chosen = self.machine if is_cluster else place
        nodes, rest = divmod(count, len(chosen.devices))
        own = [self._speed(workload, chosen, one) for one in chosen.devices]
        if count > self.machine.num_devices:  # they share them, which compute no faster for it
            return sum(own)
        return nodes * sum(own) + sum(own[:rest])

    def _speed(self, workload: Workload, machine: Machine, device: Device) -> float:
        """Return the samples a second of a device that trains alone."""
        alike = (workload.batch_size, *rates(device))
        if alike not in self._speeds:
            own, alone = _with_first(machine, {device.name}), find_exchange(_ALONE)
            found = forecast(workload, own, alone, alone.config(workers=1), workload.batch_size)
            self._speeds[alike] = found.samples_per_s
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
    """Return the forecast of a strategy with this configuration, on the devices as listed.

    With `any_chunk` the best one is taken, as in a search. `balanced`: with parts that follow the
    workers' speeds. InvalidInput if it cannot be planned, or does not fit in memory.
    """
    shares_devices = strategy.planning.shares_devices
    (count,) = worker_counts(machine, batch_size, config.workers, shares_devices)
    workload = workload_of(-(-batch_size // count))
    part = _part(machine, strategy, workload, count, asked=True)
    ways = Alternatives(workload, part, strategy, batch_size)
    if count > 1:
        config = ways.with_chunk(config, () if any_chunk else ("chunk",))
    if problem := ways.shortage(config):
        raise InvalidInput("memory", problem)
    found = forecast(workload, part, strategy, config, batch_size, balanced=balanced)
    question = _Search(workload_of, machine, (strategy,), batch_size, asked=True)
    return replace(found, alone_samples_per_s=question.alone(workload, part, count))


def _part(
    machine: Machine, strategy: Strategy, workload: Workload, count: int, asked: bool
) -> Machine:
    """Return the part of the machine on which so many workers are planned."""
    part = machine.for_workers(count, strategy.planning.symmetric)
    if not strategy.planning.symmetric and part is not machine:
        _check_size(count, len(workload.layers), asked)
    return part


def _check_size(workers: int, num_layers: int, asked: bool) -> None:
    """Raise InvalidInput if a plan of each worker's tasks would take too long."""
    most = max(_MOST_UNASKED, _MOST_LAYERS // num_layers)
    if workers > most:
        raise InvalidInput(
            "workers",
            f"{workers} are too many for a strategy without symmetry, each of whose tasks is "
            "planned",
            hint=f"at most {most} of a model of {num_layers} layers",
        )
    if workers > _MOST_UNASKED and not asked:
        raise InvalidInput(
            "workers",
            f"more than {_MOST_UNASKED} of a strategy without symmetry, each of whose tasks is "
            f"planned, are looked at only if they are asked for (--workers {workers})",
        )
