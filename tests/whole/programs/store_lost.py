"""Rank 0, which keeps the store of both ranks, ends without a word; rank 1 finds it lost.

python store_lost.py RANK PORT
"""

import os
import sys

import torch
from torch import distributed

from paceline.links.group import Group
from paceline.runs.launching import as_rank, leave


def lose(group: Group) -> None:
    group.barrier()
    if group.rank == 0:
        os._exit(0)
    distributed.all_reduce(torch.zeros(1))


rank, port = sys.argv[1:]
os.environ.update(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
leave(as_rank(lose, 60.0, debug=False))
