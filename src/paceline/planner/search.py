"""Every way of training that a machine allows: strategy, codec, chunk, workers and placement."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Host, Machine
from paceline.core.plan import Kind
from paceline.core.strategy import Strategy, Window, codec_fields
from paceline.core.wire_format import wire_format
from paceline.core.workload import Workload
from paceline.planner.forecast import Forecast, chunk_seconds, forecast, memory, rank
from paceline.planner.ranking import Ranking, Refusal

# The four 8-bit types are equally fast: one stands for all.
_CODECS = ("half", "bfloat16", "dynamic8", "onebit")
_FEW_DEVICES = 8
_LISTED = "as listed"


@dataclass(frozen=True)
class Placement:
    """The machine with the devices that workers take put first, and what tells this choice."""

    name: str
    machine: Machine


def placements(machine: Machine, workers: int) -> list[Placement]:
    """Return the choices of devices that differ: as listed, spread over hosts, the fastest.

    Within each the order of the machine is kept, which is that of the ranks.
    """
    listed = machine.first_devices(workers)
    chosen: dict[frozenset[str], Placement] = {}
    for name, devices in (
        (_LISTED, listed),
        ("spread", _spread(machine.devices)[:workers]),
        ("fastest", sorted(machine.devices, key=lambda device: -device.flops_per_s)[:workers]),
    ):
        alike = frozenset(device.name for device in devices)
        chosen.setdefault(alike, Placement(name, _first(machine, devices)))
    return list(chosen.values())


def _spread(devices: Iterable[Device]) -> list[Device]:
    """Return the first device of each host, then the second of each, and so on."""
    number: dict[str, int] = {}
    turns = []
    for device in devices:
        number[device.host] = turn = number.get(device.host, -1) + 1
        turns.append((turn, device))
    return [device for _, device in sorted(turns, key=lambda pair: pair[0])]


def _first(machine: Machine, devices: Iterable[Device]) -> Machine:
    wanted = {device.name for device in devices}
    ordered = sorted(machine.devices, key=lambda device: device.name not in wanted)
    if tuple(ordered) == machine.devices:
        return machine
    return machine.model_copy(update={"devices": tuple(ordered)})


def worker_counts(machine: Machine, batch_size: int, wanted: int | None) -> list[int]:
    """Return the wanted count, or all up to a few, then only doublings and the whole machine.

    Of a cluster one worker, and then whole nodes.
    """
    num_devices, of_node = machine.num_devices, len(machine.devices)
    most = min(num_devices, batch_size)
    if wanted is not None:
        if not 1 <= wanted <= most:
            raise InvalidInput(
                f"workers: {wanted} do not fit; machine {machine.name} with batch_size "
                f"{batch_size} allows 1 to {most}"
            )
        return [wanted]
    if num_devices > of_node:
        nodes = num_devices // of_node
        counts = {1} | {of_node * min(1 << i, nodes) for i in range(nodes.bit_length() + 1)}
    else:
        counts = set(range(1, min(most, _FEW_DEVICES) + 1)) | {most}
        counts |= {_FEW_DEVICES << i for i in range(num_devices.bit_length())}
    return sorted(count for count in counts if count <= most)


def search(
    workload_of: Callable[[int], Workload],
    machine: Machine,
    strategies: Iterable[Strategy],
    batch_size: int,
    workers: int | None = None,
) -> Ranking:
    """Return all forecasts, best first, and what was refused and why.

    `workload_of` describes one worker's part of a step by its samples; `batch_size` are the samples
    of a step over all workers. InvalidInput if so many workers do not fit.
    """
    known = tuple(strategies)
    alone = _Alone(known[0])
    forecasts: list[Forecast] = []
    refused: list[Refusal] = []
    for count in worker_counts(machine, batch_size, workers):
        workload = workload_of(-(-batch_size // count))
        # One worker has nobody to exchange with, and all strategies are the same.
        for strategy in known if count > 1 else known[:1]:
            try:
                places = _places(machine, strategy, count)
            except InvalidInput as error:
                refused.append(Refusal(strategy.name, count, _LISTED, str(error)))
                continue
            for place in places:
                found, why = _Study(workload, place, strategy, count, batch_size).outcome()
                chosen = machine if machine.num_devices > len(machine.devices) else place.machine
                together = alone.samples_per_s(workload, chosen, count)
                forecasts += [replace(one, alone_samples_per_s=together) for one in found]
                refused += why
    return Ranking(tuple(rank(forecasts)), tuple(refused), batch_size)


def _places(machine: Machine, strategy: Strategy, workers: int) -> list[Placement]:
    part = machine.for_workers(workers, strategy.symmetric)
    return placements(machine, workers) if part is machine else [Placement(_LISTED, part)]


def shortage(machine: Machine, needed: Mapping[str, int]) -> str | None:
    """Return what does not fit into a device or host, by the bytes that each needs, if anything."""
    stations: tuple[Device | Host, ...] = (*machine.devices, *machine.hosts)
    for station in stations:
        nbytes = needed.get(station.name, 0)
        if nbytes > station.memory_bytes:
            return (
                f"{station.name} needs {nbytes / 1e9:.3g} GB and has "
                f"{station.memory_bytes / 1e9:.3g} GB; a smaller batch, or more workers, "
                "need less on each"
            )
    return None


@dataclass(frozen=True)
class _Study:
    """One strategy on so many workers in one place."""

    workload: Workload
    placement: Placement
    strategy: Strategy
    workers: int
    batch_size: int

    def outcome(self) -> tuple[list[Forecast], list[Refusal]]:
        """Return the forecasts, and why others cannot be."""
        found: list[Forecast] = []
        try:
            for config in self._configs():
                problem = self._does_not_fit(config)
                if problem:
                    return found, [self._refusal(problem)]
                found += self._with_codecs(config)
        except InvalidInput as error:
            return found, [self._refusal(str(error))]
        return found, []

    def _refusal(self, why: str) -> Refusal:
        return Refusal(self.strategy.name, self.workers, self.placement.name, why)

    def _configs(self) -> Iterator[Any]:
        variants = self.strategy.variants
        for config in variants(self.workers) if variants else [self._usual]:
            if hasattr(config, "chunk") and self.workers > 1:
                seconds = chunk_seconds(
                    self.workload, self.placement.machine, self.strategy, config
                )
                config = replace(config, chunk=min(seconds, key=seconds.__getitem__))
            yield config

    def _does_not_fit(self, config: Any) -> str | None:
        machine = self.placement.machine
        return shortage(machine, memory(self.workload, machine, self.strategy, config))

    @property
    def _usual(self) -> Any:
        return self.strategy.config(workers=self.workers)

    def _forecast(self, config: Any) -> Forecast:
        machine = self.placement.machine
        found = forecast(self.workload, machine, self.strategy, config, self.batch_size)
        return replace(found, placement=self.placement.name)

    def _with_codecs(self, plain: Any) -> list[Forecast]:
        """Return what the strategy takes as it comes, and with each codec that it could use.

        These are the codecs that encode something there, and whose speed the machine says.
        """
        found = [self._forecast(plain)]
        formats: dict[tuple[str, float], Forecast] = {}
        fields = codec_fields(plain)
        for codec in _CODECS if fields else ():
            if codec == "onebit" and "activations" in fields:
                continue  # a sign is too little of an activation (Dettmers 2016, section 4.2)
            config = replace(plain, **dict.fromkeys(fields, codec))
            known = wire_format(codec)
            alike = known.kernel, known.nbytes_per_value
            if alike in formats:
                found.append(replace(formats[alike], config=config))
            elif self._encodes(config):
                formats[alike] = self._forecast(config)
                found.append(formats[alike])
        return found

    def _encodes(self, config: Any) -> bool:
        """Return whether a plan with the codec can be made, and encodes anything."""
        try:
            plan = self.strategy.plan(self.workload, self.placement.machine, config, Window(1))
        except InvalidInput:
            return False
        return any(task.kind is Kind.ENCODE for task in plan.tasks)


class _Alone:
    """What devices would reach together if each trained on its own batches."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._speeds: dict[tuple[float, ...], float] = {}

    def samples_per_s(self, workload: Workload, machine: Machine, workers: int) -> float:
        """Return the sum over the devices of the workers; of a cluster every node has the same."""
        nodes, rest = divmod(workers, len(machine.devices))
        speeds = [self._speed(workload, machine, device) for device in machine.devices]
        return nodes * sum(speeds) + sum(speeds[:rest])

    def _speed(self, workload: Workload, machine: Machine, device: Device) -> float:
        rates = (device.flops_per_s, device.memory_bandwidth_bytes_per_s, device.call_latency_s)
        alike = (workload.batch_size, *rates)
        if alike not in self._speeds:
            own, config = _first(machine, [device]), self._strategy.config(workers=1)
            found = forecast(workload, own, self._strategy, config, workload.batch_size)
            self._speeds[alike] = found.samples_per_s
        return self._speeds[alike]
