"""Memory shared between processes, which the kernel frees when no process uses it."""

import errno
import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import NamedTuple, Self

import psutil
import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.links.group import Group

_NAME = "paceline"
_NONCE_NBYTES = 16
_PROC_SELF = Path("/proc/self")
ALIGNMENT = 64  # a cache line, so that writers do not slow down neighbouring tensors


class LocalRanks(NamedTuple):
    """The ranks on this machine (`members`), in ascending order.

    `leaders`: the first rank of each machine of the run. `num_cores`: the number of cores that the
    members may use.
    """

    leaders: tuple[int, ...]
    members: tuple[int, ...]
    num_cores: int


def find_local_ranks(group: Group) -> LocalRanks:
    """Find the ranks on this machine; all ranks must call this function together.

    Two ranks are on one machine if a rank can read a secret in the other rank's memory. Containers
    that cannot read each other's memory count as separate machines.
    """
    nonce = os.urandom(_NONCE_NBYTES)
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, nonce)
        usable = sorted(os.sched_getaffinity(0))
        rows = group.gather([fd, nonce.hex(), usable])
        # Read other ranks' memory only if /proc shows this process's PID namespace. In another
        # namespace, the members' process numbers belong to other processes.
        lower = rows[: group.rank] if _PROC_SELF.readlink().name == str(os.getpid()) else []
        reached = [
            rank
            for rank, (other, secret, _) in enumerate(lower)
            if _read_nonce(group.members[rank].pid, other) == bytes.fromhex(secret)
        ]
        leader_of = choose_leaders(group.gather(reached))
    finally:
        os.close(fd)
    members = tuple(r for r, leader in enumerate(leader_of) if leader == leader_of[group.rank])
    cores = {core for member in members for core in rows[member][2]}
    return LocalRanks(tuple(sorted(set(leader_of))), members, len(cores))


def allocate(nbytes: int, what: str = "the gradients") -> int:
    """Return a descriptor of `nbytes` of allocated memory, sealed against shrinking and growing.

    Only this user may open the memory. The kernel frees it once no descriptor or mapping is left.
    Raises InvalidInput if there is too little memory or a resource limit is too low. `what`:
    name of the data in the error.
    """
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        available = available_nbytes()
        if nbytes > available:
            raise OSError(errno.ENOMEM, f"only {available:,} bytes are available")
        os.fchmod(fd, 0o600)
        # Allocate now, because otherwise a lack of memory would cause SIGBUS at a later access.
        os.posix_fallocate(fd, 0, nbytes)
        # Seal the size, because a file that shrinks would cause SIGBUS in all its users.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(fd)
        problem = f"cannot share memory, {nbytes:,} bytes for {what}: {error.strerror}"
        hint = "use fewer workers or a smaller model"
        raise InvalidInput("workers", problem, hint=hint) from None
    return fd


def share(group: Group, place: LocalRanks, nbytes: int) -> int:
    """Return a descriptor of new memory that this machine's ranks share.

    Raises InvalidInput on all ranks if a machine has too little memory.
    """
    fd, problem = -1, None
    if group.rank == place.members[0]:
        try:
            fd = allocate(nbytes)
        except InvalidInput as error:
            problem = str(error)
    try:
        group.check(problem)
    except InvalidInput:
        if fd >= 0:
            os.close(fd)
        raise
    of_leader = group.gather(fd)[place.members[0]]
    if fd >= 0:
        return fd
    # The leader keeps its descriptor open until all ranks have mapped the memory.
    leader_pid = group.members[place.members[0]].pid
    return os.open(f"/proc/{leader_pid}/fd/{of_leader}", os.O_RDWR | os.O_CLOEXEC)


def _read_nonce(pid: int, fd: int) -> bytes | None:
    """Return the nonce in another process's memfd, or None if this process cannot read it."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    with suppress(OSError):
        # Check the name first, because opening a terminal or a pipe could block.
        if str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(opened, "rb", buffering=0) as file:
                return file.read(_NONCE_NBYTES)
    return None


def choose_leaders(reached: Sequence[Sequence[int]]) -> list[int]:
    """Return each rank's leader, which is the first rank of its machine.

    It is the lowest leader whose memory the rank can read. If there is none, the rank is a leader.
    `reached[rank]`: the lower ranks whose memory `rank` can read, ascending.
    """
    leader_of: list[int] = []
    for rank, lower in enumerate(reached):
        leader_of.append(next((other for other in lower if leader_of[other] == other), rank))
    return leader_of


def available_nbytes() -> int:
    """Return the bytes that can be allocated without swapping or out-of-memory kills."""
    return int(psutil.virtual_memory().available)


class TensorSpec(NamedTuple):
    """A tensor's name, dtype, shape, and byte offset in memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The offset of the first byte after the tensor."""
        return self.offset + prod(self.shape) * self.dtype.itemsize


def tensors_in(memory: Tensor, entries: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """View parts of the byte tensor `memory` as the tensors that `entries` describe."""
    found = {}
    for entry in entries:
        flat = memory[entry.offset : entry.end]
        found[entry.name] = flat.view(entry.dtype).view(entry.shape)
    return found


class SharedTensors:
    """Named tensors in shared memory, which other processes map by the descriptor `fd`.

    `memory`: the whole memory as bytes. The object can be pickled for a process that inherits the
    descriptor.
    """

    def __init__(self, fd: int, entries: Sequence[TensorSpec]) -> None:
        self.fd, self.entries = fd, tuple(entries)
        self.memory = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
        self.tensors = tensors_in(self.memory, self.entries)

    def __reduce__(self) -> tuple[type[Self], tuple[int, tuple[TensorSpec, ...]]]:
        return type(self), (self.fd, self.entries)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], what: str) -> Self:
        """Copy tensors to new shared memory; `what` describes them in errors."""
        entries, nbytes = [], 0
        for name, tensor in tensors.items():
            entries.append(TensorSpec(name, tensor.dtype, tuple(tensor.shape), nbytes))
            nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        shared = cls(allocate(max(1, nbytes), what), entries)
        for name, tensor in tensors.items():
            shared.tensors[name].copy_(tensor.detach())
        return shared

    def close(self) -> None:
        """Close the descriptor; the memory stays while tensors view it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
