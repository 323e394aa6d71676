"""Close a rank's connections to other ranks in processes that the user's program forks.

    rank 0 ──connection── rank 1          If rank 0 is killed while the fork keeps the connection
      └ fork ─────┘                       open, rank 1 would wait for rank 0 forever.

A fork cannot use the connections, because PyTorch's threads do not exist in the fork.
"""

import os
from collections.abc import Iterable
from typing import Any

import psutil

_peers: set[int] = set()  # process numbers of the other ranks on this machine
_is_registered = False


def close_connections_in_forks(pids: Iterable[int]) -> None:
    """Close this process's connections to the processes `pids` in all later forks."""
    global _is_registered
    _peers.update(set(pids) - {os.getpid()})
    if _peers and not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_close_connections)


def _close_connections() -> None:
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
