"""Ranks of which one is on a GPU, and the other on a CPU: each prints what it is told."""

import json
import os
import sys

import torch.distributed as dist

from paceline.core.errors import InvalidInput
from paceline.devices import first_device
from paceline.links.rendezvous import joined, process_group

DEADLINE_S = 60.0


def main(way: str) -> None:
    """Form a group in this way."""
    rank = int(os.environ["RANK"])
    own = {"PACELINE_SIMULATED_GPUS": str(rank), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= own  # as if each were on a machine of its own
    try:
        if way == "process_group":
            with process_group(DEADLINE_S):
                pass
        else:
            if way == "initialised":
                dist.init_process_group("gloo")
            joined(first_device(), DEADLINE_S)
    except InvalidInput as error:
        sys.stdout.write(json.dumps([rank, str(error)]) + "\n")  # in one piece: they share the pipe
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
