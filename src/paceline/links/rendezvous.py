"""Join a run: the ranks exchange their identities and create a process group.

    rank 0 ──connection── rank 1          If rank 0 is killed while a fork keeps the connection
      └ fork ─────┘                       open, rank 1 would wait for rank 0 forever.

So each fork that the user's program makes closes these connections; it cannot use them anyway.
"""

import importlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,
    default_pg_timeout,
)
from torch.distributed.rendezvous import rendezvous

from paceline.core.errors import InvalidInput, WorkerLost
from paceline.links.devices import Device, device_of, gpus, num_gpus
from paceline.links.failures import error_to_raise
from paceline.links.group import Group, Member, myself

_meetings = count()  # number of groups joined by this process; equal on all ranks of a run
_peers: set[int] = set()  # process numbers of the other ranks on this machine


@contextmanager
def process_group(
    deadline_s: float, device: torch.device | None = None, *, exchanges_alone: bool = False
) -> Iterator[Group]:
    """Join the run described by the environment variables of torchrun or Paceline's launcher.

    `deadline_s`: the longest wait of a collective. `device`: the current device inside the block,
    by default the result of `device_of_rank`. `exchanges_alone`: create a process group even for a
    single rank. Without RANK in the environment, this process is a run's only rank.

    Raises WorkerLost if a peer is lost or does not join, and InvalidInput if the ranks cannot form
    a group. If the block fails after another rank has failed, WorkersFailed replaces the
    block's error.
    """
    own = device_of(device_of_rank() if device is None else device)
    # Without `use`, a model's `.cuda()` would create a CUDA context on the first GPU.
    with own.use():
        if os.environ.get("WORLD_SIZE", "1") == "1" and not exchanges_alone:
            yield Group.alone(own.torch_device, deadline_s)
            return
        group = _started_group(own, deadline_s)
        try:
            yield group
        except (Exception, SystemExit) as error:
            instead = error_to_raise(error, group)
            if instead is None:
                raise
            raise instead from error
        # Reached only without an error: after one, this would wait for peers that may be gone.
        dist.destroy_process_group()


def _started_group(own: Device, deadline_s: float) -> Group:
    # Import torch._dynamo before process groups exist. If PyTorch imported it at the first step of
    # an optimizer, it would keep references to process groups, whose threads would then abort the
    # interpreter at its exit.
    importlib.import_module("torch._dynamo")
    deadline, device = timedelta(seconds=deadline_s), own.torch_device
    store, members = _initialise(own, deadline)
    # Values in host memory need gloo: NCCL would make the host wait for the GPU.
    control = None if own.backend == "gloo" else dist.new_group(backend="gloo", timeout=deadline)
    rank, world_size, is_alone = dist.get_rank(), len(members), len(members) == 1
    return Group(
        rank, world_size, device, members, store, control, deadline_s, exchanges_alone=is_alone
    )


def joined(
    device: torch.device,
    deadline_s: float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Group:
    """Return the `Group` of this process in a user's own program.

    Under torchrun, initialises torch.distributed (gloo, or NCCL for GPUs) unless the program has
    done so. Without torch.distributed, this process is the only rank. All ranks of `process_group`
    must call this function together. `deadline_s` defaults to the process group's timeout. Raises
    InvalidInput if ranks are on different kinds of devices, and WorkerLost if a rank does not join.
    """
    own = device_of(device)
    device = own.torch_device
    timeout = None if deadline_s is None else timedelta(seconds=deadline_s)
    if not dist.is_initialized() and "RANK" in os.environ:
        with own.use():
            _initialise(own, timeout)
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        alone_s = default_pg_timeout.total_seconds() if deadline_s is None else deadline_s
        return Group.alone(device, alone_s, process_group)
    timeout = _timeout_of(process_group, device) if timeout is None else timeout
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    member, control = myself(rank, device), _gloo_group_of(process_group, timeout)
    known, deadline_s = (member,) * world_size, timeout.total_seconds()
    group = Group(rank, world_size, device, known, None, control, deadline_s, process_group)
    members = tuple(Member(*row) for row in group.gather(member))
    _check_kinds(members)
    near = {one.pid for one in members if one.place == member.place} - {member.pid}
    if near and not _peers:
        os.register_at_fork(after_in_child=_close_connections)
    _peers.update(near)
    return replace(group, members=members)


def _close_connections() -> None:
    """Replace this fork's connections to other ranks by /dev/null."""
    of_peers = {(one.raddr, one.laddr) for pid in _peers for one in _connections(pid)}
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in _connections(os.getpid()):
        if (one.laddr, one.raddr) in of_peers:
            os.dup2(nothing, one.fd, inheritable=False)
    os.close(nothing)


def _connections(pid: int) -> Iterable[Any]:
    try:
        return psutil.Process(pid).net_connections("tcp")
    except psutil.Error:  # the process has ended, or belongs to another user
        return ()


def _gloo_group_of(
    process_group: dist.ProcessGroup | None, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """Return a gloo group with the ranks of `process_group`, for values in host memory."""
    if dist.get_backend(process_group) == "gloo":
        return process_group
    made: dist.ProcessGroup | None = dist.new_group(
        dist.get_process_group_ranks(process_group),
        backend="gloo",
        timeout=timeout,
        use_local_synchronization=process_group is not None,
    )
    return made


def leave(process_group: dist.ProcessGroup | int) -> None:
    """Close the connections of a group whose collectives have all succeeded on this rank.

    Does nothing on a rank outside of the group, where `new_group` returns an int. A group that was
    not created by all ranks of the default group stays open, because PyTorch names it by its ranks
    and the number of groups. After its end, the next group could have the same name, and would
    connect to the former group's addresses, which are still in the store.
    """
    if isinstance(process_group, int) or not process_group.group_name.isdecimal():
        return  # a name that is not a number is a hash of the ranks
    with suppress(ValueError):  # the user's program has already destroyed all process groups
        dist.destroy_process_group(process_group)


def with_own_connections(group: Group) -> Group:
    """Return a CPU group of the same ranks with new gloo connections of its own.

    All ranks must call this function together.
    """
    if group.world_size == 1:
        return group
    name = group.gather(uuid.uuid4().hex)[0]  # unique, because PyTorch reuses group names
    store = PrefixStore(f"paceline/{name}", _get_default_store())
    timeout = timedelta(seconds=group.deadline_s)
    own: Any = dist.ProcessGroupGloo(store, group.rank, group.world_size, timeout)
    made = replace(group, device=torch.device("cpu"), control=own, process_group=own)
    made.barrier()  # wait for all: gloo fails if a rank leaves while another connects
    return made


def _initialise(own: Device, timeout: timedelta | None) -> tuple[Store, tuple[Member, ...]]:
    """Initialise torch.distributed from torchrun's environment; return the store and all ranks.

    Waits until all ranks are initialised: otherwise a rank could leave while another rank still
    connects to it, and gloo would fail there with "connectFullMesh failed".
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # First check that all ranks use one backend: otherwise, they would wait for each other forever.
    here = myself(rank, own.torch_device)
    store, members = _meet(here, world_size, timeout or default_pg_timeout)
    dist.init_process_group(
        own.backend, timeout=timeout, world_size=world_size, rank=rank, store=store
    )
    store.set(f"paceline/joined/{rank}", "")
    try:
        store.wait([f"paceline/joined/{other}" for other in range(world_size)])
    except RuntimeError as error:
        problem = f"not all of {world_size} workers joined the process group"
        raise WorkerLost(f"worker {rank} stops: {problem}") from error
    return store, members


def _timeout_of(process_group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Return the timeout of a process group's backend for tensors on `device`."""
    group: Any = process_group or dist.group.WORLD
    carried = group._device_types
    # gloo also serves device types that it does not list: for them, use the first listed type.
    found = next((one for one in carried if one.type == device.type), carried[0])
    timeout: timedelta = group._get_backend(found).options._timeout
    return timeout


def device_of_rank() -> torch.device:
    """Return this rank's GPU, or the CPU if the machine has no GPU.

    Raises InvalidInput if the machine has GPUs, but fewer GPUs than ranks.
    """
    found = gpus()
    if not found:
        return torch.device("cpu")
    check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return found[int(os.environ.get("LOCAL_RANK", "0"))]


def check_gpus(num_workers: int) -> None:
    """Raise InvalidInput if this machine has GPUs, but fewer than `num_workers`."""
    num_found = num_gpus()
    if 0 < num_found < num_workers:
        hint = "each worker needs one; set CUDA_VISIBLE_DEVICES= to train on CPU cores"
        problem = f"must be at most {num_found}, the number of this machine's GPUs"
        raise InvalidInput("workers", problem, got=num_workers, hint=hint)


def _meet(own: Member, world_size: int, deadline: timedelta) -> tuple[Store, tuple[Member, ...]]:
    """Return the run's store, and the identities that the ranks exchange through the store."""
    try:
        store, _, _ = next(rendezvous("env://", own.rank, world_size, timeout=deadline))
        if (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
            # torchrun may keep the store of a failed attempt, which has the old ranks' addresses.
            store = PrefixStore(f"attempt {attempt}", store)
        store.set_timeout(deadline)
        if number := next(_meetings):  # torchrun's store still has the keys of the previous group
            store = PrefixStore(f"paceline/{number}", store)
        store.set(f"paceline/member/{own.rank}", json.dumps(own))
        rows = [json.loads(store.get(f"paceline/member/{rank}")) for rank in range(world_size)]
    except ValueError as error:
        problem = f"requires the other environment variables of torchrun: {error}"
        raise InvalidInput("RANK", problem) from None
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        within = f"at {where} within {deadline.total_seconds():g} s"
        problem = f"not all {world_size} workers joined {within}"
        raise WorkerLost(f"worker {own.rank} stops: {problem}") from error
    members = tuple(Member(*row) for row in rows)
    _check_kinds(members)
    return store, members


def _check_kinds(members: Sequence[Member]) -> None:
    kinds = {member.device_type: member.rank for member in reversed(members)}
    if len(kinds) > 1:
        ranks = ", ".join(f"rank {rank} on {kind}" for kind, rank in sorted(kinds.items()))
        problem = f"must all be on the same kind of device, not {ranks}"
        hint = "set CUDA_VISIBLE_DEVICES= to train on CPUs"
        raise InvalidInput("workers", problem, hint=hint)
