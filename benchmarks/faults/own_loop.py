"""A user's loop under torchrun, which ends as Python does: Paceline installs nothing in it."""

import sys

import torch
from torch import distributed, nn

import paceline


def main(num_steps: int) -> None:
    """Train a small network on rows drawn at random."""
    distributed.init_process_group("gloo")
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
