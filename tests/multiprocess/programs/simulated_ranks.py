"""Ranks on simulated GPUs that train by torch's all-reduce, beside one process with it all."""

import json
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.devices import device_of
from paceline.links.rendezvous import process_group
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.run import replica

STEPS, BATCH = 4, 12


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5)).double()


def step(model: nn.Module, inputs: Tensor, targets: Tensor, rate: float) -> None:
    cross_entropy(model(inputs), targets).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=rate)
            parameter.grad = None


def main() -> None:
    """Print each rank's device, and how far its parameters are from those of one process."""
    with process_group(60.0) as group:
        alone, model = network(), network().to(group.device)
        parallel = replica(model, AllReduce(workers=group.world_size), group)
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            inputs = torch.randn(BATCH, 8, dtype=torch.float64, generator=generator)
            targets = torch.randint(5, (BATCH,), generator=generator)
            own = slice(group.rank, None, group.world_size)
            step(parallel, inputs[own].to(group.device), targets[own].to(group.device), 0.1)
            step(alone, inputs, targets, 0.1)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        error = max(float((one.cpu() - other).abs().max()) for one, other in pairs)
        parallel.close()
        device_of(group.device).synchronize()
        rows = group.gather([str(group.device), error])
        if group.rank == 0:
            sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
