"""Plan gradient sums on each host, then among groups of hosts, level by level.

    gpu0 compute   load fwd1 fwd2 | bwd2  bwd1                                             |  step
    gpu0 d2h                           [d2h 0]
    host reduce                               [sum 0]
    host exchange                                    [out 0][out 1][in 1][in 0]
    gpu0 h2d                                                                   [h2d 0]

The drawing shows only the first of several chunks. `out 0` is the reduce-scatter in the smallest
groups of hosts, `out 1` that between these groups; `in 1` and `in 0` are the all-gathers back
(`core.transfer.Shares`). The latency of one ring over all hosts would grow with the number of
hosts; the latency of these rings grows only with the size of the groups.

With `between="servers"` (`core.transfer`) the hosts form the tree of parameter servers of Du et al.
2017, section 3.4, with synchronous updates. Every host serves a share of the parameters, so no host
is a bottleneck. Servers update the parameters, and workers only copy them into their models. Still,
the plan gives this copy the cost of a weight update. Otherwise plans with servers would leave out
the update, and could seem faster than a single worker for this reason alone.
"""

from collections.abc import Mapping, Sequence

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.step import Between, ChunkExchange, ComputeStep, HostMemory, HostStep
from paceline.core.strategy import Window
from paceline.core.transfer import Shares, rings
from paceline.core.workload import Layer, Workload, replica_nbytes
from paceline.strategies.hierarchy.config import Hierarchy

_SERVED = 3  # values that a server keeps per parameter: parameter, gradient sum, momentum


def plan(workload: Workload, machine: Machine, config: Hierarchy, window: Window) -> Plan:
    """Plan `window.num_steps` steps on the first `config.workers` devices.

    If `machine` is a cluster (`Symmetric`), its first host represents all nodes with workers.
    Raises InvalidInput if `servers` exceeds the number of hosts, or is set although the network
    divides the hosts into groups.
    """
    devices = machine.first_devices(config.workers)
    exchanges: tuple[ChunkExchange, ...] = ()
    if config.workers > 1:
        memory, has_servers = HostMemory(machine, devices), config.between == "servers"
        num_hosts = machine.peers(memory.hosts).num_ranks
        num_servers = _num_servers(config, num_hosts)
        levels = rings(machine, memory.hosts, devices) if num_hosts > 1 else ()
        if len(levels) > 1 and config.servers is not None:
            problem = f"cannot be set on {machine.name}, whose network has several levels of groups"
            raise InvalidInput("servers", problem, hint="omit it")

        def between(chunk: str, layers: Sequence[Layer]) -> Between:
            nbytes = sum(layer.gradient_nbytes for layer in layers)
            return Shares(chunk, nbytes, levels, memory.hosts, has_servers, num_servers).tasks

        used = between if levels or has_servers else None
        exchanges = memory.exchanges(workload, config.chunk, used)
    step = HostStep(ComputeStep(workload, devices), exchanges)
    return Plan.of_steps(step.tasks, window.num_steps)


def _num_servers(config: Hierarchy, num_hosts: int) -> int:
    if config.servers is not None and config.servers > num_hosts:
        raise InvalidInput(
            "servers", f"must be at most {num_hosts}, the number of hosts", got=config.servers
        )
    return config.servers or num_hosts


def variants(workers: int) -> list[Hierarchy]:
    """Return the configurations that the planner compares."""
    return [Hierarchy(workers), Hierarchy(workers, between="servers")]


def memory(workload: Workload, machine: Machine, config: Hierarchy) -> Mapping[str, int]:
    """Return the bytes needed on each worker's device and in each host's memory.

    A device stores a replica. A host stores the gradients of each of its workers, and their sum; a
    server also stores its share of the parameters, gradient sums and momentum.
    """
    devices = machine.first_devices(config.workers)
    needed = dict.fromkeys((device.name for device in devices), replica_nbytes(workload))
    if config.workers > 1:
        hosts = HostMemory(machine, devices)
        num_servers = _num_servers(config, machine.peers(hosts.hosts).num_ranks)
        served = _SERVED if config.between == "servers" else 0
        share = served * workload.gradient_nbytes // num_servers
        for number, (host, num_ranks) in enumerate(hosts.num_ranks.items()):
            own = share if number < num_servers else 0
            needed[host] = (num_ranks + 1) * workload.gradient_nbytes + own
    return needed
