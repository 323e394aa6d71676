"""Search over strategies, codecs, chunks, numbers of workers and placements."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from math import inf
from types import MappingProxyType
from typing import Any

from paceline.core.cost import CostModel, Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Machine, Station
from paceline.core.plan import Kind, without_collection
from paceline.core.simulate import period
from paceline.core.strategy import Strategy, Window, codec_fields
from paceline.core.wire_format import wire_format
from paceline.core.workload import Workload
from paceline.planner.best_chunk import with_best_chunk
from paceline.planner.forecast import Forecast, forecast, memory
from paceline.planner.ranking import Ranking, Refusal, rank
from paceline.strategies import find_exchange

# The four 8-bit types are equally fast, and so are the 4-bit ones: one stands for all.
_CODECS = ("half", "bfloat16", "dynamic8", "dynamic4", "onebit")
_LEAST_BITS = 8  # of an activation: a sign is too little (Dettmers 2016, section 4.2)
_FEW_DEVICES = 8
_SHORTER = 0.999  # of a step that is worth another size
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
    speeds: dict[tuple[float, ...], float] = {}
    forecasts: list[Forecast] = []
    refused: list[Refusal] = []
    shares_devices = any(one.planning.shares_devices for one in known)
    counts = worker_counts(machine, batch_size, workers, shares_devices)
    for count in counts:
        asked = workers is not None
        # A worker that is looked at beside others is what any strategy makes of one.
        own = options if asked or count > 1 else NO_OPTIONS
        question = workload_of, machine, known, batch_size, count, speeds, asked, own
        found, why = _with_workers(*question)
        forecasts += found
        refused += why
    fit = min(machine.num_devices, batch_size)
    if workers is not None and workers > fit and not forecasts:
        sharing = {one.name for one in known if one.planning.shares_devices}
        told = [f"{one.strategy}: {one.why}" for one in refused if one.strategy in sharing]
        raise _too_many(machine, batch_size, workers, fit, *told)
    alone: list[Forecast] = []
    if 1 not in counts:
        alone, _ = _with_workers(workload_of, machine, known, batch_size, 1, speeds, asked=True)
    best_alone = next(iter(rank(alone)), None)
    return Ranking(tuple(rank(forecasts)), tuple(refused), batch_size, best_alone)


def _with_workers(
    workload_of: Callable[[int], Workload],
    machine: Machine,
    strategies: Sequence[Strategy],
    batch_size: int,
    count: int,
    speeds: dict[tuple[float, ...], float],
    asked: bool,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> tuple[list[Forecast], list[Refusal]]:
    """Return the forecasts of all strategies on so many workers, and what was refused.

    `speeds` has what devices reach alone; those that are met here are added. `asked`: this number
    alone is wanted.
    """
    forecasts: list[Forecast] = []
    refused: list[Refusal] = []
    # Where samples do not divide evenly, the worker with the most decides the step's time.
    workload = workload_of(-(-batch_size // count))
    # One worker has nobody to exchange with, and all strategies are the same.
    for strategy in strategies if count > 1 else strategies[:1]:
        try:
            part = _part(machine, strategy, workload, count, asked)
            places = placements(machine, count) if part is machine else {_LISTED: part}
        except InvalidInput as error:
            refused.append(Refusal(strategy.name, count, _LISTED, str(error)))
            continue
        for name, place in places.items():
            alone = _alone(workload, machine, place, count, speeds)
            found, why = _forecasts(workload, place, strategy, count, batch_size, options)
            forecasts += [replace(one, placement=name, alone_samples_per_s=alone) for one in found]
            if why is not None:
                refused.append(Refusal(strategy.name, count, name, why))
    return forecasts, refused


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
    if any_chunk and hasattr(config, "chunk") and count > 1:
        config = with_best_chunk(workload, part, strategy, config)
    problem = shortage(part, memory(workload, part, strategy, config))
    if problem:
        raise InvalidInput("memory", problem)
    found = forecast(workload, part, strategy, config, batch_size, balanced=balanced)
    alone = _alone(workload, machine, part, count, {})
    return replace(found, alone_samples_per_s=alone)


def _part(
    machine: Machine, strategy: Strategy, workload: Workload, count: int, asked: bool
) -> Machine:
    """Return the part of the machine on which so many workers are planned."""
    part = machine.for_workers(count, strategy.planning.symmetric)
    if not strategy.planning.symmetric and part is not machine:
        _check_size(count, len(workload.layers), asked)
    return part


def _alone(
    workload: Workload,
    machine: Machine,
    place: Machine,
    count: int,
    speeds: dict[tuple[float, ...], float],
) -> float:
    """Return the samples a second of so many devices that train alone."""
    # Of a cluster every node has the same devices.
    chosen = machine if machine.num_devices > len(machine.devices) else place
    nodes, rest = divmod(count, len(chosen.devices))
    own = [_speed(workload, chosen, one, speeds) for one in chosen.devices]
    if count > machine.num_devices:  # they share the devices, which compute no faster for it
        return sum(own)
    return nodes * sum(own) + sum(own[:rest])


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


def shortage(machine: Machine, needed: Mapping[str, int]) -> str | None:
    """Return a sentence that names the device or host with too little memory, or None."""
    stations: tuple[Station, ...] = (*machine.devices, *machine.hosts)
    for station in stations:
        nbytes = needed.get(station.name, 0)
        if nbytes > station.memory_bytes:
            return (
                f"{station.name} needs {nbytes / 1e9:.3g} GB and has "
                f"{station.memory_bytes / 1e9:.3g} GB; a smaller batch, or more workers, "
                "need less on each"
            )
    return None


def _with_best_size(
    workload: Workload, machine: Machine, strategy: Strategy, config: Any
) -> tuple[Any, tuple[str, ...]]:
    """Return the configuration of the shortest step among a strategy's sizes, and a note of it.

    Steps become shorter with smaller sizes, and at last longer again: two that are longer than the
    shortest are the last that are looked at. Of equal ones the first is taken.
    """
    sizes = strategy.planning.sizes
    if sizes is None or config.workers == 1:
        return config, ()
    best, shortest_s, num_longer = config, inf, 0
    model = Roofline.of(machine)
    for other in sizes(workload, config):
        if num_longer > 1:
            break
        try:
            if shortage(machine, memory(workload, machine, strategy, other)):
                continue
            step_s = _step_s(workload, machine, strategy, other, model)
        except InvalidInput:
            if other == config:
                raise
            continue  # as with more devices than there are
        num_longer = 0 if step_s < shortest_s else num_longer + 1
        if step_s < _SHORTER * shortest_s:
            best, shortest_s = other, step_s
    chosen = _chosen(best, config)
    return best, (f"with {chosen}, the best that was tried",) if chosen else ()


def _chosen(best: Any, config: Any) -> str:
    """Return the options by which a configuration becomes the best one; codecs are named apart."""
    names = (one.name for one in fields(best) if one.name not in codec_fields(best))
    changed = [name for name in names if getattr(best, name) != getattr(config, name)]
    return " ".join(f"--set {name}={getattr(best, name)}" for name in changed)


def _shortage(workload: Workload, machine: Machine, strategy: Strategy, config: Any) -> str | None:
    """Return what is short of memory with all of a strategy's sizes; None if one of them fits."""
    problem = shortage(machine, memory(workload, machine, strategy, config))
    sizes = strategy.planning.sizes
    for other in sizes(workload, config) if problem and sizes else ():
        try:
            if shortage(machine, memory(workload, machine, strategy, other)) is None:
                return None
        except InvalidInput:
            continue  # as with more devices than there are
    return problem


def _step_s(
    workload: Workload, machine: Machine, strategy: Strategy, config: Any, model: CostModel
) -> float:
    """Return the seconds of a step of a short window, which is only compared with others."""
    return period(lambda n: strategy.planning.plan(workload, machine, config, Window(n)), model, 1)


def _forecasts(
    workload: Workload,
    machine: Machine,
    strategy: Strategy,
    workers: int,
    batch_size: int,
    options: Mapping[str, Any],
) -> tuple[list[Forecast], str | None]:
    """Return the forecasts of a strategy on so many workers, and why others cannot be."""
    found: list[Forecast] = []
    try:
        for each in _configurations(strategy, workers, options):
            # Before any step is planned: what is refused costs no time.
            problem = _shortage(workload, machine, strategy, each)
            if problem:
                return found, problem
            config = each
            if hasattr(config, "chunk") and workers > 1 and "chunk" not in options:
                config = with_best_chunk(workload, machine, strategy, config)
            equal = _with_codecs(workload, machine, strategy, config, batch_size)
            found += equal
            if strategy.planning.plan_balanced is not None and _is_uneven(machine, workers):
                found += [_balanced(one, workload, strategy, batch_size) for one in equal]
    except InvalidInput as error:
        return _soonest(found, strategy), str(error)
    return _soonest(found, strategy), None


def _soonest(found: list[Forecast], strategy: Strategy) -> list[Forecast]:
    """Return the forecast with each codec that reaches a loss soonest, where learning differs.

    The first one where nothing is known of the steps to a loss.
    """
    if strategy.planning.steps_to_loss is None or not found:
        return found
    best: dict[tuple[str | None, bool], Forecast] = {}
    for one in found:
        alike = one.codec, one.is_balanced
        if alike not in best or one.learnt_samples_per_s > best[alike].learnt_samples_per_s:
            best[alike] = one
    usual = found[0].config
    return [
        replace(one, notes=(f"with {chosen}, the soonest that was measured", *one.notes))
        if (chosen := _chosen(one.config, usual))
        else one
        for one in best.values()
    ]


def _configurations(strategy: Strategy, workers: int, options: Mapping[str, Any]) -> Iterable[Any]:
    """Return the configurations to look at: with options that one, and otherwise the usual ones."""
    if options or strategy.planning.variants is None:
        return [strategy.config(workers=workers, **options)]
    return strategy.planning.variants(workers)


def _is_uneven(machine: Machine, workers: int) -> bool:
    """Return True if the workers' devices differ in speed."""
    return len(set(map(_rates, machine.first_devices(workers)))) > 1


def _rates(device: Device) -> tuple[float, ...]:
    return device.flops_per_s, device.memory_bandwidth_bytes_per_s, device.call_latency_s


def _balanced(equal: Forecast, workload: Workload, strategy: Strategy, batch_size: int) -> Forecast:
    """Return the forecast with parts that follow the workers' speeds, which says what they gain."""
    found = forecast(workload, equal.machine, strategy, equal.config, batch_size, balanced=True)
    times = found.samples_per_s / equal.samples_per_s
    note = f"with --balance auto, {times:.2f} times as fast as with equal parts"
    return replace(found, notes=(note, *found.notes))


def _with_codecs(
    workload: Workload, machine: Machine, strategy: Strategy, asked: Any, batch_size: int
) -> list[Forecast]:
    """Return the forecasts of the strategy without a codec, and with each that it can use.

    Where `asked` names codecs, with these alone. Otherwise those are looked at that encode
    something there, and whose speed the machine says.
    """
    encoded = codec_fields(asked)
    plain = replace(asked, **dict.fromkeys(encoded)) if encoded else asked

    def forecast_of(config: Any) -> Forecast:
        best, notes = _with_best_size(workload, machine, strategy, config)
        one = forecast(workload, machine, strategy, best, batch_size)
        return replace(one, notes=(*notes, *one.notes))

    found = [forecast_of(plain)]
    if plain != asked:
        return [*found, forecast_of(asked)]
    formats: dict[tuple[str, float], Forecast] = {}
    stations: tuple[Station, ...] = (*machine.hosts, *machine.devices)
    stated = {kernel for one in stations for kernel in one.codecs}
    for codec in _CODECS if encoded else ():
        known = wire_format(codec)
        if known.kernel not in stated:
            continue
        if known.value_bits < _LEAST_BITS and "activations" in encoded:
            continue
        named = dict.fromkeys(encoded, codec)
        config = replace(plain, **named)
        alike = known.kernel, known.nbytes_per_value
        if alike not in formats:
            try:
                plan = strategy.planning.plan(workload, machine, config, Window(1))
            except InvalidInput:
                continue
            if not any(task.kind is Kind.ENCODE for task in plan.tasks):
                continue
            formats[alike] = forecast_of(config)
        found.append(replace(formats[alike], config=replace(formats[alike].config, **named)))
    return found


def _speed(
    workload: Workload,
    machine: Machine,
    device: Device,
    known: dict[tuple[float, ...], float],
) -> float:
    """Return the samples a second of a device that trains alone; `known` has its equals'."""
    alike = (workload.batch_size, *_rates(device))
    if alike not in known:
        own, alone = _with_first(machine, {device.name}), find_exchange(_ALONE)
        found = forecast(workload, own, alone, alone.config(workers=1), workload.batch_size)
        known[alike] = found.samples_per_s
    return known[alike]
