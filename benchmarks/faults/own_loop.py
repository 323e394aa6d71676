"""Train in a user's loop under torchrun, without a Paceline command or launcher."""

import sys
from datetime import timedelta

import torch
from torch import distributed, nn

import paceline

_MEETING_S = 60.0


def main(num_steps: int) -> None:
    """Train a small network on random inputs."""
    # By default, torch waits half an hour for the store of a torchrun that was killed.
    distributed.init_process_group("gloo", timeout=timedelta(seconds=_MEETING_S))
    torch.manual_seed(distributed.get_rank())
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    model = paceline.DataParallel(net, deadline_s=float(sys.argv[2]))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
    print("trained")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
