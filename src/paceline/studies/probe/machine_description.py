"""Build the description of a machine from the measurements of all ranks."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from paceline.core.facts import as_rounded, rounded
from paceline.core.losses import Losses, unrest_between
from paceline.core.machine import CodecSpeed, Device, DeviceKind, Host, Machine
from paceline.core.wire_format import Kernel
from paceline.measure.devices import CONVOLUTION, LINEAR, CodecFigures, DeviceFigures
from paceline.measure.timing import Spread
from paceline.report.format import counted


class RankFigures(BaseModel, frozen=True):
    """The measurements of one rank, and facts about its device and host.

    `copies`: memory copies in bytes per second. `sum_s`: seconds of a sum in shared memory.
    `codec_latencies`: seconds that each codec adds. Both are missing if there is only one rank.
    `host_codecs`: speeds on the CPU, measured only by the first rank of a host with GPUs.
    """

    hostname: str
    cores: int
    device_memory_bytes: int
    has_own_memory: bool
    facts: dict[str, Any]
    device: DeviceFigures
    copies: Spread
    sum_s: Spread | None = None
    codec_latencies: dict[Kernel, float] = {}
    host_codecs: dict[Kernel, CodecFigures] = {}


def machine_of(
    name: str,
    ranks: Sequence[RankFigures],
    hosts: Sequence[Sequence[int]],
    kind: DeviceKind,
    method: str,
) -> Machine:
    """Build the description of a machine, without links.

    `hosts`: ranks of each host. `method`: text on how the machine was measured.
    """
    # Use host names if they are unique and differ from device names.
    names = [name_from(ranks[members[0]].hostname.partition(".")[0]) for members in hosts]
    if len(set(names)) < len(names) or any(re.fullmatch(r"(cpu|gpu)\d+", one) for one in names):
        names = [f"host{i}" for i in range(len(names))]
    found = {rank: host for host, members in zip(names, hosts, strict=True) for rank in members}
    return Machine(
        name=name,
        hosts=tuple(
            _host(host, [ranks[rank] for rank in members], method)
            for host, members in zip(names, hosts, strict=True)
        ),
        devices=tuple(
            _device(f"{kind}{rank}", found[rank], kind, figures, len(ranks), method)
            for rank, figures in enumerate(ranks)
        ),
        losses=Losses.none(method),
    )


def unrest_of(ranks: Sequence[RankFigures]) -> float:
    """Return the largest relative spread of the computing speeds.

    Candidates are the spread of each rank's repeated measurements, and the spread between ranks.
    """
    own = [one for rank in ranks for one in (rank.device.convolution, rank.device.linear)]
    speeds = [rank.device.convolution.median for rank in ranks]
    return max(
        *(one.unrest for one in own),
        unrest_between(min(speeds), sum(speeds) / len(speeds), max(speeds)),
    )


def name_from(text: str) -> str:
    """Convert a text, such as a host name, to a valid name of a machine or host."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.") or "this-machine"


def spread_text(spread: Spread, unit: str) -> str:
    """Format the median, the quartiles and the number of measurements."""
    middle, lower, upper = (rounded(v, unit) for v in (spread.median, spread.lower, spread.upper))
    return f"{middle} ({lower} to {upper}, quartiles of {spread.count})"


def _host(name: str, ranks: Sequence[RankFigures], method: str) -> Host:
    fields = ("median", "lower", "upper")
    together = {name: sum(getattr(rank.copies, name) for rank in ranks) for name in fields}
    copies = Spread(**together, count=ranks[0].copies.count)
    sums = [rank.sum_s for rank in ranks if rank.sum_s is not None]
    slowest = max(sums, key=lambda spread: spread.median, default=None)
    at_once = counted(len(ranks), "worker")
    details = f"bandwidth: concurrent copies on {at_once}, {spread_text(copies, 'B/s')}"
    if slowest is not None:
        details += f"; latency: sums of 64 values in shared memory, {spread_text(slowest, 's')}"
    first = ranks[0]
    if first.host_codecs:
        details += f"; {_codecs_text(first.host_codecs)}, with the threads of its first worker"
    return Host(
        name=name,
        cores=first.cores,
        memory_bytes=first.facts["memory_bytes"],
        memory_bandwidth_bytes_per_s=as_rounded(copies.median, "B/s"),
        reduce_latency_s=0.0 if slowest is None else as_rounded(slowest.median, "s"),
        codecs=_speeds(first.host_codecs, first.codec_latencies),
        source=f"{method}; {first.facts['processor']}; memory: all of it; {details}",
    )


def _device(
    name: str, host: str, kind: DeviceKind, figures: RankFigures, num_ranks: int, method: str
) -> Device:
    device, facts = figures.device, figures.facts
    on = facts["processor"] if kind == DeviceKind.CPU else facts["device"]
    details = (
        f"flops: float32, forward and backward, half of them in a {CONVOLUTION}, "
        f"{spread_text(device.convolution, 'flop/s')}, half in a {LINEAR}, "
        f"{spread_text(device.linear, 'flop/s')}; "
        f"bandwidth: torch mul into a new tensor, {spread_text(device.traffic, 'B/s')}; "
        f"call: torch add of one value, {spread_text(device.call_s, 's')}; "
        f"{_codecs_text(device.codecs)}"
    )
    if figures.codec_latencies:
        details += (
            "; codec latency: half of the time that a codec adds to an all-reduce of 256 values"
        )
    others = f"while {counted(num_ranks - 1, 'other worker')} did the same"
    alone = "alone" if num_ranks == 1 else others
    threads = counted(facts["threads_per_worker"], "thread")
    memory = "its own" if figures.has_own_memory else "its part of the host's"
    return Device(
        name=name,
        host=host,
        kind=kind,
        flops_per_s=as_rounded(device.flops_per_s, "flop/s"),
        memory_bytes=figures.device_memory_bytes,
        memory_bandwidth_bytes_per_s=as_rounded(device.traffic.median, "B/s"),
        call_latency_s=as_rounded(device.call_s.median, "s"),
        codecs=_speeds(device.codecs, figures.codec_latencies),
        source=f"{method}; {on}, {threads}, {alone}; memory: {memory}; {details}",
    )


def _speeds(
    codecs: Mapping[Kernel, CodecFigures], latencies: Mapping[Kernel, float]
) -> dict[Kernel, CodecSpeed]:
    return {
        kernel: CodecSpeed(
            encode_values_per_s=as_rounded(figures.encode.median, "value/s"),
            decode_values_per_s=as_rounded(figures.decode.median, "value/s"),
            latency_s=as_rounded(latencies.get(kernel, 0.0), "s"),
        )
        for kernel, figures in codecs.items()
    }


def _codecs_text(codecs: Mapping[Kernel, CodecFigures]) -> str:
    parts = [
        f"{kernel} {spread_text(figures.encode, 'value/s')} and "
        f"{spread_text(figures.decode, 'value/s')}"
        for kernel, figures in codecs.items()
    ]
    return f"codecs: to encode and to decode, half of it adding, {', '.join(parts)}"


def summary(machine: Machine) -> str:
    """Summarize a machine as text, with a line for each host, device and link."""
    lines = [
        f"host    {host.name}: {host.cores} cores, {rounded(host.memory_bytes, 'B')}, "
        f"copies {rounded(host.memory_bandwidth_bytes_per_s, 'B/s')}"
        for host in machine.hosts
    ]
    for device in machine.devices:
        codecs = ", ".join(
            f"{kernel} {rounded(speed.encode_values_per_s, 'value/s')}"
            for kernel, speed in device.codecs.items()
        )
        lines.append(
            f"device  {device.name}: {rounded(device.flops_per_s, 'flop/s')}, "
            f"{rounded(device.memory_bandwidth_bytes_per_s, 'B/s')}, "
            f"{rounded(device.call_latency_s, 's')} a call; encoding {codecs}"
        )
    lines += [
        f"link    {link.name}: {rounded(link.bandwidth_bytes_per_s, 'B/s')}, "
        f"{rounded(link.latency_s, 's')}"
        for link in machine.links
    ]
    return "\n".join(lines)
