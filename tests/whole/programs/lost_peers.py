"""Two ranks; rank 0 exits and rank 1 loses its peer.

python lost_peers.py            the launcher, which forwards SIGINT and exits at SIGUSR1. The signal
                                ends rank 0; rank 1 ignores it and finds its peer lost
python lost_peers.py RANK PORT  one rank; rank 0 hosts the store and exits without an error
python lost_peers.py RANK PORT forks   rank 0 also forks a process that outlives it
"""

import os
import signal
import sys

import torch
from torch import distributed

from paceline.links.group import Group
from paceline.links.launch import launch
from paceline.links.processes import module_command
from paceline.links.rendezvous import joined
from paceline.runs.rank import as_rank, leave


def lose(group: Group) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        ends = lambda number, _: os._exit(128 + number)  # noqa: E731
        signal.signal(number, ends if group.rank == 0 else signal.SIG_IGN)
    joined(group.device)  # as in a user's loop
    if group.rank == 0:
        if sys.argv[3:] == ["forks"] and os.fork() == 0:
            print(os.getpid(), flush=True)
            signal.pause()
        if sys.argv[1] != "launched":
            os._exit(0)
        print("ready", flush=True)
        signal.pause()
    distributed.all_reduce(torch.zeros(1))  # fails, because rank 0 is lost


if len(sys.argv) == 1:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
    launch(module_command(__file__, "launched"), 2)
else:
    if sys.argv[1] != "launched":
        rank, port = sys.argv[1:3]
        os.environ.update(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    leave(as_rank(lose, 60.0))
