"""The process group of a run, and who is in it."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from paceline.core.errors import InvalidInput, WorkerLost, WorkersFailed

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_LOST_MARKS = ("Connection closed by peer", "Connection reset by peer", "imed out", "timeout")
_FAILED_KEY, _FAILURE_KEY = "paceline/failed", "paceline/failure"
_SETTLING_S = 1.0  # a process that died may take a moment to be seen dead


@dataclass(frozen=True)
class Member:
    """A rank as the others know it.

    Ranks with one `boot_id` run on one kernel and share its clock; only in one `pid_namespace` too
    do their process numbers mean the same.
    """

    rank: int
    pid: int
    boot_id: str
    pid_namespace: str
    device_type: str


@dataclass(frozen=True)
class Group:
    """This process's place in the run.

    `process_group` carries tensors of the device, None being torch's default group; ranks count
    within it. `control` carries values in host memory: the same group where that is gloo, one
    beside it on GPUs, whose own backend would not make the host wait. No wait for another rank is
    longer than `deadline_s`.
    """

    rank: int
    world_size: int
    device: torch.device
    members: tuple[Member, ...]
    store: Store | None
    control: dist.ProcessGroup | None
    deadline_s: float
    process_group: dist.ProcessGroup | None = None

    @property
    def global_ranks(self) -> list[int]:
        """The members' ranks in torch's default group, in the order of their ranks here."""
        if self.world_size == 1:
            return [self.rank]
        return dist.get_process_group_ranks(self.process_group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank. Values are sent as JSON."""
        data = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(data)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.members]
        with self.naming_the_lost():
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self.control)
            padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            rows = [torch.empty_like(padded) for _ in self.members]
            dist.all_gather(rows, padded, group=self.control)
        texts = [bytes(row[: int(size)].tolist()) for row, size in zip(rows, sizes, strict=True)]
        return [json.loads(text) for text in texts]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of all ranks with those of rank 0."""
        if self.world_size > 1:
            for tensor in tensors:
                sent = tensor.contiguous()  # torch sends memory as it lies, gaps and all
                with self.naming_the_lost():
                    dist.broadcast(sent, group=self.process_group, group_src=0)
                if sent is not tensor:
                    tensor.copy_(sent)

    def broadcast_together(self, tensors: Sequence[Tensor]) -> None:
        """Do the same with one message for each type: for many small tensors."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            self.broadcast([flat])
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            with self.naming_the_lost():
                dist.barrier(self.control)

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Say in a loop of the user's own which rank is gone; `process_group` says it elsewhere."""
        try:
            yield
        except RuntimeError as error:
            if self.store is not None or not _is_loss(error):
                raise
            raise WorkerLost(_lost_peers(self) or _somebody(error)) from error

    def first_to_fail(self, reason: str) -> bool:
        """Tell the others and the launcher why this rank ends, unless another was first."""
        if self.store is None:
            return True
        if self.store.add(_FAILED_KEY, 1) > 1:
            return False
        self.store.set(_FAILURE_KEY, reason)
        return True


def failure(store: Store) -> str | None:
    """Return why the first rank that failed did so, if one has said it."""
    return store.get(_FAILURE_KEY).decode() if store.check([_FAILURE_KEY]) else None


@contextmanager
def process_group(deadline_s: float) -> Iterator[Group]:
    """Join the run that the environment describes, as torchrun and Paceline's launcher set it.

    Without RANK in the environment this process is alone. No collective waits longer than
    `deadline_s`. Raises WorkerLost if a peer does not come or is gone, InvalidInput if the ranks
    cannot form a group, WorkersFailed in place of an error if another rank has failed before.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = device_of_rank()
    myself = _myself(rank, device)
    if world_size == 1:
        yield Group(rank, world_size, device, (myself,), None, None, deadline_s)
        return
    store, members = _meet(myself, world_size, timedelta(seconds=deadline_s))
    control = _connect(device, store, rank, world_size, timedelta(seconds=deadline_s))
    group = Group(rank, world_size, device, members, store, control, deadline_s)
    try:
        yield group
    except (Exception, SystemExit) as error:
        # torch's own kinds of errors are all RuntimeErrors
        if isinstance(error, RuntimeError) and _is_loss(error):
            raise WorkerLost(_why_lost(group, error)) from error
        if isinstance(error, WorkerLost):
            group.first_to_fail(str(error))
            raise WorkerLost(f"worker {rank} stops: {error}") from error
        if not group.first_to_fail(f"worker {rank} failed: {error}"):
            raise WorkersFailed(2 if isinstance(error, InvalidInput) else 1) from error
        raise
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
    unless it was made with another one.
    """
    if not dist.is_initialized() and "RANK" in os.environ:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_timedelta(deadline_s))
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        alone_s = default_pg_timeout.total_seconds() if deadline_s is None else deadline_s
        return Group(0, 1, device, (_myself(0, device),), None, None, alone_s, process_group)
    if deadline_s is None:
        deadline_s = _timeout_s(process_group, device)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    myself = _myself(rank, device)
    control = process_group
    if dist.get_backend(process_group) != "gloo":
        control = dist.new_group(
            dist.get_process_group_ranks(process_group),
            backend="gloo",
            timeout=_timedelta(deadline_s),
            use_local_synchronization=process_group is not None,
        )
    strangers = Group(
        rank, world_size, device, (myself,) * world_size, None, control, deadline_s, process_group
    )
    members = tuple(Member(*row) for row in strangers.gather(list(astuple(myself))))
    return replace(strangers, members=members)


def _timedelta(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def _timeout_s(process_group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return how long collectives of the group wait before they fail."""
    group = process_group or dist.group.WORLD
    assert group is not None  # torch.distributed is initialised
    options = group._get_backend(device).options
    return float(options._timeout.total_seconds())


def _myself(rank: int, device: torch.device) -> Member:
    boot_id, namespace = _BOOT_ID.read_text().strip(), str(_PID_NAMESPACE.readlink())
    return Member(rank, os.getpid(), boot_id, namespace, device.type)


def device_of_rank() -> torch.device:
    """Return the GPU of this rank, or the CPU if this machine has not one GPU for each rank."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available() or torch.cuda.device_count() < local_ranks:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _meet(myself: Member, world_size: int, deadline: timedelta) -> tuple[Store, tuple[Member, ...]]:
    """Tell the others who this is, and learn who they are."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(rendezvous("env://", myself.rank, world_size, timeout=deadline))
        store.set_timeout(deadline)
        own = [myself.pid, myself.boot_id, myself.pid_namespace, myself.device_type]
        store.set(f"paceline/member/{myself.rank}", json.dumps(own))
        rows = [json.loads(store.get(f"paceline/member/{rank}")) for rank in range(world_size)]
    except ValueError as error:
        raise InvalidInput(
            f"RANK is set, but the rest of the environment is not: {error}"
        ) from None
    except RuntimeError as error:
        raise WorkerLost(
            f"worker {myself.rank} stops: not all of {world_size} workers came to {where} "
            f"within {deadline.total_seconds():g} s"
        ) from error
    members = tuple(Member(rank, *row) for rank, row in enumerate(rows))
    kinds = {member.device_type: member.rank for member in members}
    if len(kinds) > 1:
        ranks = ", ".join(f"rank {rank} on {kind}" for kind, rank in sorted(kinds.items()))
        raise InvalidInput(
            f"workers: {ranks}: torch has no collective between these; hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= to train on all CPUs"
        )
    return store, members


def _connect(
    device: torch.device, store: Store, rank: int, world_size: int, deadline: timedelta
) -> dist.ProcessGroup | None:
    """Make the default group, and return the one for values in host memory if it is another."""
    on_gpu = device.type == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=deadline
    )
    return dist.new_group(backend="gloo", timeout=deadline) if on_gpu else None


def _why_lost(group: Group, error: RuntimeError) -> str:
    """Say which worker is to blame: what the first that noticed has said holds for all."""
    reason = _dead_peers(group) or _somebody(error)
    if not group.first_to_fail(reason):
        assert group.store is not None
        reason = group.store.get(_FAILURE_KEY).decode()
    return f"worker {group.rank} stops: {reason}"


def _is_loss(error: RuntimeError) -> bool:
    return any(mark in str(error) for mark in _LOST_MARKS)


def _somebody(error: RuntimeError) -> str:
    return f"another worker does not answer ({str(error).splitlines()[0]})"


def _lost_peers(group: Group) -> str | None:
    """Name the workers of this machine that have died, or are stopped."""
    stopped = [_name(member) for member in _neighbours(group) if _state(member.pid) in "Tt"]
    silent = f"{', '.join(stopped)} does not answer: it is stopped" if stopped else None
    return _dead_peers(group) or silent


def _dead_peers(group: Group) -> str | None:
    """Name the workers of this machine that have died without having said why."""
    until = time.monotonic() + _SETTLING_S
    while group.store is None or not group.store.check([_FAILURE_KEY]):
        gone = [_name(member) for member in _neighbours(group) if _state(member.pid) in "ZX"]
        if gone:
            return f"{', '.join(gone)} died in the middle of the run"
        if time.monotonic() > until:
            return None
        time.sleep(0.05)
    return None


def _neighbours(group: Group) -> list[Member]:
    """Return the members whose process numbers mean the same here."""
    myself = group.members[group.rank]
    here = (myself.boot_id, myself.pid_namespace)
    return [member for member in group.members if (member.boot_id, member.pid_namespace) == here]


def _name(member: Member) -> str:
    return f"worker {member.rank} (process {member.pid})"


def _state(pid: int) -> str:
    """Return the kernel's letter for what the process does; X if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]
