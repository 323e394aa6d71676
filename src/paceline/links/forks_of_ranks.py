"""Processes that a user's program forks from a rank: they hold none of its connections to others.

    rank 0 ──connection── rank 1          rank 0 is killed: rank 1 would not see the end of the
      └ fork ─────┘                       connection as long as the fork has it, and wait for it

A fork has none of torch's threads, and so no use for the connections.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_OWN = Path("/proc/self/fd")
_peers: set[int] = set()  # process numbers on this machine
_is_registered = False


def let_forks_go_of(pids: Iterable[int]) -> None:
    """From now on have forks of this process let go of its connections to these processes."""
    global _is_registered
    _peers.update(set(pids) - {os.getpid()})
    if _peers and not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Put /dev/null in the place of each descriptor of a connection between ranks."""
    of_peers = {inode for pid in _peers for inode in _sockets(Path(f"/proc/{pid}/fd"))}
    ends = dict(_ends())
    nothing = os.open(os.devnull, os.O_RDWR)
    for inode, fd in _sockets(_OWN).items():
        other = ends.get(inode)
        if other is not None and other in of_peers:
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _sockets(folder: Path) -> dict[str, int]:
    """Return the descriptors of a process that are sockets, by their inode."""
    found: dict[str, int] = {}
    with suppress(OSError):  # it is gone, or of another user
        for entry in list(folder.iterdir()):
            with suppress(OSError):
                kind, _, rest = str(entry.readlink()).partition(":[")
                if kind == "socket":
                    found[rest.rstrip("]")] = int(entry.name)
    return found


def _ends() -> Iterable[tuple[str, str]]:
    """Yield both inodes of each TCP connection within this machine; see proc(5)."""
    inodes: dict[tuple[str, str], str] = {}
    for path in _TABLES:
        with suppress(OSError):
            for line in Path(path).read_text().splitlines()[1:]:
                fields = line.split()
                inodes[fields[1], fields[2]] = fields[9]
    for (local, remote), inode in inodes.items():
        if (remote, local) in inodes:
            yield inode, inodes[remote, local]
