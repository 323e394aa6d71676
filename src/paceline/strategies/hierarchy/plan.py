"""The plan of strategy hierarchy: sums on each host, then among its group of hosts, and so on.

    gpu0 compute   load fwd1 fwd2 | bwd2  bwd1                                             |  step
    gpu0 d2h                           [d2h 0]
    host reduce                               [sum 0]
    host exchange                                    [out 0][out 1][in 1][in 0]
    gpu0 h2d                                                                   [h2d 0]

Chunks follow one another; only chunk 0 is drawn. A ring over all hosts pays as many latencies as
there are hosts, rings over groups only as many as a group has members, on each level. Between
"servers" (`core.hierarchy`) lie the sums and the update of their shares, too: the tree of parameter
servers of Du et al. 2017, section 3.4, in which every host serves a share, so that none is the
bottleneck; and synchronous, so that each host does what any other does.
"""

from collections.abc import Iterator, Mapping

from paceline.core.chunks import chunks
from paceline.core.hierarchy import Shares, rings
from paceline.core.host_step import ChunkExchange, HostMemory, HostStep
from paceline.core.machine import Machine
from paceline.core.memory import replica_nbytes
from paceline.core.plan import Cost, Plan
from paceline.core.step import ComputeStep
from paceline.core.strategy import Window
from paceline.core.transfer import Ring
from paceline.core.workload import Workload
from paceline.strategies.hierarchy.config import Hierarchy

_SERVED = 3  # of each value, a server keeps itself, its sum, and the optimizer's momentum


def plan(workload: Workload, machine: Machine, config: Hierarchy, window: Window) -> Plan:
    """Return the tasks of `window` steps on the first `config.workers` devices of the machine.

    On a `Symmetric` machine they stand for those of all its nodes. InvalidInput if the machine has
    fewer devices, or a GPU or another host is not linked.
    """
    compute = ComputeStep(workload, machine.first_devices(config.workers))
    if config.workers == 1:
        work = HostStep(compute, ())
    else:
        exchanges = tuple(_exchanges(workload, machine, config))
        work = HostStep(compute, exchanges, Cost() if _has_servers(config) else None)
    return Plan.of_steps(work.tasks, window.num_steps)


def _has_servers(config: Hierarchy) -> bool:
    return config.between == "servers"


def _exchanges(workload: Workload, machine: Machine, config: Hierarchy) -> Iterator[ChunkExchange]:
    devices, layers = machine.first_devices(config.workers), workload.in_backward_order
    memory = HostMemory(machine, devices)
    levels: tuple[Ring, ...] = ()
    if machine.peers(memory.hosts).num_ranks > 1:
        levels = rings(machine, memory.hosts, devices)
    for i, part in enumerate(chunks(len(layers), config.chunk)):
        chunk = [layers[number] for number in part]
        nbytes = sum(layer.gradient_nbytes for layer in chunk)
        between = None
        if levels or _has_servers(config):
            between = Shares.over(levels, memory.hosts, str(i), nbytes, _has_servers(config))
        yield memory.exchange(str(i), chunk, between)


def variants(workers: int) -> list[Hierarchy]:
    """Return the configurations that differ in kind."""
    return [Hierarchy(workers), Hierarchy(workers, between="servers")]


def memory(workload: Workload, machine: Machine, config: Hierarchy) -> Mapping[str, int]:
    """Return the bytes of each worker's replica, and of what hosts keep of gradients and weights.

    A host has a place for the gradients of each of its workers, and one for their sum.
    """
    devices = machine.first_devices(config.workers)
    needed = {device.name: replica_nbytes(workload) for device in devices}
    if config.workers > 1:
        hosts = HostMemory(machine, devices)
        num_hosts = machine.peers(hosts.hosts).num_ranks
        served = _SERVED * workload.gradient_nbytes // num_hosts if _has_servers(config) else 0
        for host, num_ranks in hosts.num_ranks.items():
            needed[host] = (num_ranks + 1) * workload.gradient_nbytes + served
    return needed
