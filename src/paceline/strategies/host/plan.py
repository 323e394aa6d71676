"""The plan of strategy host: the host sums gradients while backward goes on (Le et al. 2018, 3.1).

    gpu0 compute   load fwd1 fwd2 fwd3 | bwd3  bwd2  bwd1                |  step
    gpu0 d2h                                 [d2h 0][d2h 1] [d2h 2]
    host reduce                                     [sum 0][sum 1] [sum 2]
    gpu0 h2d                                               [h2d 0][h2d 1] [h2d 2]

A chunk is some layers in the order of backward. It is copied to the host when the last of them has
been computed; the host sums it when all its workers' copies are there; sums of several hosts go
through a ring between them. A worker on cores copies by itself, and reads the result where it is.
A codec encodes these sums (`core.collective`); the first worker of each host does that.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.core.calibration import Line, Measurements, line_through, linked, linked_in_ring
from paceline.core.chunks import chunks
from paceline.core.collective import Coding, Collective, check_encodable
from paceline.core.host_step import ChunkExchange, HostMemory, HostStep, cores
from paceline.core.machine import Device, Machine, Station
from paceline.core.memory import replica_nbytes
from paceline.core.plan import Kind, Plan, Task
from paceline.core.step import ComputeStep
from paceline.core.strategy import Window
from paceline.core.transfer import Ring
from paceline.core.workload import Workload
from paceline.strategies.host.config import Host

_ENCODABLE = (4,)  # bytes: sums are encoded as float32


def plan(workload: Workload, machine: Machine, config: Host, window: Window) -> Plan:
    """Return the tasks of `window` steps on the first `config.workers` devices of the machine.

    InvalidInput if the machine has fewer devices, or a GPU or another host is not linked, or it is
    not known how fast the hosts are with the codec.
    """
    devices = machine.first_devices(config.workers)
    exchanges = tuple(_exchanges(workload, machine, config)) if config.workers > 1 else ()
    work = HostStep(ComputeStep(workload, devices), exchanges)
    return Plan.of_steps(work.tasks, window.num_steps)


def memory(workload: Workload, machine: Machine, config: Host) -> Mapping[str, int]:
    """Return the bytes that each device needs, a replica, and each host.

    A host holds a gradient of each of its workers, and twice their sum: a fast worker writes the
    next one while a slow one still reads.
    """
    devices = machine.first_devices(config.workers)
    needed = {device.name: replica_nbytes(workload) for device in devices}
    if len(devices) > 1:
        for host, num_ranks in Counter(device.host for device in devices).items():
            needed[host] = (num_ranks + 2) * workload.gradient_nbytes
    return needed


def _exchanges(workload: Workload, machine: Machine, config: Host) -> Iterator[ChunkExchange]:
    devices, layers = machine.first_devices(config.workers), workload.in_backward_order
    memory = HostMemory(machine, devices)
    ring, coding = None, None
    if machine.peers(memory.hosts).num_ranks > 1:
        ring = Ring.over(machine, memory.hosts, cores(devices))
        if config.codec is not None:
            coding = Coding.by(config.codec, _encoding(machine, devices))
            check_encodable(workload, _ENCODABLE)
    for i, part in enumerate(chunks(len(layers), config.chunk)):
        chunk = [layers[number] for number in part]
        between = None
        if ring is not None:
            nbytes = sum(layer.gradient_nbytes for layer in chunk)
            count = sum(layer.num_parameters for layer in chunk)
            send = Collective.over(ring, Kind.SEND, str(i), nbytes, count, coding)
            between = _Send(send, len(memory.hosts))
        yield memory.exchange(str(i), chunk, between)


@dataclass(frozen=True)
class _Send:
    """The sums of a chunk go through the ring of hosts."""

    ring: Collective
    num_hosts: int

    def tasks(self, step: int, summed: str) -> Iterator[Task]:
        for number in range(self.num_hosts):
            yield from self.ring.encodes(step, number, summed)
        yield from self.ring.tasks(step, [summed])

    def result(self, step: int, place: int) -> str:
        return self.ring.result(step, place)


def _encoding(machine: Machine, devices: tuple[Device, ...]) -> dict[int, Station]:
    """Return the first worker of each host, and whose cores it encodes with."""
    first: dict[str, int] = {}
    for worker, device in enumerate(devices):
        first.setdefault(device.host, worker)
    return {
        worker: devices[worker]
        if devices[worker].kind == "cpu"
        else machine.host_of(devices[worker])
        for worker in first.values()
    }


def calibrate(machine: Machine, measured: Measurements, config: Host | None = None) -> Machine:
    """Return the machine whose hosts, and links to them, are as fast as the measured exchanges.

    An exchange has up to three stages that a profile cannot tell apart: copies to the host (cores
    share this one with the sum, both being traffic of one memory), a sum there, copies back; and
    between hosts a fourth. They are taken to be equally long.
    """
    devices, hosts = machine.devices, machine.hosts
    gpus = [device for device in devices if device.kind == "gpu"]
    num_stages = (3 if gpus else 1) + (len(hosts) > 1)
    whole = line_through(measured)
    stage = Line(whole.latency_s / num_stages, whole.seconds_per_byte / num_stages)
    most = max(Counter(device.host for device in devices).values())
    traffic = most + 1 if gpus else 3 * most + 1
    facts = {
        "memory_bandwidth_bytes_per_s": traffic / stage.seconds_per_byte,
        "reduce_latency_s": stage.latency_s,
    }
    as_fast = tuple(host.model_copy(update=facts) for host in hosts)
    faster = machine.model_copy(update={"hosts": as_fast})
    ends: list[tuple[Station, Station]] = [(gpu, machine.host_of(gpu)) for gpu in gpus]
    links = linked(faster, ends or [(host, host) for host in hosts], stage).links
    if len(hosts) > 1:
        faster = linked_in_ring(faster, hosts, stage, config.codec if config else None)
        links += faster.links
    return faster.model_copy(update={"links": links})
