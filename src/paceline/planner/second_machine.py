"""Find the slowest second machine, and the slowest link to it, that make training faster.

The second machine consists of all devices that are not on the first device's host. It pays if all
devices together train more samples per second than the devices of the first host alone.

A batch is divided so that all devices take equally long. Plans of gradient exchanges, however, can
have only equal batches. Such a plan therefore scales each device's speed, so that an equal batch
takes as long as the device's own part of the batch.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from paceline.core.balance import apportion
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Machine
from paceline.core.plan import without_collection
from paceline.core.strategy import Strategy
from paceline.core.workload import Workload
from paceline.planner.alternatives import Alternatives, rates
from paceline.planner.device_speed import faster
from paceline.planner.forecast import Forecast, forecast, forecast_alone
from paceline.planner.sweep import with_links
from paceline.strategies import STRATEGIES

Exchange = Literal["plain", "codec", "local"]
SPEEDS = (1.0, 1 / 2, 1 / 4, 1 / 8)
BANDWIDTHS = (*(digit * 10.0**power for power in range(7, 11) for digit in (1, 2, 5)), 1e11)
_PERCENTS = range(1, 101)
_TRIED: dict[Exchange, tuple[tuple[str, str | None], ...]] = {
    "plain": (("allreduce", None), ("host", None)),
    "codec": (("allreduce", "dynamic8"), ("host", "dynamic8")),
    "local": (("local", "dynamic4"), ("local", None)),
}
_LEAST_S = 1e-12  # lower bound of the seconds per sample, to avoid a division by 0
_MOST_DEVICES = 16  # maximum number of devices, so that the search takes only seconds
_Choice = tuple[Strategy, Any]  # a strategy and its configuration


@dataclass(frozen=True, slots=True)
class Requirement:
    """The slowest second machine, and the slowest links, with which an exchange pays.

    `exchange`: "plain" or "codec" for gradients without or with a codec, "local" for strategy
    local. `speed`: how fast the second machine must be, if links are as in the machine file; 1
    is its speed in the file. `bits_per_s`: least bandwidth of the links between hosts, for each
    speed in `SecondMachine.speeds`. None as a speed or bandwidth: no tried value is enough.
    `is_learning_known`: whether strategy local is compared by its time to a loss; if not, it is
    compared by samples per second.
    """

    exchange: Exchange
    speed: float | None
    bits_per_s: tuple[float | None, ...]
    is_learning_known: bool = True


@dataclass(frozen=True, slots=True)
class SecondMachine:
    """The slowest second machine that pays, for each exchange that can be planned.

    `first_host`: name of the first machine's host. `alone_samples_per_s`: throughput of the first
    host's devices alone. `speeds`: speeds of the second machine for which the least bandwidths were
    searched, relative to its speed in the machine file.
    """

    first_host: str
    alone_samples_per_s: float
    speeds: tuple[float, ...]
    requirements: tuple[Requirement, ...]


@without_collection()
def second_machine(
    workload_of: Callable[[int], Workload], machine: Machine, batch_size: int
) -> SecondMachine | None:
    """Search fixed grids for the least speeds and bandwidths with which a second machine pays.

    `workload_of`, `batch_size`: as for `search`. Returns None for a single host or a cluster, for
    more than 16 devices or more devices than samples, and if nothing can be planned.
    """
    num_hosts = len({device.host for device in machine.devices})
    if num_hosts == 1 or machine.num_devices > min(batch_size, _MOST_DEVICES):
        return None
    question = _Question(workload_of, machine, batch_size)
    if not question.alone:
        return None
    found = tuple(map(question.requirement, question.choices))
    return SecondMachine(question.first, question.alone, SPEEDS, found) if found else None


class _Seconds(NamedTuple):
    """Linear model of the seconds of a device's step: fixed + per_sample * samples."""

    fixed: float
    per_sample: float

    def of(self, samples: int) -> float:
        """Return the seconds of a step with a number of samples."""
        return self.fixed + samples * self.per_sample


class _Question:
    """A machine, and the exchanges that can be planned on it.

    The machine lists the first host's devices first. `alone`: throughput of the first host, or 0 if
    it lacks memory. If `is_learning_known`, strategy local is compared by its time to a loss.
    """

    def __init__(
        self, workload_of: Callable[[int], Workload], machine: Machine, batch_size: int
    ) -> None:
        self.first, self.batch_size = machine.devices[0].host, batch_size
        devices = sorted(machine.devices, key=lambda device: device.host != self.first)
        self.machine = machine.model_copy(update={"devices": tuple(devices)})
        count = self.machine.num_devices
        self.workload = workload_of(-(-batch_size // count))
        self.alone = self._best_alone(workload_of)
        self.choices, self.is_learning_known = dict[Exchange, list[_Choice]](), True
        for exchange in get_args(Exchange):
            found = list(self._forecasts(self.workload, count, exchange))
            if exchange == "local":
                known = [one for one in found if one.learnt_samples_per_s]
                found, self.is_learning_known = known or found[:1], bool(known)
            if found:
                self.choices[exchange] = [(STRATEGIES[one.strategy], one.config) for one in found]
        self.seconds = self._seconds(workload_of(batch_size))

    def requirement(self, exchange: Exchange) -> Requirement:
        """Search the least speed and the least bandwidths with which a second machine pays."""
        percent = _least(_PERCENTS, lambda percent: self.pays(exchange, percent / 100, None))
        is_known = exchange != "local" or self.is_learning_known
        # Speeds descend, and a slower machine needs no less bandwidth: try only as much or more.
        tried, bandwidths = BANDWIDTHS, list[float | None]()
        for speed in SPEEDS:
            found = _least(tried, partial(self.pays, exchange, speed))
            tried = tried[tried.index(found) :] if found else ()
            bandwidths.append(found)
        return Requirement(exchange, percent and percent / 100, tuple(bandwidths), is_known)

    def pays(self, exchange: Exchange, speed: float, bits_per_s: float | None) -> bool:
        """Whether all devices together train faster than the first host alone.

        `speed`: speed of the second machine, relative to the machine file. `bits_per_s`: bandwidth
        of the links between hosts; None means as in the machine file.
        """
        speeds = [1.0 if one.host == self.first else speed for one in self.machine.devices]
        # Plans other than those of strategy local assume equal batches: see `_evened`.
        factors = speeds if exchange == "local" else self._evened(speeds)
        if factors is None:
            return False
        each = zip(self.machine.devices, factors, speeds, strict=True)
        devices = tuple(_faster(*one) for one in each)
        machine = self.machine.model_copy(update={"devices": devices})
        if bits_per_s is not None:
            machine = with_links(machine, "bandwidth", bits_per_s)
        found = (
            forecast(self.workload, machine, *choice, self.batch_size, balanced=True)
            for choice in self.choices[exchange]
        )
        if self.is_learning_known:
            return any(one.learnt_samples_per_s > self.alone for one in found)
        return any(one.samples_per_s > self.alone for one in found)

    def _evened(self, speeds: Sequence[float]) -> list[float] | None:
        """Return the factor by which to scale each device's speed in a plan with equal batches.

        With this factor, a device takes as long for an equal batch as for its own part of the batch
        at its speed in `speeds`. Factors and `speeds` are multiples of the speeds in the machine
        file. Returns None if a device's part would have no sample.
        """
        pairs = list(zip(self.seconds, speeds, strict=True))
        per_s = sum(speed / own.per_sample for own, speed in pairs)
        step_s = (self.batch_size + sum(own.fixed / own.per_sample for own in self.seconds)) / per_s
        wanted = [max(0.0, step_s * speed - own.fixed) / own.per_sample for own, speed in pairs]
        shares = apportion(self.batch_size, wanted)
        if not all(shares):
            return None
        return [
            speed * own.of(self.workload.batch_size) / own.of(share)
            for (own, speed), share in zip(pairs, shares, strict=True)
        ]

    def _seconds(self, whole: Workload) -> list[_Seconds]:
        """Return each device's linear model: a line through forecasts of two batch sizes."""
        known: dict[tuple[float, ...], _Seconds] = {}
        samples = self.workload.batch_size
        for device in self.machine.devices:
            if rates(device) not in known:
                own = self.machine.model_copy(update={"devices": (device,)})
                part_s = forecast_alone(self.workload, own).step_s
                whole_s = forecast_alone(whole, own).step_s
                per_sample = (whole_s - part_s) / (whole.batch_size - samples)
                fixed = max(0.0, part_s - samples * per_sample)
                known[rates(device)] = _Seconds(fixed, max(per_sample, _LEAST_S))
        return [known[rates(device)] for device in self.machine.devices]

    def _best_alone(self, workload_of: Callable[[int], Workload]) -> float:
        """Return the best throughput of the first host, with one of its devices or with all."""
        on_first = sum(device.host == self.first for device in self.machine.devices)
        found: list[Forecast] = []
        for count in {1, on_first}:
            workload = workload_of(-(-self.batch_size // count))
            for exchange in ("plain", "codec") if count > 1 else ("plain",):
                found += self._forecasts(workload, count, exchange)
        return max((one.samples_per_s for one in found), default=0.0)

    def _forecasts(self, workload: Workload, count: int, exchange: Exchange) -> Iterator[Forecast]:
        """Forecast each possible configuration of an exchange on the first `count` devices."""
        for name, codec in _TRIED[exchange]:
            strategy = STRATEGIES[name]
            ways = Alternatives(workload, self.machine, strategy, self.batch_size)
            several = strategy.planning.variants
            for variant in several(count) if several else [strategy.config(workers=count)]:
                with suppress(InvalidInput):  # for example, a codec's speed is not stated
                    config = ways.with_chunk(replace(variant, codec=codec), ())
                    if ways.shortage(config) is None:
                        yield ways.forecast(config)


def _least(values: Sequence[float], pays: Callable[[float], bool]) -> float | None:
    """Return the smallest of the ascending `values` for which `pays` is true, or None."""
    number = bisect_left(values, True, key=pays)
    return values[number] if number < len(values) else None


def _faster(device: Device, factor: float, of_codecs: float) -> Device:
    """Multiply a device's compute speed by `factor` and its codec speeds by `of_codecs`."""
    codecs = {
        kernel: one.model_copy(
            update={
                "encode_values_per_s": of_codecs * one.encode_values_per_s,
                "decode_values_per_s": of_codecs * one.decode_values_per_s,
                "latency_s": one.latency_s / of_codecs,
            }
        )
        for kernel, one in device.codecs.items()
    }
    return faster(device, factor, codecs=codecs)
