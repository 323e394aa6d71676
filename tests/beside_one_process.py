"""Train on ranks, which may share GPUs, and in one process with all samples.

    python beside_one_process.py EXCHANGE DTYPE [clip]

Each rank prints its distance from the one process.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import paceline


def network(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 10)
    return nn.Sequential(*layers).to(device, dtype)


def main(exchange: Any, dtype: torch.dtype, *, clip: bool) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(1)
    inputs, targets = torch.randn(96, 256, dtype=dtype), torch.randint(0, 10, (96,))
    inputs, targets = inputs.to(device), targets.to(device)
    model, alone = network(device, dtype), network(device, dtype)
    parallel = paceline.DataParallel(model, exchange=exchange, chunk=1, deadline_s=20)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, alone)]
    for _ in range(30):
        own = slice(rank, None, world_size)
        cross_entropy(parallel(inputs[own]), targets[own]).backward()
        cross_entropy(alone(inputs), targets).backward()
        for module, optimizer in zip((model, alone), optimizers, strict=True):
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    found = {
        "rank": rank,
        "error": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "bits": [float(p.detach().double().sum().cpu()).hex() for p in model.parameters()],
        "spans": sorted({span.name.partition("/")[2] for span in parallel.timeline().spans}),
    }
    sys.stdout.write(json.dumps(found) + "\n")  # one write: ranks share the pipe
    sys.stdout.flush()
    parallel.close()
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread that still frees a tensor would abort the interpreter's exit


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]), clip="clip" in sys.argv[3:])
