"""The process group of a run, its members, their devices and their cores."""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from paceline.core.errors import InvalidInput, WorkerLost, WorkersFailed
from paceline.devices import Device, device_of, gpus, num_gpus
from paceline.links.forks_of_ranks import let_forks_go_of

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
# Parts of gloo's and NCCL's messages: torch has no type of error for a lost peer.
_LOST_MARKS = ("Connection closed by peer", "Connection reset by peer", "imed out", "timeout")
_FAILED_KEY, _FAILURE_KEY = "paceline/failed", "paceline/failure"
_SPEAKER_KEY = "paceline/speaker"  # the rank that says itself why it has failed
_REPORTED_KEY = "paceline/reported"
_LEFT_KEY = "paceline/left"  # the signal by which a rank has left the run in order
_SIGNALLED_KEY = "paceline/signalled"  # the signal that the launcher passes on to all ranks
_STOPPED_KEY = "paceline/stopped"  # the line by which rank 0 has said that the run stops
_REPORT_S = 3.0  # for the first failed rank to print its line; less than the launcher's grace
_SETTLING_S = 1.0  # a process that died may take a moment to be seen dead
_meetings = count()  # of this process; the ranks of a run have as many
_before_sharing: list[tuple[set[int], int]] = []  # the cores and threads of this process


def share_cores(device: torch.device) -> None:
    """Give each rank of this machine cores of its own, and a thread for each.

    Unpinned, the message that ends a rank's exchange wakes it on the sender's core, where it waits
    behind the sender's computation for a time slice. A single rank, ranks on GPUs, more ranks than
    cores, and what the user has set himself (an affinity, OMP_NUM_THREADS) are left alone. Threads
    that exist already stay where they are.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    usable = os.sched_getaffinity(0)
    cores = physical_cores(usable)
    own = len(cores) // num_ranks
    if num_ranks == 1 or device.type != "cpu":
        return
    _before_sharing.append((usable, torch.get_num_threads()))
    if own and len(usable) == os.cpu_count():
        first = own * int(os.environ.get("LOCAL_RANK", "0"))
        # Whole cores: two hardware threads of one core are no two cores.
        os.sched_setaffinity(0, {cpu for core in cores[first : first + own] for cpu in core})
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, own))


@contextmanager
def all_cores() -> Iterator[None]:
    """Have the cores and threads that this process had before it shared them with other ranks."""
    if not _before_sharing:
        yield
        return
    now = os.sched_getaffinity(0), torch.get_num_threads()
    _take(*_before_sharing[-1])
    try:
        yield
    finally:
        _take(*now)


def _take(cores: set[int], num_threads: int) -> None:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(num_threads)


def physical_cores(usable: set[int]) -> list[tuple[int, ...]]:
    """Return the usable processors grouped by the core whose hardware threads they are."""
    groups: dict[str, list[int]] = {}
    for cpu in sorted(usable):
        path = Path(_SIBLINGS.format(cpu))
        core = path.read_text() if path.exists() else str(cpu)
        groups.setdefault(core, []).append(cpu)
    return [tuple(cpus) for cpus in groups.values()]


class Member(NamedTuple):
    """The identity of a rank.

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
    longer than `deadline_s`. `exchanges_alone`: a single rank has a process group, and exchanges
    with itself what it would with others.
    """

    rank: int
    world_size: int
    device: torch.device
    members: tuple[Member, ...]
    store: Store | None
    control: dist.ProcessGroup | None
    deadline_s: float
    process_group: dist.ProcessGroup | None = None
    exchanges_alone: bool = False

    @classmethod
    def alone(
        cls, device: torch.device, deadline_s: float, process_group: dist.ProcessGroup | None = None
    ) -> Self:
        """Return the group of a process that has nobody to exchange with."""
        return cls(0, 1, device, (_myself(0, device),), None, None, deadline_s, process_group)

    @property
    def exchanges(self) -> bool:
        """True if gradients are exchanged: with other ranks, or with itself."""
        return self.world_size > 1 or self.exchanges_alone

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
        with self.naming_lost_ranks():
            # all_gather needs equal sizes, so send the lengths first and pad to the longest.
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
                with self.naming_lost_ranks():
                    dist.broadcast(sent, group=self.process_group, group_src=0)
                if sent is not tensor:
                    tensor.copy_(sent)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            with self.naming_lost_ranks():
                dist.barrier(self.control)

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Raise WorkerLost with the lost rank, in a user's own loop; else `process_group` does."""
        try:
            yield
        except RuntimeError as error:
            if self.store is not None or not _is_loss(error):
                raise
            stopped = _names_in(self, "Tt")
            silent = f"{stopped} does not answer: it is stopped" if stopped else None
            raise WorkerLost(_dead_peers(self) or silent or _unknown_peer(error)) from error

    def dead(self) -> str:
        """Name the members on this machine whose processes have ended."""
        return _names_in(self, "ZX")

    def leave(self, number: int) -> bool:
        """Tell the other ranks that this one ends by a signal; return True if it is the first."""
        if self.store is None:
            return True
        with suppress(RuntimeError):  # the store may have ended with another rank
            self.store.compare_set(_LEFT_KEY, "", str(number))
            return self.store.add(f"{_LEFT_KEY}/number", 1) == 1
        return False

    def has_stopped(self, line: str) -> None:
        """Tell the launcher that this rank has said why all ranks end."""
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set(_STOPPED_KEY, line)

    def has_reported(self) -> None:
        """Tell the other ranks that the first to fail has printed why, so that they may end."""
        if self.store is not None:
            with suppress(RuntimeError):  # the store may have ended with another rank
                self.store.set(_REPORTED_KEY, "")


def failure(store: Store) -> str | None:
    """Return the reason that the first failed rank has published, if there is one."""
    return store.get(_FAILURE_KEY).decode() if store.check([_FAILURE_KEY]) else None


def stopped(store: Store) -> str | None:
    """Return the line by which rank 0 has said that the run stops, if it has."""
    return store.get(_STOPPED_KEY).decode() if store.check([_STOPPED_KEY]) else None


def signal_follows(store: Store, number: int) -> None:
    """Tell the ranks that each gets this signal: a peer that is lost from now on may have left."""
    with suppress(RuntimeError):
        store.set(_SIGNALLED_KEY, str(number))


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
    store, members = _meet(_myself(rank, device), world_size, deadline)
    dist.init_process_group(
        own.backend, timeout=deadline, world_size=world_size, rank=rank, store=store
    )
    # Values in host memory need gloo: nccl would make the host wait for the GPU.
    control = None if own.backend == "gloo" else dist.new_group(backend="gloo", timeout=deadline)
    group = Group(
        rank, world_size, device, members, store, control, deadline_s, exchanges_alone=is_alone
    )
    try:
        yield group
    except (Exception, SystemExit) as error:
        instead = _told(error, group, store)
        if instead is None:
            raise
        raise instead from error
    finally:
        # After an error the peers may be gone, and saying goodbye would wait for them.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _told(
    error: Exception | SystemExit, group: Group, store: Store
) -> WorkerLost | WorkersFailed | None:
    """Tell the other ranks why this one ends; return the error to raise in the place of its own.

    None: its own, which is the first, and which it has to say. WorkersFailed: there is nothing to
    say, as another rank has, or as one has left the run in order.
    """
    # torch's own kinds of errors are all RuntimeErrors
    lost_in_torch = isinstance(error, RuntimeError) and _is_loss(error)
    try:
        return _told_by(store, error, group, lost_in_torch)
    except dist.DistNetworkError:
        if not lost_in_torch:
            return None
        # The launcher keeps the store. If it has ended, it has said why, and the kernel is about to
        # end this rank.
        time.sleep(_REPORT_S)
        gone = group.dead() or "the process that keeps the run's store"
        return WorkerLost(f"worker {group.rank} stops: {gone} died in the middle of the run")


def _told_by(
    store: Store, error: Exception | SystemExit, group: Group, lost_in_torch: bool
) -> WorkerLost | WorkersFailed | None:
    if store.check([_LEFT_KEY]):
        return WorkersFailed(128 + int(store.get(_LEFT_KEY)))
    reason = f"worker {group.rank} failed: {error}"
    if lost_in_torch and store.check([_SIGNALLED_KEY]):
        return WorkersFailed(128 + int(store.get(_SIGNALLED_KEY)))
    if lost_in_torch:
        reason = _dead_peers(group) or _unknown_peer(error)
    elif isinstance(error, WorkerLost):
        reason = str(error)
    is_lost = lost_in_torch or isinstance(error, WorkerLost)
    is_first = store.add(_FAILED_KEY, 1) == 1
    if is_first:
        if not is_lost:
            store.set(_SPEAKER_KEY, str(group.rank))
        store.set(_FAILURE_KEY, reason)
    if is_lost and (is_first or not _is_said_here(group, store)):
        if lost_in_torch and not is_first:  # the first rank to notice decides it for all
            reason = store.get(_FAILURE_KEY).decode()
        return WorkerLost(f"worker {group.rank} stops: {reason}")
    if is_first:
        return None
    # torchrun kills all ranks as soon as one has ended: wait until the first has printed why.
    # RuntimeError: it died without a word, and maybe the store with it.
    with suppress(RuntimeError):
        store.wait([_REPORTED_KEY], timedelta(seconds=_REPORT_S))
    return WorkersFailed(2 if isinstance(error, InvalidInput) else 1)


def _is_said_here(group: Group, store: Store) -> bool:
    """Return True if the first rank to fail runs on this machine, and says itself why."""
    if not store.check([_SPEAKER_KEY]):
        return False
    speaker = group.members[int(store.get(_SPEAKER_KEY))]
    return speaker.boot_id == group.members[group.rank].boot_id


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
        _initialise(own, timeout)
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        alone_s = default_pg_timeout.total_seconds() if deadline_s is None else deadline_s
        return Group.alone(device, alone_s, process_group)
    if deadline_s is None:
        timeout = _timeout_of(process_group, device)
        deadline_s = timeout.total_seconds()
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    myself = _myself(rank, device)
    control = process_group
    # Values in host memory need gloo: nccl would make the host wait for the GPU.
    if dist.get_backend(process_group) != "gloo":
        control = dist.new_group(
            dist.get_process_group_ranks(process_group),
            backend="gloo",
            timeout=timeout,
            use_local_synchronization=process_group is not None,
        )
    unknown = Group(
        rank, world_size, device, (myself,) * world_size, None, control, deadline_s, process_group
    )
    members = tuple(Member(*row) for row in unknown.gather(myself))
    _check_kinds(members)
    here = members[rank]
    near = [one for one in members if (one.boot_id, one.pid_namespace) == here[2:4]]
    let_forks_go_of(one.pid for one in near)
    return replace(unknown, members=members)


def _initialise(own: Device, timeout: timedelta | None) -> None:
    """Make torch's default group, of the ranks that the environment describes."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    # Before it is made: ranks with different backends would wait for each other in vain.
    store, _ = _meet(_myself(rank, own.torch_device), world_size, timeout or default_pg_timeout)
    with own.use():
        dist.init_process_group(
            own.backend, timeout=timeout, world_size=world_size, rank=rank, store=store
        )


def _timeout_of(process_group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Return the longest wait of the backend that carries tensors of the device."""
    group: Any = process_group or dist.group.WORLD
    carried = group._device_types
    # gloo does not know all kinds of devices whose tensors lie in the host's memory.
    found = next((one for one in carried if one.type == device.type), carried[0])
    timeout: timedelta = group._get_backend(found).options._timeout
    return timeout


def _myself(rank: int, device: torch.device) -> Member:
    return Member(rank, os.getpid(), boot_id(), str(_PID_NAMESPACE.readlink()), device.type)


def boot_id() -> str:
    """Return a name of this kernel, and so of its clock."""
    return _BOOT_ID.read_text().strip()


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
            f"workers: {num_workers} on a machine with {has}, of which each takes one; take fewer, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES= to compute on CPU cores"
        )


def _meet(myself: Member, world_size: int, deadline: timedelta) -> tuple[Store, tuple[Member, ...]]:
    """Exchange process numbers, machines and device types with all ranks through the store."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(rendezvous("env://", myself.rank, world_size, timeout=deadline))
        if (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
            # torchrun may keep the store of an attempt that failed, with its ranks' addresses.
            store = PrefixStore(f"attempt {attempt}", store)
        store.set_timeout(deadline)
        if number := next(_meetings):  # torchrun's store still has what the group before has set
            store = PrefixStore(f"paceline/{number}", store)
        store.set(f"paceline/member/{myself.rank}", json.dumps(myself))
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
    members = tuple(Member(*row) for row in rows)
    _check_kinds(members)
    return store, members


def _check_kinds(members: Sequence[Member]) -> None:
    kinds = {member.device_type: member.rank for member in reversed(members)}
    if len(kinds) > 1:
        ranks = ", ".join(f"rank {rank} on {kind}" for kind, rank in sorted(kinds.items()))
        raise InvalidInput(
            f"workers: {ranks}: torch has no collective between these; hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= to train on all CPUs"
        )


def _is_loss(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistNetworkError) or any(
        mark in str(error) for mark in _LOST_MARKS
    )


def _unknown_peer(error: BaseException) -> str:
    return f"another worker does not answer ({str(error).splitlines()[0]})"


def _dead_peers(group: Group) -> str | None:
    """Name the workers of this machine that have died without having said why."""
    until = time.monotonic() + _SETTLING_S
    while group.store is None or not group.store.check([_FAILURE_KEY]):
        if gone := group.dead():
            return f"{gone} died in the middle of the run"
        if time.monotonic() > until:
            return None
        time.sleep(0.05)
    return None


def _names_in(group: Group, states: str) -> str:
    """Name the workers on this kernel whose process is in one of the states, as proc(5) has them.

    A process that is gone is in state X.
    """
    found, myself = [], group.members[group.rank]
    for one in group.members:
        if (one.boot_id, one.pid_namespace) != (myself.boot_id, myself.pid_namespace):
            continue  # its process number means another process here
        try:
            state = Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        if state in states:
            found.append(f"worker {one.rank} (process {one.pid})")
    return ", ".join(found)
