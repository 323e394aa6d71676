"""Plan the sums of gradients in host memory during backward (Le et al. 2018, section 3.1).

    gpu0 compute   load fwd1 fwd2 fwd3 | bwd3  bwd2  bwd1                |  step
    gpu0 d2h                                 [d2h 0][d2h 1] [d2h 2]
    host reduce                                     [sum 0][sum 1] [sum 2]
    gpu0 h2d                                               [h2d 0][h2d 1] [h2d 2]

The module `core.step` explains the drawing. If there are several hosts, they all-reduce their sums
in a ring. With a codec (`core.collective`), the first worker of each host encodes these sums; if
this worker is a GPU, the host's CPU does.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace

from paceline.core import link_fit
from paceline.core.collective import Coding, Collective
from paceline.core.cost import core_lanes
from paceline.core.machine import DeviceKind, Machine, Station
from paceline.core.plan import Kind, Plan, Task, TaskId
from paceline.core.step import Between, ChunkExchange, ComputeStep, HostMemory, HostStep
from paceline.core.strategy import Window
from paceline.core.transfer import Ring, waiting
from paceline.core.workload import Layer, Workload, replica_nbytes
from paceline.strategies.host.config import HostReduce

_ENCODABLE = (4,)  # element size of float32, the only type of sums that can be encoded


def plan(workload: Workload, machine: Machine, config: HostReduce, window: Window) -> Plan:
    """Plan `window.num_steps` steps on the first `config.workers` devices."""
    devices = machine.first_devices(config.workers)
    exchanges: tuple[ChunkExchange, ...] = ()
    if config.workers > 1:
        memory = HostMemory(machine, devices)
        has_peers = machine.peers(memory.hosts).num_ranks > 1
        between = _between_hosts(workload, memory, config) if has_peers else None
        exchanges = memory.exchanges(workload, config.first_chunk, between)
    step = HostStep(ComputeStep(workload, devices), exchanges)
    return Plan.of_steps(step.tasks, window.num_steps)


def memory(workload: Workload, machine: Machine, config: HostReduce) -> Mapping[str, int]:
    """Return the bytes that training needs, by name of device or host.

    A worker's device stores a replica; a GPU also a buffer of all gradients. A host stores the
    gradients of each of its workers, and the sums of two steps, because a fast worker may begin the
    next step early.
    """
    devices = machine.first_devices(config.workers)
    needed = dict.fromkeys((device.name for device in devices), replica_nbytes(workload))
    if len(devices) > 1:
        for device in devices:
            if device.kind == DeviceKind.GPU:
                needed[device.name] += workload.gradient_nbytes
        for host, num_ranks in HostMemory(machine, devices).num_ranks.items():
            needed[host] = (num_ranks + 2) * workload.gradient_nbytes
    return needed


def _between_hosts(
    workload: Workload, memory: HostMemory, config: HostReduce
) -> Callable[[str, Sequence[Layer]], Between]:
    """Return a function that plans a chunk's all-reduce between hosts, in a ring."""
    machine, stations = memory.machine, dict[str, tuple[int, Station]]()
    ring = Ring.over(machine, memory.hosts, core_lanes(memory.devices))
    ring = replace(ring, held=ring.held + waiting(memory.devices))
    # The sums are in host memory, so if a host's first worker is a GPU, the host's CPU encodes.
    for worker, device in enumerate(memory.devices):
        station = device if device.kind == DeviceKind.CPU else machine.host_of(device)
        stations.setdefault(device.host, (worker, station))
    coding = Coding.of(config.codec, dict(stations.values()), workload.layers, _ENCODABLE)

    def between(chunk: str, layers: Sequence[Layer]) -> Between:
        nbytes = sum(layer.gradient_nbytes for layer in layers)
        count = sum(layer.num_parameters for layer in layers)
        exchange = Collective.over(ring, Kind.SEND, chunk, nbytes, count, coding)

        def tasks(step: int, summed: TaskId) -> Generator[Task, None, list[TaskId]]:
            for number in range(len(exchange.coders)):
                yield from exchange.encodes(step, number, summed)
            sent, decoded = yield from exchange.tasks(step, [summed])
            return [decoded.get(place, sent) for place in range(len(memory.hosts))]

        return tasks

    return between


def calibrate(
    machine: Machine, measured: link_fit.ExchangeSamples, config: HostReduce | None = None
) -> Machine:
    """Return the machine with host and link speeds that reproduce the measured exchanges.

    The stages of an exchange (copies to the host, sum, messages between hosts, copies back) are
    assumed to take equally long, because a profile cannot distinguish them. A CPU's copies and sums
    are one stage, because both use the host's memory bandwidth.
    """
    devices, hosts = machine.devices, machine.hosts
    gpus = [device for device in devices if device.kind == DeviceKind.GPU]
    num_stages = (3 if gpus else 1) + (len(hosts) > 1)
    latency_s, byte_s = link_fit.line_through(measured)
    stage = link_fit.LinearTime(latency_s / num_stages, byte_s / num_stages)
    most = max(Counter(device.host for device in devices).values())
    traffic = most + 1 if gpus else 3 * most + 1
    faster = machine.with_each(
        "hosts",
        memory_bandwidth_bytes_per_s=traffic / stage.seconds_per_byte,
        reduce_latency_s=stage.latency_s,
    )
    ends: list[tuple[Station, Station]] = [(gpu, machine.host_of(gpu)) for gpu in gpus]
    links = link_fit.linked(faster, ends or [(host, host) for host in hosts], stage).links
    if len(hosts) > 1:
        faster = link_fit.linked_in_ring(faster, hosts, stage, config.codec if config else None)
        links += faster.links
    return faster.model_copy(update={"links": links})
