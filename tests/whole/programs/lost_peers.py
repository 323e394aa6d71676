"""Two ranks of which the second loses the first.

python lost_peers.py            the launcher, which passes SIGINT on, and leaves at SIGUSR1: rank 0
                                ends by the signal that both get, and rank 1, slower, finds it lost
python lost_peers.py RANK PORT  a rank: 0, which keeps the store of both, ends without a word
"""

import os
import signal
import sys

import torch
from torch import distributed

from paceline.links.group import Group
from paceline.links.launch import launch
from paceline.runs.rank import as_rank, leave


def lose(group: Group) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        ends = lambda number, _: os._exit(128 + number)  # noqa: E731
        signal.signal(number, ends if group.rank == 0 else signal.SIG_IGN)
    distributed.barrier()
    if group.rank == 0:
        if sys.argv[1] != "launched":
            os._exit(0)
        print("ready", flush=True)
        signal.pause()
    distributed.all_reduce(torch.zeros(1))  # for which the other is lost


if len(sys.argv) == 1:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
    launch([sys.executable, __file__, "launched"], 2)
else:
    if sys.argv[1] != "launched":
        rank, port = sys.argv[1:]
        os.environ.update(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    leave(as_rank(lose, 60.0))
