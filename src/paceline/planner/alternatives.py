"""Forecast variants of a strategy: other options, such as codecs, and other batch splits."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Machine, Station
from paceline.core.plan import Kind
from paceline.core.strategy import Strategy, Window, codec_fields
from paceline.core.wire_format import wire_format
from paceline.core.workload import Workload
from paceline.planner.forecast import Forecast, forecast, memory
from paceline.planner.grouping import Windows, with_best_chunk

# Codecs to forecast. The list has only one codec of 8 bits and one of 4 bits, because codecs of the
# same width are equally fast.
_CODECS = ("half", "bfloat16", "dynamic8", "dynamic4", "onebit")
_LEAST_BITS = 8  # codecs with fewer bits are not used for activations (Dettmers 2016, section 4.2)
_SHORTER = 0.999  # prefer a variant only if its step takes less than this fraction of the shortest


@dataclass(frozen=True)
class Alternatives:
    """Forecasts the configurations of a strategy on a machine's first devices."""

    workload: Workload
    machine: Machine
    strategy: Strategy
    batch_size: int

    def forecasts(
        self, workers: int, options: Mapping[str, Any]
    ) -> tuple[list[Forecast], str | None]:
        """Forecast the strategy; return the forecasts, and the reason for a refusal or None.

        `workers`: number of workers. `options`: fields of the strategy's configuration; if empty,
        all configurations that `Planning.variants` returns are forecast.
        """
        found, problem, planning = list[Forecast](), None, self.strategy.planning
        variants = None if options else planning.variants
        try:
            make = self.strategy.config
            for config in variants(workers) if variants else [make(workers=workers, **options)]:
                # Check memory first, because planning takes longer.
                lacking = self.shortage(config)
                if lacking and next(self._sizes(config), None) is None:
                    return found, lacking
                equal = list(self._with_codecs(self.with_chunk(config, options)))
                found += equal
                are_uneven = len(set(map(rates, self.machine.devices[:workers]))) > 1
                if planning.plan_balanced and are_uneven:
                    found += map(self._balanced, equal)
        except InvalidInput as error:
            problem = str(error)
        return _soonest(found, self.strategy), problem

    def with_chunk(self, config: Any, options: Collection[str]) -> Any:
        """Return `config` with the fastest chunk size (number of layers exchanged together).

        A number that the user has set (`options` contains "chunk") is kept.
        """
        chunk = getattr(config, "chunk", None)
        is_set = "chunk" in options and isinstance(chunk, int)
        if config.workers == 1 or chunk is None or is_set:
            return config
        return with_best_chunk(self.workload, self.machine, self.strategy, config)

    def shortage(self, config: Any) -> str | None:
        """Return a sentence about the first device or host with too little memory, or None."""
        needed = memory(self.workload, self.machine, self.strategy, config)
        stations: tuple[Station, ...] = (*self.machine.devices, *self.machine.hosts)
        for station in stations:
            nbytes = needed.get(station.name, 0)
            if nbytes > station.memory_bytes:
                return (
                    f"{station.name} needs {nbytes / 1e9:.3g} GB and has "
                    f"{station.memory_bytes / 1e9:.3g} GB; use a smaller batch or more workers"
                )
        return None

    def _sizes(self, config: Any) -> Iterator[Any]:
        """Yield the configurations of `Planning.sizes` that fit into memory."""
        sizes = self.strategy.planning.sizes
        for other in sizes(self.workload, config) if sizes else ():
            try:
                if self.shortage(other) is None:
                    yield other
            except InvalidInput:
                continue  # for example, the machine has too few devices

    def _with_codecs(self, asked: Any) -> Iterator[Forecast]:
        """Yield forecasts of the configuration `asked`: first without codecs, then with codecs.

        If `asked` names codecs, only these are tried. Otherwise a codec is tried if the strategy
        would use it, and if a device or host of the machine states how fast the codec is.
        """
        encoded = codec_fields(asked)
        plain = replace(asked, **dict.fromkeys(encoded)) if encoded else asked
        yield self._with_best_size(plain)
        if plain != asked:
            yield self._with_best_size(asked)
            return
        stations: tuple[Station, ...] = (*self.machine.hosts, *self.machine.devices)
        stated = {kernel for one in stations for kernel in one.codecs}
        formats: dict[tuple[str, float], Forecast] = {}
        for codec in _CODECS if encoded else ():
            known = wire_format(codec)
            too_coarse = known.value_bits < _LEAST_BITS and "activations" in encoded
            if known.kernel not in stated or too_coarse:
                continue
            named, alike = dict.fromkeys(encoded, codec), (known.kernel, known.nbytes_per_value)
            if alike not in formats:
                config = replace(plain, **named)
                if not self._encodes(config):
                    continue
                formats[alike] = self._with_best_size(config)
            yield replace(formats[alike], config=replace(formats[alike].config, **named))

    def _encodes(self, config: Any) -> bool:
        """Whether the plan of a configuration contains a task that encodes."""
        try:
            plan = self.strategy.planning.plan(self.workload, self.machine, config, Window(1))
        except InvalidInput:
            return False
        return any(task.kind is Kind.ENCODE for task in plan.tasks)

    def _with_best_size(self, config: Any) -> Forecast:
        """Forecast the configuration in `Planning.sizes` that has the shortest step.

        A note of the forecast names the fields that differ from `config`. The first configurations
        have the largest sub-batches (parts of a batch). With smaller ones the step time first
        falls, then rises, so the search ends after two longer steps in a row.
        """
        if self.strategy.planning.sizes is None or config.workers == 1:
            return self.forecast(config)
        best, shortest_s, num_longer = config, inf, 0
        windows = Windows(self.strategy, self.workload, self.machine, config)
        for other in self._sizes(config):
            if num_longer > 1:
                break
            try:
                step_s = windows.compared_s(other)
            except InvalidInput:
                continue  # for example, a link is missing
            num_longer = 0 if step_s < shortest_s else num_longer + 1
            if step_s < _SHORTER * shortest_s:
                best, shortest_s = other, step_s
        found, chosen = self.forecast(best), _chosen(best, config)
        notes = (f"best of the sizes tried: {chosen}",) if chosen else ()
        return replace(found, notes=(*notes, *found.notes))

    def _balanced(self, equal: Forecast) -> Forecast:
        """Forecast `equal.config` with batches in proportion to the devices' speeds.

        `equal`: forecast with equal batches. A note of the new forecast states the speed-up.
        """
        found = self.forecast(equal.config, balanced=True)
        times = found.samples_per_s / equal.samples_per_s
        note = f"with --balance auto, {times:.2f} times as fast as with equal batches"
        return replace(found, notes=(note, *found.notes))

    def forecast(self, config: Any, *, balanced: bool = False) -> Forecast:
        """Forecast a configuration; `balanced`: split batches by the devices' speeds."""
        return forecast(
            *(self.workload, self.machine, self.strategy, config, self.batch_size),
            balanced=balanced,
        )


def _soonest(found: list[Forecast], strategy: Strategy) -> list[Forecast]:
    """Choose, for each codec and batch split, the forecast that reaches a given loss first.

    Returns all forecasts if the strategy needs as many steps to a loss as synchronous training.
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
        replace(one, notes=(f"reaches a loss first of the measured variants: {chosen}", *one.notes))
        if (chosen := _chosen(one.config, usual))
        else one
        for one in best.values()
    ]


def _chosen(best: Any, config: Any) -> str:
    """Return the command-line options that change `config` into `best`, except for codecs."""
    names = (one.name for one in fields(best) if one.name not in codec_fields(best))
    changed = [name for name in names if getattr(best, name) != getattr(config, name)]
    return " ".join(f"--strategy-option {name}={getattr(best, name)}" for name in changed)


def rates(device: Device) -> tuple[float, ...]:
    """Return the numbers that determine a device's speed."""
    return device.flops_per_s, device.memory_bandwidth_bytes_per_s, device.call_latency_s
