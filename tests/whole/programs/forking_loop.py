"""A training loop on one of two ranks; rank 0 forks a process that outlives it.

python forking_loop.py RANK PORT
"""

import os
import signal
import sys

import torch
from torch import nn

import paceline

rank, port = sys.argv[1:]
os.environ.update(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
model = paceline.DataParallel(nn.Linear(8, 8), exchange="allreduce")
for step in range(10**9):
    model(torch.ones(4, 8)).square().mean().backward()
    model.zero_grad()
    if step == 10 and rank == "0" and os.fork() == 0:
        print(os.getpid(), flush=True)
        signal.pause()
        os._exit(0)
