"""Train on ranks of two hosts; print each rank's distance from one process."""

import json
import os
import sys
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import paceline


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 5)
    return nn.Sequential(*layers).double()


def main(exchange: Literal["host", "tree"]) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    inputs, targets = torch.randn(64, 20, dtype=torch.float64), torch.randint(0, 5, (64,))
    model, alone = network(), network()
    parallel = paceline.DataParallel(model, exchange=exchange, chunk=1, deadline_s=20)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (model, alone)]
    for _ in range(20):
        own = slice(rank, None, world_size)
        cross_entropy(parallel(inputs[own]), targets[own]).backward()
        cross_entropy(alone(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    found = {
        "rank": rank,
        "error": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "bits": [p.detach().flatten().tolist()[0].hex() for p in model.parameters()],
        "spans": sorted({span.name.partition("/")[2] for span in parallel.timeline().spans}),
    }
    sys.stdout.write(json.dumps(found) + "\n")  # one write: ranks share the pipe
    sys.stdout.flush()
    parallel.close()
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread that still frees a tensor would abort the interpreter's exit


if __name__ == "__main__":
    main("host" if sys.argv[1] == "host" else "tree")
