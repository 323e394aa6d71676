"""Links as exchanges find them: gloo's messages within a host and between hosts, GPUs' copies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist

from paceline.core.calibration import Measurement, line_through, linked_in_ring
from paceline.core.machine import Link, Machine, Station
from paceline.links.group import Group
from paceline.probe.sample import Run, Sampler, Spread, idle
from paceline.probe.text import as_rounded

_SMALL_NBYTES, _LARGE_NBYTES = 1 << 10, 1 << 23
_SMALL_COPY_NBYTES, _LARGE_COPY_NBYTES = 4, 1 << 26


@dataclass(frozen=True)
class Links:
    """Measures the links of a machine that has none yet: all ranks call `measure` together.

    `hosts` are the ranks of each host, and `how` begins what links say of their source.
    """

    machine: Machine
    hosts: Sequence[Sequence[int]]
    on_host: Sampler
    on_device: Sampler
    how: str

    @property
    def group(self) -> Group:
        """The ranks."""
        return self.on_host.group

    def measure(self) -> tuple[Link, ...]:
        """Return all links, the same on all ranks."""
        links = [] if self.group.device.type == "cuda" else list(self._within_hosts())
        links += self._between_hosts()
        if self.group.device.type == "cuda":
            links += [*self._to_hosts(), *self._between_peers()]
        return tuple(links)

    def _within_hosts(self) -> Iterator[Link]:
        """Yield what processes on cores of one host exchange messages through."""
        for ranks in self.hosts:
            if len(ranks) > 1:
                devices = tuple(self.machine.devices[rank] for rank in ranks)
                host = self.machine.host_of(devices[0])
                part = self.machine.model_copy(update={"hosts": (host,), "devices": devices})
                yield self._exchanged(ranks, part, devices)

    def _between_hosts(self) -> Iterator[Link]:
        for one, other in combinations(self.hosts, 2):
            ranks = one[0], other[0]
            ends = [self.machine.host_of(self.machine.devices[rank]) for rank in ranks]
            yield self._exchanged(ranks, self.machine, ends)

    def _exchanged(
        self, ranks: Sequence[int], machine: Machine, stations: Sequence[Station]
    ) -> Link:
        """Return the link on which a ring all-reduce of these ranks takes as long as gloo's."""
        deadline = timedelta(seconds=self.group.deadline_s)
        group = dist.new_group(list(ranks), timeout=deadline, backend="gloo")
        runs = [_all_reduce(nbytes, group) for nbytes in (_SMALL_NBYTES, _LARGE_NBYTES)]
        small, large = map(Spread.of, self.on_host.of_last(runs, ranks))
        measured = (
            Measurement(_SMALL_NBYTES, small.median),
            Measurement(_LARGE_NBYTES, large.median),
        )
        (link,) = linked_in_ring(machine, stations, line_through(measured)).links
        what = (
            f"gloo all-reduces of {len(ranks)} ranks, 1 KiB in {small.text('s')} and 8 MiB in "
            f"{large.text('s')}, as the time of a ring's messages"
        )
        return self._said(link, what)

    def _to_hosts(self) -> Iterator[Link]:
        """Yield the way of each GPU to its host, all GPUs copying at once."""
        small_s, _ = self._to_host_and_back(_SMALL_COPY_NBYTES)
        large_s, rates = self._to_host_and_back(_LARGE_COPY_NBYTES)
        for rank, row in enumerate(self.group.gather([small_s, large_s, rates])):
            gpu = self.machine.devices[rank]
            what = (
                f"copies of {_LARGE_COPY_NBYTES >> 20} MiB to pinned memory and back, {row[2]}, "
                f"all GPUs at once; latency: of {_SMALL_COPY_NBYTES} bytes"
            )
            yield self._said(_link((gpu.name, gpu.host), (row[0], row[1])), what)

    def _to_host_and_back(self, nbytes: int) -> tuple[float, str]:
        """Return the seconds of a copy, on average over both ways, and the rates of both."""
        here = torch.empty(nbytes, dtype=torch.uint8, device=self.group.device)
        there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        ways = [
            self.on_device.seconds(partial(target.copy_, source, non_blocking=True))
            for target, source in ((there, here), (here, there))
        ]
        rates = " and ".join(Spread.rate(nbytes, seconds).text("B/s") for seconds in ways)
        return sum(Spread.of(seconds).median for seconds in ways) / 2, rates

    def _between_peers(self) -> Iterator[Link]:
        """Yield a link for each two GPUs of a host of which one reaches the other's memory."""
        indices: list[int] = self.group.gather(self.group.device.index)
        for ranks in self.hosts:
            for one, other in combinations(ranks, 2):
                is_measured = self.group.rank == one
                peer = torch.device("cuda", indices[other])
                reaches = is_measured and torch.cuda.can_device_access_peer(self.group.device, peer)
                if not self.group.gather(reaches)[one]:
                    continue
                spreads = [
                    Spread.of(self.on_device.seconds(run))
                    for run in self._peer_copies(peer, is_measured)
                ]
                own = [spread.median for spread in spreads], spreads[-1].text("s")
                (small_s, large_s), large = self.group.gather(own)[one]
                ends = self.machine.devices[one].name, self.machine.devices[other].name
                what = (
                    f"peer-to-peer copies of {_LARGE_COPY_NBYTES >> 20} MiB in one direction, in "
                    f"{large}, no other GPU copying; latency: of {_SMALL_COPY_NBYTES} bytes"
                )
                yield self._said(_link(ends, (small_s, large_s)), what)

    def _peer_copies(self, peer: torch.device, is_measured: bool) -> Iterator[Run]:
        """Yield a small and a large copy to a peer; nothing on ranks that are not measured."""
        for nbytes in (_SMALL_COPY_NBYTES, _LARGE_COPY_NBYTES):
            if is_measured:
                here = torch.zeros(nbytes, dtype=torch.uint8, device=self.group.device)
                there = torch.zeros(nbytes, dtype=torch.uint8, device=peer)
                yield partial(there.copy_, here, non_blocking=True)
            else:
                yield idle

    def _said(self, link: Link, what: str) -> Link:
        return link.model_copy(
            update={
                "bandwidth_bytes_per_s": as_rounded(link.bandwidth_bytes_per_s, "B/s"),
                "latency_s": as_rounded(link.latency_s, "s"),
                "source": f"{self.how}; {what}",
            }
        )


def _all_reduce(nbytes: int, group: dist.ProcessGroup) -> Run:
    values = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(values, group=group)


def _link(ends: tuple[str, str], seconds: tuple[float, float]) -> Link:
    """Return the link over which a small and a large copy take these seconds."""
    small, large = zip((_SMALL_COPY_NBYTES, _LARGE_COPY_NBYTES), seconds, strict=True)
    line = line_through((Measurement(*small), Measurement(*large)))
    return Link(
        between=ends,
        bandwidth_bytes_per_s=1 / line.seconds_per_byte,
        latency_s=line.latency_s,
        source="measured",
    )
