"""The workers that take part in exchanges: a fixed group here, one that changes in `elastic`."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput
from paceline.core.rounds import Rounds
from paceline.exchange.averaging import Averaged, Averaging, Contribution
from paceline.exchange.outer import Fragment, OptimizerFactory, local_of
from paceline.links.group import Group
from paceline.links.rendezvous import joined, with_own_connections

logger = logging.getLogger(__name__)

_OF_A_WORKER = ("sync_every", "delay")  # settings by which a slower worker may differ
Settings = Mapping[str, Any]  # plain values by name, which all workers must have in common


class Workers(Protocol):
    """The workers with which this one exchanges, in the thread of the exchange.

    `rank` and `count`: this worker's place and the number of workers, in the last exchange.
    `num_final_exchanges`: exchanges after the first one in which all workers were closing.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def count(self) -> int: ...  # noqa: D102
    @property
    def num_final_exchanges(self) -> int: ...  # noqa: D102

    def exchange(self, given: Contribution) -> Averaged:
        """Average this worker's contribution with those of the others."""

    def abort(self) -> None:
        """End an exchange that another thread is in."""

    def close(self) -> None:
        """Let go of connections and hooks."""


class FixedWorkers:
    """The workers of a group, which ends with the first one that is lost."""

    def __init__(self, group: Group, averaging: Averaging, num_fragments: int) -> None:
        self._group, self._averaging = group, averaging
        self.rank, self.count = group.rank, group.world_size
        self.num_final_exchanges = num_fragments - 1

    def exchange(self, given: Contribution) -> Averaged:
        """Average this worker's contribution with those of the others."""
        return self._averaging.run(given, self._group)

    def abort(self) -> None:
        """End an exchange that another thread is in."""
        control: Any = self._group.control
        if control is not None:
            control.abort()

    def close(self) -> None:
        """Let go of the group's connections, which end with the last reference to them."""
        self._group = Group.alone(self._group.device, self._group.deadline_s)


def settings_of(
    rounds: Rounds,
    codec: str | Codec | None,
    outer: str | OptimizerFactory,
    fragments: Iterable[Fragment],
) -> Settings:
    """Return what all workers must have in common: settings, and the sizes of fragments."""
    return {
        **{name: one for name, one in asdict(rounds).items() if name not in _OF_A_WORKER},
        "codec": getattr(codec, "name", codec),
        "outer": outer if isinstance(outer, str) else "an optimizer's factory",
        "parameters": [sum(one.numel() for one in fragment) for fragment in fragments],
    }


def check_same_settings(own: Settings, other: Settings, here: str, there: str) -> None:
    """Raise InvalidInput with the first setting by which two workers differ."""
    for name, value in own.items():
        if other.get(name) != value:
            raise InvalidInput(
                name,
                f"{other.get(name)!r} on {there} and {value!r} on {here}",
                hint="give all workers the same",
            )


class Replicas(NamedTuple):
    """The modules that would exchange gradients between the workers."""

    modules: list[DistributedDataParallel]

    def suspend(self) -> None:
        """Let them exchange nothing."""
        for one in self.modules:
            # The first forward pass would otherwise wait for all workers, to broadcast buffers.
            one.require_backward_grad_sync = one.require_forward_param_sync = False

    def resume(self) -> None:
        """Let them exchange gradients again."""
        for one in self.modules:
            one.require_backward_grad_sync = True


def meet(
    model: nn.Module,
    settings: Settings,
    process_group: dist.ProcessGroup | None,
    device_mesh: DeviceMesh | None,
    deadline_s: float | None,
) -> tuple[Group, Replicas]:
    """Meet the other workers, and return them; all have the same settings and parameters then.

    InvalidInput if settings differ, or something else than replicas is between the workers.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    given = joined(trained[0].device, deadline_s, _group_of(process_group, device_mesh))
    replicas = _replicas_between(model, given)
    group = with_own_connections(given)
    for worker, row in enumerate(group.gather(settings)):
        check_same_settings(settings, row, f"worker {group.rank}", f"worker {worker}")
    _begin_equal([*trained, *model.buffers()], group)
    return group, Replicas(replicas)


@torch.no_grad()
def _begin_equal(tensors: Iterable[Tensor], group: Group) -> None:
    """Give all workers the first one's parameters and buffers, and log if they differed."""
    if group.world_size == 1:
        return
    differs = False
    for own in map(local_of, tensors):
        first = own.cpu().clone()
        group.broadcast([first])
        differs |= not torch.equal(first, own.cpu())
        own.copy_(first)
    told = group.gather(differs)
    if any(told) and not group.rank:
        others = ", ".join(str(worker) for worker, one in enumerate(told) if one)
        logger.warning(
            "parameters of workers %s differed from those of worker 0, which they take", others
        )


def _replicas_between(model: nn.Module, workers: Group) -> list[DistributedDataParallel]:
    """Return the modules that would exchange gradients between workers; refuses shards of them."""
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
                f"{name or 'it'} is sharded between the workers",
                hint='shard within hosts, and pass the group of hosts, as device_mesh=mesh["host"]',
            )
    replicas = [
        one
        for one in model.modules()
        if isinstance(one, DistributedDataParallel)
        and len(ranks & set(dist.get_process_group_ranks(one.process_group))) > 1
    ]
    if any(one.static_graph for one in replicas):
        # torch exchanges gradients of the first backward pass even without synchronization.
        raise InvalidInput(
            "model",
            "is in a DistributedDataParallel with static_graph=True",
            hint="leave static_graph out: workers exchange no gradients",
        )
    return replicas


def _group_of(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    if mesh is None:
        return process_group
    if process_group is not None:
        raise InvalidInput("device_mesh", "is given beside a process_group", hint="pass one")
    if mesh.ndim != 1:
        raise InvalidInput(
            "device_mesh", f"has {mesh.ndim} dimensions", hint='pass that of hosts: mesh["host"]'
        )
    return mesh.get_group()
