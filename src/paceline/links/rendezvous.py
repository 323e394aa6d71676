"""Join a run: the ranks meet, see who they are, and have a process group."""

import importlib
import json
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any

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
from paceline.links.failures import raised_instead
from paceline.links.forks_of_ranks import let_forks_go_of
from paceline.links.group import Group, Member, myself

_meetings = count()  # of this process; the ranks of a run have as many


@contextmanager
def process_group(
    deadline_s: float, device: torch.device | None = None, *, exchanges_alone: bool = False
) -> Iterator[Group]:
    """Join the run that the environment describes, as torchrun and Paceline's launcher set it.

    `device` is this rank's: by default its GPU, or the CPU of a machine without any. It is the
    current one meanwhile. Without RANK in the environment this process is alone; with
    `exchanges_alone` a single rank has a process group all the same. No collective waits longer
    than `deadline_s`. Raises WorkerLost if a peer does not come or is gone,
    InvalidInput if the ranks cannot form a group, WorkersFailed in place of an error if another
    rank has failed before.
    """
    own = device_of(device_of_rank() if device is None else device)
    # What names no device, as `.cuda()` in a model, would make a context on the first GPU.
    with own.use(), _process_group(own, deadline_s, exchanges_alone) as group:
        yield group


@contextmanager
def _process_group(own: Device, deadline_s: float, exchanges_alone: bool) -> Iterator[Group]:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device, deadline = own.torch_device, timedelta(seconds=deadline_s)
    is_alone = world_size == 1
    if is_alone and not exchanges_alone:
        yield Group.alone(device, deadline_s)
        return
    # torch imports it at the first step of an optimizer, and it keeps the process groups that it
    # finds: their threads would outlive them, and abort an interpreter that ends meanwhile.
    importlib.import_module("torch._dynamo")
    store, members = _meet(myself(rank, device), world_size, deadline)
    _initialise(own, rank, world_size, store, deadline)
    # Values in host memory need gloo: nccl would make the host wait for the GPU.
    control = None if own.backend == "gloo" else dist.new_group(backend="gloo", timeout=deadline)
    group = Group(
        rank, world_size, device, members, store, control, deadline_s, exchanges_alone=is_alone
    )
    try:
        yield group
    except (Exception, SystemExit) as error:
        instead = raised_instead(error, group, store)
        if instead is None:
            raise
        raise instead from error
    finally:
        # After an error the peers may be gone, and saying goodbye would wait for them.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def joined(
    device: torch.device,
    deadline_s: float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Group:
    """Join a program that has initialised torch.distributed itself, or has not.

    Without torch.distributed, but with the environment of torchrun, the default group is made:
    gloo, or nccl for GPUs. Without either this process is alone. The ranks of `process_group` must
    call it together. The deadline, where none is given, is that of the process group: 30 minutes,
    unless it was made with another one. Raises InvalidInput if ranks are on devices of different
    kinds, WorkerLost if one does not come.
    """
    own = device_of(device)
    device = own.torch_device
    timeout = None if deadline_s is None else timedelta(seconds=deadline_s)
    if not dist.is_initialized() and "RANK" in os.environ:
        _make_default_group(own, timeout)
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        alone_s = default_pg_timeout.total_seconds() if deadline_s is None else deadline_s
        return Group.alone(device, alone_s, process_group)
    if deadline_s is None:
        timeout = _timeout_of(process_group, device)
        deadline_s = timeout.total_seconds()
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    member, control = myself(rank, device), _gloo_beside(process_group, timeout)
    unknown = Group(
        rank, world_size, device, (member,) * world_size, None, control, deadline_s, process_group
    )
    members = tuple(Member(*row) for row in unknown.gather(member))
    _check_kinds(members)
    here = members[rank]
    near = [one for one in members if (one.boot_id, one.pid_namespace) == here[2:4]]
    let_forks_go_of(one.pid for one in near)
    return replace(unknown, members=members)


def _gloo_beside(
    process_group: dist.ProcessGroup | None, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """Return a group for values in host memory: nccl would make the host wait for the GPU."""
    if dist.get_backend(process_group) == "gloo":
        return process_group
    made: dist.ProcessGroup | None = dist.new_group(
        dist.get_process_group_ranks(process_group),
        backend="gloo",
        timeout=timeout,
        use_local_synchronization=process_group is not None,
    )
    return made


def with_own_connections(group: Group) -> Group:
    """Return a group of the same ranks for host memory, whose order no other collective disturbs.

    All ranks of the group call it together. Its connections end with the last reference to it.
    """
    if group.world_size == 1:
        return group
    name = group.gather(uuid.uuid4().hex)[0]  # torch's own names come again after a group has ended
    store = PrefixStore(f"paceline/{name}", _get_default_store())
    timeout = timedelta(seconds=group.deadline_s)
    own: Any = dist.ProcessGroupGloo(store, group.rank, group.world_size, timeout)
    made = replace(group, device=torch.device("cpu"), control=own, process_group=own)
    made.barrier()  # gloo fails on a rank that connects to one that has left already
    return made


def _make_default_group(own: Device, timeout: timedelta | None) -> None:
    """Make torch's default group, of the ranks that the environment describes."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    # Before it is made: ranks with different backends would wait for each other in vain.
    store, _ = _meet(myself(rank, own.torch_device), world_size, timeout or default_pg_timeout)
    with own.use():
        _initialise(own, rank, world_size, store, timeout)


def _initialise(
    own: Device, rank: int, world_size: int, store: Store, timeout: timedelta | None
) -> None:
    """Initialise torch.distributed, and wait until all ranks have.

    gloo would fail ("connectFullMesh failed") on a rank that still connects to one that has
    already left the group.
    """
    dist.init_process_group(
        own.backend, timeout=timeout, world_size=world_size, rank=rank, store=store
    )
    store.set(f"paceline/joined/{rank}", "")
    try:
        store.wait([f"paceline/joined/{other}" for other in range(world_size)])
    except RuntimeError as error:
        raise WorkerLost(
            f"worker {rank} stops: not all of {world_size} workers joined the process group"
        ) from error


def _timeout_of(process_group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Return the longest wait of the backend that carries tensors of the device."""
    group: Any = process_group or dist.group.WORLD
    carried = group._device_types
    # gloo does not know all kinds of devices whose tensors lie in the host's memory.
    found = next((one for one in carried if one.type == device.type), carried[0])
    timeout: timedelta = group._get_backend(found).options._timeout
    return timeout


def device_of_rank() -> torch.device:
    """Return this rank's GPU, or the CPU where there is none.

    Raises InvalidInput if the local ranks are more than the GPUs, or GPUs cannot be used.
    """
    found = gpus()
    if not found:
        return torch.device("cpu")
    _check_suffice(len(found), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return found[int(os.environ.get("LOCAL_RANK", "0"))]


def check_gpus(num_workers: int) -> None:
    """Raise InvalidInput if this machine has GPUs, but fewer than these workers of it."""
    _check_suffice(num_gpus(), num_workers)


def _check_suffice(num_found: int, num_workers: int) -> None:
    if 0 < num_found < num_workers:
        has = "one GPU" if num_found == 1 else f"{num_found} GPUs"
        raise InvalidInput(
            "workers",
            f"{num_workers} on a machine with {has}, of which each takes one",
            hint="take fewer, or hide the GPUs with CUDA_VISIBLE_DEVICES= to compute on CPU cores",
        )


def _meet(own: Member, world_size: int, deadline: timedelta) -> tuple[Store, tuple[Member, ...]]:
    """Exchange process numbers, machines and device types with all ranks through the store."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(rendezvous("env://", own.rank, world_size, timeout=deadline))
        if (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
            # torchrun may keep the store of an attempt that failed, with its ranks' addresses.
            store = PrefixStore(f"attempt {attempt}", store)
        store.set_timeout(deadline)
        if number := next(_meetings):  # torchrun's store still has what the group before has set
            store = PrefixStore(f"paceline/{number}", store)
        store.set(f"paceline/member/{own.rank}", json.dumps(own))
        rows = [json.loads(store.get(f"paceline/member/{rank}")) for rank in range(world_size)]
    except ValueError as error:
        raise InvalidInput(
            "RANK is set, but the rest of the environment is not", str(error)
        ) from None
    except RuntimeError as error:
        raise WorkerLost(
            f"worker {own.rank} stops: not all of {world_size} workers came to {where} "
            f"within {deadline.total_seconds():g} s"
        ) from error
    members = tuple(Member(*row) for row in rows)
    _check_kinds(members)
    return store, members


def _check_kinds(members: Sequence[Member]) -> None:
    kinds = {member.device_type: member.rank for member in reversed(members)}
    if len(kinds) > 1:
        ranks = ", ".join(f"rank {rank} on {kind}" for kind, rank in sorted(kinds.items()))
        raise InvalidInput(
            "workers",
            f"{ranks}: torch has no collective between these",
            hint="hide the GPUs with CUDA_VISIBLE_DEVICES= to train on all CPUs",
        )
