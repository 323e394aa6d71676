"""Measure link speeds by gloo all-reduces and GPU copies, and the latency that codecs add."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import combinations
from operator import sub
from statistics import median

import torch
import torch.distributed as dist

from paceline.codecs.names import find_codec
from paceline.core.facts import as_rounded
from paceline.core.link_fit import ExchangeSample, line_through, linked_in_ring
from paceline.core.machine import DeviceKind, Machine, Station
from paceline.core.network import Link
from paceline.core.wire_format import Kernel
from paceline.exchange.compressed import CodecAllReduce
from paceline.links.devices import Device, device_of
from paceline.links.group import Group
from paceline.links.rendezvous import leave
from paceline.measure.devices import CODECS
from paceline.measure.timing import Sampler, Spread, Work, idle
from paceline.studies.probe.machine_description import spread_text

_SMALL_NBYTES, _LARGE_NBYTES = 1 << 10, 1 << 23
_NUM_CODED_VALUES = 256
_SMALL_COPY_NBYTES, _LARGE_COPY_NBYTES = 4, 1 << 26


@dataclass(frozen=True)
class Links:
    """Measures the links of a machine; all ranks must call `measure` together.

    `hosts`: ranks of each host. `on_host`, `on_device`: samplers that time work on the host or on
    the device. `method`: text with which each link's `source` begins.
    """

    machine: Machine
    hosts: Sequence[Sequence[int]]
    on_host: Sampler
    on_device: Sampler
    method: str

    @property
    def group(self) -> Group:
        """The group of all ranks."""
        return self.on_host.group

    @property
    def _device(self) -> Device:
        return device_of(self.group.device)

    def measure(self) -> tuple[Link, ...]:
        """Measure all links and return them on all ranks."""
        on_gpu = self._device.kind == DeviceKind.GPU
        links, devices = list[Link](), self.machine.devices
        for ranks in self.hosts:
            if len(ranks) > 1 and not on_gpu:  # on CPUs, ranks of one host exchange by gloo
                own = tuple(devices[rank] for rank in ranks)
                host = self.machine.host_of(own[0])
                part = self.machine.model_copy(update={"hosts": (host,), "devices": own})
                links.append(self._exchanged(ranks, part, own))
        for one, other in combinations(self.hosts, 2):
            pair = one[0], other[0]
            ends = [self.machine.host_of(devices[rank]) for rank in pair]
            links.append(self._exchanged(pair, self.machine, ends))
        if on_gpu:
            links += [*self._to_hosts(), *self._between_peers()]
        return tuple(links)

    def _exchanged(
        self, ranks: Sequence[int], machine: Machine, stations: Sequence[Station]
    ) -> Link:
        """Fit a link so that a simulated ring all-reduce takes the measured time.

        `ranks`: ranks in the measured all-reduce. `stations`: devices or hosts in the ring.
        """
        deadline = timedelta(seconds=self.group.deadline_s)
        # new_group is collective, so ranks outside of the group call it, too.
        group = dist.new_group(list(ranks), timeout=deadline, backend="gloo")
        sent = [torch.zeros(nbytes // 4) for nbytes in (_SMALL_NBYTES, _LARGE_NBYTES)]
        works = [partial(dist.all_reduce, values, group=group) for values in sent]
        small, large = map(Spread.of, self.on_host.of_last(works, ranks))
        leave(group)
        measured = (
            ExchangeSample(_SMALL_NBYTES, small.median),
            ExchangeSample(_LARGE_NBYTES, large.median),
        )
        (link,) = linked_in_ring(machine, stations, line_through(measured)).links
        what = (
            f"gloo all-reduces of {len(ranks)} ranks, 1 KiB in {spread_text(small, 's')} and "
            f"8 MiB in {spread_text(large, 's')}, fitted as ring all-reduces"
        )
        return self._stated(link, what)

    def _to_hosts(self) -> Iterator[Link]:
        """Yield the link between each GPU and its host, measured while all GPUs copy at once."""
        small_s, _ = self._to_host_and_back(_SMALL_COPY_NBYTES)
        large_s, rates = self._to_host_and_back(_LARGE_COPY_NBYTES)
        name = self._device.name
        for rank, row in enumerate(self.group.gather([small_s, large_s, rates, name])):
            gpu = self.machine.devices[rank]
            what = (
                f"{row[3]}, copies of {_LARGE_COPY_NBYTES >> 20} MiB to pinned memory and back, "
                f"{row[2]}, on all GPUs concurrently; latency: {_SMALL_COPY_NBYTES} bytes"
            )
            yield self._stated(_link((gpu.name, gpu.host), (row[0], row[1])), what)

    def _to_host_and_back(self, nbytes: int) -> tuple[float, str]:
        """Time copies from the device to the host and back.

        Returns the mean seconds of the two directions, and a text with the rate of each direction.
        """
        here = torch.empty(nbytes, dtype=torch.uint8, device=self.group.device)
        # Use pinned memory, as exchanges do: CUDA copies other memory through a staging buffer.
        there = self._device.pinned_like(here)
        ways = [
            self.on_device.seconds(partial(target.copy_, source, non_blocking=True))
            for target, source in ((there, here), (here, there))
        ]
        rates = " and ".join(spread_text(Spread.rate(nbytes, seconds), "B/s") for seconds in ways)
        return sum(Spread.of(seconds).median for seconds in ways) / 2, rates

    def _between_peers(self) -> Iterator[Link]:
        """Yield a link for each pair of GPUs that share a host and have peer access."""
        indices: list[int] = self.group.gather(self.group.device.index)
        for ranks in self.hosts:
            for one, other in combinations(ranks, 2):
                is_measured = self.group.rank == one
                peer = torch.device(self.group.device.type, indices[other])
                reaches = is_measured and self._device.reaches(peer)
                # All ranks must take the same branch: all must call `seconds` below together.
                if not self.group.gather(reaches)[one]:
                    continue
                spreads = []
                work: Work = idle
                for nbytes in (_SMALL_COPY_NBYTES, _LARGE_COPY_NBYTES):
                    if is_measured:
                        here = torch.zeros(nbytes, dtype=torch.uint8, device=self.group.device)
                        there = torch.zeros(nbytes, dtype=torch.uint8, device=peer)
                        work = partial(there.copy_, here, non_blocking=True)
                    spreads.append(Spread.of(self.on_device.seconds(work)))
                own = [spread.median for spread in spreads], spread_text(spreads[-1], "s")
                (small_s, large_s), large = self.group.gather(own)[one]
                ends = self.machine.devices[one].name, self.machine.devices[other].name
                what = (
                    f"peer-to-peer copies of {_LARGE_COPY_NBYTES >> 20} MiB in one direction, in "
                    f"{large}, no other GPU copying; latency: {_SMALL_COPY_NBYTES} bytes"
                )
                yield self._stated(_link(ends, (small_s, large_s)), what)

    def _stated(self, link: Link, what: str) -> Link:
        return link.model_copy(
            update={
                "bandwidth_bytes_per_s": as_rounded(link.bandwidth_bytes_per_s, "B/s"),
                "latency_s": as_rounded(link.latency_s, "s"),
                "source": f"{self.method}; {what}",
            }
        )


def _link(ends: tuple[str, str], seconds: tuple[float, float]) -> Link:
    """Fit a link's latency and bandwidth to the seconds of a small and a large copy."""
    small, large = zip((_SMALL_COPY_NBYTES, _LARGE_COPY_NBYTES), seconds, strict=True)
    line = line_through((ExchangeSample(*small), ExchangeSample(*large)))
    return Link(
        between=ends,
        bandwidth_bytes_per_s=1 / line.seconds_per_byte,
        latency_s=line.latency_s,
        source="measured",
    )


def measure_codec_latencies(sampler: Sampler) -> dict[Kernel, float]:
    """Return each codec's latency: the seconds of one encoding and decoding in a small all-reduce.

    A latency is half of the time that the codec adds, because an all-reduce encodes and decodes
    twice. Requires two or more ranks.
    """
    group = sampler.group
    codecs = [names[0] for names in CODECS.values()]
    ranks = range(group.world_size)
    all_reduce = CodecAllReduce(codecs[0], ranks, group.device, group.deadline_s)
    values = torch.zeros(_NUM_CODED_VALUES, device=group.device)

    def reduce(codec: str | None) -> None:
        if codec is None:
            dist.all_reduce(values)
        else:
            all_reduce.begin(codec, values, partial(find_codec, codec)).future.wait()
        device_of(group.device).synchronize()

    works: list[Work] = [partial(reduce, codec) for codec in (None, *codecs)]
    without, *with_codecs = sampler.of_last(works, range(group.world_size))
    latencies = {
        kernel: max(0.0, median(map(sub, seconds, without)) / 2)
        for kernel, seconds in zip(CODECS, with_codecs, strict=True)
    }
    all_reduce.close()
    return latencies
