"""The plan of strategy hierarchy: sums on each host, then among its group of hosts, and so on.

    gpu0 compute   load fwd1 fwd2 | bwd2  bwd1                                             |  step
    gpu0 d2h                           [d2h 0]
    host reduce                               [sum 0]
    host exchange                                    [out 0][out 1][in 1][in 0]
    gpu0 h2d                                                                   [h2d 0]

Chunks follow one another; only chunk 0 is drawn. A ring over all hosts pays as many latencies as
there are hosts, rings over groups only as many as a group has members, on each level. Between
"servers" (`core.transfer`) lie the sums and the update of their shares, too: the tree of parameter
servers of Du et al. 2017, section 3.4, in which every host serves a share, so that none is the
bottleneck; and synchronous, so that each host does what any other does. With fewer servers than
hosts all gradients go to these few: each gets what n - 1 hosts have of a larger share.

A worker that is served puts the parameters that it gets in their place, tensor by tensor. That is
priced as an update of its own, of which it has the calls and two of five memory accesses: the host
of one worker alone could make its update, too, so that what this saves is no gain of many workers.
"""

from collections.abc import Mapping, Sequence

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.step import ComputeStep, HostMemory, HostStep
from paceline.core.strategy import Window
from paceline.core.transfer import Shares, rings
from paceline.core.workload import Layer, Workload, replica_nbytes
from paceline.strategies.hierarchy.config import Hierarchy

_SERVED = 3  # of each value, a server keeps itself, its sum, and the optimizer's momentum


def plan(workload: Workload, machine: Machine, config: Hierarchy, window: Window) -> Plan:
    """Return the tasks of `window` steps on the first `config.workers` devices of the machine.

    On a `Symmetric` machine they stand for those of all its nodes. InvalidInput if the machine has
    fewer devices, or a GPU or another host is not linked.
    """
    devices = machine.first_devices(config.workers)
    work = HostStep(ComputeStep(workload, devices), ())
    if config.workers > 1:
        memory, has_servers = HostMemory(machine, devices), config.between == "servers"
        num_hosts = machine.peers(memory.hosts).num_ranks
        is_alone, num_servers = num_hosts == 1, _num_servers(config, num_hosts)
        levels = () if is_alone else rings(machine, memory.hosts, devices)
        if len(levels) > 1 and config.servers is not None:
            raise InvalidInput(
                "servers",
                "a number of servers is planned among the hosts of one group, and machine "
                f"{machine.name} has groups of groups",
                hint="leave it out",
            )

        def between(chunk: str, layers: Sequence[Layer]) -> Shares:
            nbytes = sum(layer.gradient_nbytes for layer in layers)
            return Shares(chunk, nbytes, levels, memory.hosts, has_servers, num_servers)

        exchanges = memory.exchanges(
            workload, config.chunk, between if levels or has_servers else None
        )
        work = HostStep(work.compute, exchanges)
    return Plan.of_steps(work.tasks, window.num_steps)


def _num_servers(config: Hierarchy, num_hosts: int) -> int:
    """Return the number of hosts that are servers; InvalidInput if there are fewer hosts."""
    if config.servers is not None and config.servers > num_hosts:
        raise InvalidInput("servers", f"{config.servers} do not fit on {num_hosts} hosts")
    return config.servers or num_hosts


def variants(workers: int) -> list[Hierarchy]:
    """Return the configurations that differ in kind."""
    return [Hierarchy(workers), Hierarchy(workers, between="servers")]


def memory(workload: Workload, machine: Machine, config: Hierarchy) -> Mapping[str, int]:
    """Return the bytes of each worker's replica, and of what hosts keep of gradients and weights.

    A host has a place for the gradients of each of its workers, and one for their sum. Of hosts of
    which a declared cluster lists one, that is a server.
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
