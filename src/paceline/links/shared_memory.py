"""Which ranks share a machine, proved; and memory that they share, of which nothing can be left."""

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import InvalidInput
from paceline.links.group import Group

_NAME = "paceline"
_NONCE_NBYTES = 16
_MEMINFO = Path("/proc/meminfo")
_PROC_SELF = Path("/proc/self")


@dataclass(frozen=True)
class Place:
    """Where this rank stands: global ranks, and the process numbers of those on this machine.

    `leaders` are the first ranks of all machines, ascending; `members` those on this rank's
    machine, ascending, and `pids` theirs. `num_cores` is how many processors they may use.
    """

    leaders: tuple[int, ...]
    members: tuple[int, ...]
    pids: tuple[int, ...]
    num_cores: int


def find_place(group: Group) -> Place:
    """Find out who shares this rank's machine, collectively.

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
        # Where /proc is that of another namespace, it does not speak of the processes we can watch.
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
    return Place(
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
    available = _available_nbytes()
    if available is not None and nbytes > available:
        raise _too_large(nbytes, f"{available:,} are available", what)
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(fd)
        raise _too_large(nbytes, error.strerror, what) from None
    return fd


def share(group: Group, place: Place, nbytes: int) -> int:
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
        raise InvalidInput(problems[0])
    if fd >= 0:
        return fd
    path = f"/proc/{place.pids[0]}/fd/{rows[place.members[0]][0]}"
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _read_nonce(pid: int, fd: int) -> bytes | None:
    """Read what a process has written to its file in memory, if it can be reached and is one."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        # In another container these numbers may mean somebody's terminal: look before opening.
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            return None
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.pread(opened, _NONCE_NBYTES, 0)
    except OSError:
        return None
    finally:
        os.close(opened)


def choose_leaders(reached: Sequence[Sequence[int]]) -> list[int]:
    """Return each rank's leader: the lowest leader that it has reached, or itself.

    `reached[rank]` are the lower ranks that a rank has reached, ascending. All ranks must come to
    the same answer, even if not everybody reaches everybody.
    """
    leader_of: list[int] = []
    for rank, lower in enumerate(reached):
        leader_of.append(next((other for other in lower if leader_of[other] == other), rank))
    return leader_of


def _available_nbytes() -> int | None:
    """Return how much memory can be had without swapping, where the kernel says it.

    Asking for more than that would not fail, but have the kernel kill a process to make room.
    """
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _too_large(nbytes: int, why: str | None, what: str) -> InvalidInput:
    return InvalidInput(
        f"shared memory: {what} need {nbytes:,} bytes of this machine, which it does not "
        f"give: {why}; use fewer workers or a smaller model"
    )
