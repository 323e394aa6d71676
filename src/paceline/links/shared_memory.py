"""Memory that processes share, which the kernel frees with its last user."""

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
ALIGNMENT = 64  # a cache line: neighbours are not slowed down by each other's writers


class LocalRanks(NamedTuple):
    """The first ranks of all machines (`leaders`), and the ranks on this one (`members`).

    Both ascend. `pids` are those of the members; `num_cores` is how many processors they may use.
    """

    leaders: tuple[int, ...]
    members: tuple[int, ...]
    pids: tuple[int, ...]
    num_cores: int


def find_local_ranks(group: Group) -> LocalRanks:
    """Find the ranks that share this rank's machine, collectively.

    A rank proves that it can reach another's memory by reading a secret there. Ranks in different
    containers may run on one machine and still be unable to; each of them is then a machine.
    """
    nonce = os.urandom(_NONCE_NBYTES)
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, nonce)
        usable = sorted(os.sched_getaffinity(0))
        rows = group.gather([os.getpid(), fd, nonce.hex(), usable])
        # In another PID namespace's /proc, process numbers mean other processes: trust none.
        lower = rows[: group.rank] if _PROC_SELF.readlink().name == str(os.getpid()) else []
        reached = [
            rank
            for rank, (pid, other, secret, _) in enumerate(lower)
            if _read_nonce(pid, other) == bytes.fromhex(secret)
        ]
        leader_of = choose_leaders(group.gather(reached))
    finally:
        os.close(fd)
    members = tuple(r for r, leader in enumerate(leader_of) if leader == leader_of[group.rank])
    cores = {core for member in members for core in rows[member][3]}
    return LocalRanks(
        leaders=tuple(sorted(set(leader_of))),
        members=members,
        pids=tuple(rows[member][0] for member in members),
        num_cores=len(cores),
    )


def allocate(nbytes: int, what: str = "the gradients") -> int:
    """Return a descriptor of `nbytes` of memory that are there, and can neither shrink nor grow.

    Only this user may open it, and it is gone with its last descriptor and mapping. InvalidInput if
    the machine, or a limit, does not give so much; it says `what` would have been there.
    """
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        available = available_nbytes()
        if nbytes > available:
            raise OSError(errno.ENOMEM, f"{available:,} are available")
        os.fchmod(fd, 0o600)
        # ftruncate alone would turn a lack of memory into SIGBUS at some later access.
        os.posix_fallocate(fd, 0, nbytes)
        # A file that shrinks would turn accesses of all its users into SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(fd)
        raise InvalidInput(
            "shared memory",
            f"{what} need {nbytes:,} bytes of this machine, which it does not give: "
            f"{error.strerror}",
            hint="use fewer workers or a smaller model",
        ) from None
    return fd


def share(group: Group, place: LocalRanks, nbytes: int) -> int:
    """Return a descriptor of memory that the ranks of this machine share, collectively.

    InvalidInput, on all ranks, if any machine does not give so much.
    """
    fd, problem = -1, None
    if group.rank == place.members[0]:
        try:
            fd = allocate(nbytes)
        except InvalidInput as error:
            problem = str(error)
    rows = group.gather([fd, problem])
    problems = [row[1] for row in rows if row[1] is not None]
    if problems:
        if fd >= 0:
            os.close(fd)
        raise InvalidInput.of(problems[0])
    if fd >= 0:
        return fd
    # The leader keeps its descriptor until all ranks have mapped the memory.
    path = f"/proc/{place.pids[0]}/fd/{rows[place.members[0]][0]}"
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _read_nonce(pid: int, fd: int) -> bytes | None:
    """Return the nonce in another process's memfd; None if it cannot be opened or is none."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    with suppress(OSError):
        # Opening an unrelated file, as a terminal or a pipe, could block: check its name first.
        if str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(opened, "rb", buffering=0) as file:
                return file.read(_NONCE_NBYTES)
    return None


def choose_leaders(reached: Sequence[Sequence[int]]) -> list[int]:
    """Return each rank's leader: the lowest leader that it has reached, or itself.

    `reached[rank]` are the lower ranks that a rank has reached, ascending. All ranks must come to
    the same answer, even if some ranks cannot reach others.
    """
    leader_of: list[int] = []
    for rank, lower in enumerate(reached):
        leader_of.append(next((other for other in lower if leader_of[other] == other), rank))
    return leader_of


def available_nbytes() -> int:
    """Return the bytes that can be allocated without swapping.

    A larger allocation would not fail: the kernel would kill a process to make room.
    """
    return int(psutil.virtual_memory().available)


class TensorSpec(NamedTuple):
    """The place of a tensor: its name, torch's name of its type, its shape and byte offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The offset of the byte after its last."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.offset + prod(self.shape) * dtype.itemsize


def placed(tensors: Mapping[str, Tensor]) -> tuple[list[TensorSpec], int]:
    """Return places for tensors beside each other, and the bytes that they need in all."""
    entries, offset = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorSpec(name, dtype, tuple(tensor.shape), offset))
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return entries, offset


def tensors_in(memory: Tensor, entries: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Return the tensors that lie at these places of memory, which is a tensor of bytes."""
    return {
        one.name: memory[one.offset : one.end].view(getattr(torch, one.dtype)).view(one.shape)
        for one in entries
    }


class SharedTensors:
    """Named tensors in anonymous memory of mode 0600, which goes with its last user.

    `fd` is the descriptor that other processes attach by; `memory` is all of it, as bytes. Pickled,
    it is the same memory in a process that inherits the descriptor.
    """

    def __init__(self, fd: int, entries: Sequence[TensorSpec]) -> None:
        self.fd, self.entries = fd, tuple(entries)
        self.memory = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
        self.tensors = tensors_in(self.memory, self.entries)

    def __reduce__(self) -> tuple[type[Self], tuple[int, tuple[TensorSpec, ...]]]:
        return type(self), (self.fd, self.entries)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], what: str) -> Self:
        """Return copies of the tensors in new memory.

        InvalidInput, which says `what` they are, if the machine does not give so much.
        """
        entries, nbytes = placed(tensors)
        shared = cls(allocate(max(1, nbytes), what), entries)
        for name, tensor in tensors.items():
            shared.tensors[name].copy_(tensor.detach())
        return shared

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as tensors look at it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
