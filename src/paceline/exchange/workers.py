"""Connect the workers of `LocalUpdates` in a fixed process group, and compare their settings.

Module `elastic` connects the workers of a torchft manager, which may change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput
from paceline.core.rounds import Rounds
from paceline.exchange.outer import (
    Averaged,
    Averaging,
    Contribution,
    Fragment,
    OptimizerFactory,
    local_of,
)
from paceline.links.group import Group
from paceline.links.rendezvous import joined, with_own_connections

_OF_A_WORKER = ("sync_every", "delay")  # settings of `Rounds` that may differ between workers
Settings = Mapping[str, Any]  # plain values by name, which must be equal on all workers


class FixedWorkers:
    """Averages models over a fixed group of workers; if a worker is lost, the exchange fails.

    An exchange averages one fragment of the model. After the first exchange in which all workers
    have finished training, `num_final_exchanges` more average the other fragments.
    """

    lock = None  # no lock is needed, because no other worker copies this worker's state

    def __init__(self, group: Group, averaging: Averaging) -> None:
        self._group, self._averaging = group, averaging
        self.rank, self.count = group.rank, group.world_size
        self.num_final_exchanges = len(averaging.outer.values) - 1

    def exchange(self, given: Contribution) -> Averaged:
        """Average the contributions of all workers."""
        return self._averaging.run(given, self._group)

    def abort(self) -> None:
        """Abort an exchange that runs in another thread, by aborting the process group."""
        control: Any = self._group.control
        if control is not None:
            control.abort()

    def close(self) -> None:
        """Drop the group; its connections close with the last reference to it."""
        self._group = Group.alone(self._group.device, self._group.deadline_s)


def settings_of(
    rounds: Rounds,
    codec: str | Codec | None,
    outer: str | OptimizerFactory,
    fragments: Iterable[Fragment],
) -> Settings:
    """Return by name the settings and fragment sizes that must be equal on all workers."""
    return {
        **{name: one for name, one in asdict(rounds).items() if name not in _OF_A_WORKER},
        "codec": getattr(codec, "name", codec),
        "outer": outer if isinstance(outer, str) else "an optimizer factory",
        "parameters": [sum(one.numel() for one in fragment) for fragment in fragments],
    }


def check_same_settings(own: Settings, other: Settings, here: str, there: str) -> None:
    """Raise InvalidInput for the first setting that differs between two workers.

    `here`, `there`: in the error, the names of the workers with settings `own` and `other`.
    """
    for name, value in own.items():
        if other.get(name) != value:
            values = f"{there} has {other.get(name)!r}, {here} has {value!r}"
            raise InvalidInput(name, f"must be equal on all workers: {values}")


def meet(
    model: nn.Module,
    settings: Settings,
    process_group: dist.ProcessGroup | None,
    device_mesh: DeviceMesh | None,
    deadline_s: float | None,
    manager: object = None,
) -> tuple[Group | None, list[DistributedDataParallel]]:
    """Connect to the other workers, and copy worker 0's parameters and buffers to all workers.

    Returns the group, and the DDP modules that average gradients between workers. With a torchft
    `manager`, returns None and no modules, because workers connect in each exchange. Raises
    InvalidInput if settings differ, or if the model is sharded between workers.
    """
    if manager is not None:
        if process_group is not None or device_mesh is not None:
            other = "device_mesh" if process_group is None else "process_group"
            raise InvalidInput("manager", f"cannot be combined with {other}")
        return None, []
    trained = [one for one in model.parameters() if one.requires_grad]
    given = joined(trained[0].device, deadline_s, _group_of(process_group, device_mesh))
    replicas = _replicas_between(model, given)
    group = with_own_connections(given)
    for worker, row in enumerate(group.gather(settings)):
        check_same_settings(settings, row, f"worker {group.rank}", f"worker {worker}")
    for own in map(local_of, [*trained, *model.buffers()]):
        first = own.cpu().clone()
        group.broadcast([first])
        own.copy_(first)
    return group, replicas


def _replicas_between(model: nn.Module, workers: Group) -> list[DistributedDataParallel]:
    """Return the DDP modules in `model` that average gradients between workers.

    Raises InvalidInput if the model is sharded between workers, or if DDP has a static graph.
    """
    if workers.world_size == 1:
        return []
    ranks = set(workers.global_ranks)
    sharded = [
        (name, one.device_mesh.mesh.flatten().tolist())
        for name, one in model.named_parameters()
        if isinstance(one, DTensor)
    ] + [
        (name, dist.get_process_group_ranks(one.process_group))
        for name, one in model.named_modules()
        if isinstance(one, FullyShardedDataParallel)
    ]
    for name, between in sharded:
        if len(ranks & set(between)) > 1:
            raise InvalidInput(
                "model",
                f"is sharded between workers ({name or 'the whole model'})",
                hint='shard within hosts, and pass the group of hosts: device_mesh=mesh["host"]',
            )
    replicas = [
        one
        for one in model.modules()
        if isinstance(one, DistributedDataParallel)
        and len(ranks & set(dist.get_process_group_ranks(one.process_group))) > 1
    ]
    if any(one.static_graph for one in replicas):
        # With static_graph, the first backward pass exchanges gradients even within no_sync().
        raise InvalidInput(
            "model",
            "is in a DistributedDataParallel with static_graph=True",
            hint="set static_graph=False, so that DDP can skip all exchanges of gradients",
        )
    return replicas


def _group_of(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    if mesh is None:
        return process_group
    if process_group is not None:
        raise InvalidInput("device_mesh", "cannot be combined with process_group")
    if mesh.ndim != 1:
        hint = 'pass the dimension of hosts: mesh["host"]'
        raise InvalidInput("device_mesh", "must have one dimension", got=mesh.ndim, hint=hint)
    return mesh.get_group()
