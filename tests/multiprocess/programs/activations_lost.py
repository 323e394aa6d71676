"""A rank of three that gather rows over and over; the second kills itself in the middle."""

import os
import signal

import torch

from paceline.codecs import all_gather
from paceline.links.rendezvous import process_group

DEADLINE_S, STEP = 20.0, 5

with process_group(DEADLINE_S) as group:
    for step in range(1000):
        x = torch.ones(4, 1000, requires_grad=True)
        gathered = all_gather(x, "dynamic8", activation_gradients="dynamic8")
        if group.rank == 1 and step == STEP:
            print(f"victim {os.getpid()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        gathered.sum().backward()
