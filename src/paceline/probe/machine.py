"""From what the ranks have measured to the machine that a file describes."""

import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from paceline.core.machine import CodecSpeed, Device, Host, Machine
from paceline.core.wire_format import Kernel
from paceline.probe.device import CONVOLUTION, LINEAR, CodecFigures, DeviceFigures
from paceline.probe.sample import Spread
from paceline.probe.text import as_rounded, rounded


class RankFigures(BaseModel):
    """What a rank has measured, and where it is.

    `copies` are bytes a second, `sum_s` and `codec_latencies` seconds that only several ranks know.
    `host_codecs` are those of a host of GPUs, by its first rank.
    """

    model_config = ConfigDict(frozen=True)

    hostname: str
    cores: int
    device_memory_bytes: int
    facts: dict[str, Any]
    device: DeviceFigures
    copies: Spread
    sum_s: Spread | None = None
    codec_latencies: dict[Kernel, float] = {}
    host_codecs: dict[Kernel, CodecFigures] = {}


def described(
    name: str, ranks: Sequence[RankFigures], hosts: Sequence[Sequence[int]], kind: str, how: str
) -> Machine:
    """Return the machine, whose links are not known yet; `hosts` are the ranks of each."""
    names = _host_names([ranks[members[0]].hostname for members in hosts])
    found = {rank: host for host, members in zip(names, hosts, strict=True) for rank in members}
    of_device: Literal["cpu", "gpu"] = "gpu" if kind == "cuda" else "cpu"
    return Machine(
        name=name,
        hosts=tuple(
            _host(host, [ranks[rank] for rank in members], how)
            for host, members in zip(names, hosts, strict=True)
        ),
        devices=tuple(
            _device(f"{of_device}{rank}", found[rank], of_device, figures, len(ranks), how)
            for rank, figures in enumerate(ranks)
        ),
    )


def said_how(facts: Mapping[str, Any]) -> str:
    """Return with what it was measured, and when."""
    return (
        f"measured by paceline probe {version('paceline')} on {time.strftime('%Y-%m-%d')}, "
        f"torch {torch.__version__}, Python {facts['python']}, {facts['system']}"
    )


def name_from(text: str) -> str:
    """Return the text as a name that machine files allow."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.") or "this-machine"


def _host_names(hostnames: Sequence[str]) -> list[str]:
    """Return the hosts' own names, if those tell them apart, and from devices."""
    names = [name_from(hostname.partition(".")[0]) for hostname in hostnames]
    are_clear = len(set(names)) == len(names)
    if are_clear and not any(re.fullmatch(r"(cpu|gpu)\d+", name) for name in names):
        return names
    return [f"host{i}" for i in range(len(names))]


def _host(name: str, ranks: Sequence[RankFigures], how: str) -> Host:
    copies = Spread(
        median=sum(rank.copies.median for rank in ranks),
        lower=sum(rank.copies.lower for rank in ranks),
        upper=sum(rank.copies.upper for rank in ranks),
        count=ranks[0].copies.count,
    )
    sums = [rank.sum_s for rank in ranks if rank.sum_s is not None]
    slowest = max(sums, key=lambda spread: spread.median) if sums else None
    said = f"bandwidth: copies on {_ranks(len(ranks))} at once, {copies.text('B/s')}"
    if slowest is not None:
        said += f"; latency: sums of 64 values in shared memory, {slowest.text('s')}"
    first = ranks[0]
    if first.host_codecs:
        said += f"; {_codecs_text(first.host_codecs)}, on the threads of its first worker"
    return Host(
        name=name,
        cores=first.cores,
        memory_bytes=first.facts["memory_bytes"],
        memory_bandwidth_bytes_per_s=as_rounded(copies.median, "B/s"),
        reduce_latency_s=0.0 if slowest is None else as_rounded(slowest.median, "s"),
        codecs=_speeds(first.host_codecs, first.codec_latencies),
        source=f"{how}; {first.facts['processor']}; memory: all that there is; {said}",
    )


def _device(
    name: str,
    host: str,
    kind: Literal["cpu", "gpu"],
    figures: RankFigures,
    num_ranks: int,
    how: str,
) -> Device:
    device, facts = figures.device, figures.facts
    threads = facts["threads_per_worker"]
    on = facts["processor"] if kind == "cpu" else facts["device"]
    said = (
        f"flops: float32, forward and backward, half of them of a {CONVOLUTION}, "
        f"{device.convolution.text('flop/s')}, half of a {LINEAR}, {device.linear.text('flop/s')}; "
        f"bandwidth: torch mul into a new tensor, {device.traffic.text('B/s')}; "
        f"call: torch add of one value, {device.call_s.text('s')}; {_codecs_text(device.codecs)}"
    )
    if figures.codec_latencies:
        said += "; their latency: by half of it an all-reduce of 256 values took longer with one"
    alone = "alone" if num_ranks == 1 else f"beside {_ranks(num_ranks - 1)} that did the same"
    memory = "its own" if kind == "gpu" else "its part of the host's"
    return Device(
        name=name,
        host=host,
        kind=kind,
        flops_per_s=as_rounded(device.flops_per_s, "flop/s"),
        memory_bytes=figures.device_memory_bytes,
        memory_bandwidth_bytes_per_s=as_rounded(device.traffic.median, "B/s"),
        call_latency_s=as_rounded(device.call_s.median, "s"),
        codecs=_speeds(device.codecs, figures.codec_latencies),
        source=f"{how}; {on}, {_threads(threads)}, {alone}; memory: {memory}; {said}",
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
        f"{kernel} {figures.encode.text('value/s')} and {figures.decode.text('value/s')}"
        for kernel, figures in codecs.items()
    ]
    return f"codecs: to encode and, adding half of them, to decode, {', '.join(parts)}"


def _ranks(number: int) -> str:
    return "one worker" if number == 1 else f"{number} workers"


def _threads(number: int) -> str:
    return "one thread" if number == 1 else f"{number} threads"


def summary(machine: Machine) -> str:
    """Return a few lines with the most important figures."""
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
