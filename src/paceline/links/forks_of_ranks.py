"""Processes that a user's program forks from a rank: they hold none of its connections to others.

    rank 0 ──connection── rank 1          rank 0 is killed: rank 1 would not see the end of the
      └ fork ─────┘                       connection as long as the fork has it, and wait for it

A fork has none of torch's threads, and so no use for the connections.
"""

import os
from collections.abc import Iterable
from typing import Any

import psutil

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
    of_peers = {(one.raddr, one.laddr) for pid in _peers for one in _connections(pid)}
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in _connections(os.getpid()):
        if (one.laddr, one.raddr) in of_peers:
            os.dup2(nothing, one.fd, inheritable=False)
    os.close(nothing)


def _connections(pid: int) -> Iterable[Any]:
    try:
        return psutil.Process(pid).net_connections("tcp")
    except psutil.Error:  # it is gone, or of another user
        return ()
