"""A float64 network, which worker processes import; `in_one_piece` trains it with plain SGD."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, SEED, RATE, MOMENTUM = 48, 5, 0.05, 0.5


class Small(nn.Module):
    """A convolution and two linear layers, in float64, with BatchNorm in body and head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.fc1 = nn.Linear(54, 48)
        self.inner = nn.BatchNorm1d(48)
        self.fc2 = nn.Linear(48, 10)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        maps = F.max_pool2d(self.norm(torch.relu(self.conv(images.double()))), 2)
        return self.fc2(torch.relu(self.inner(self.fc1(maps.flatten(1)))))


def in_one_piece(epochs: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train with plain SGD; return the state and the mean loss of each epoch."""
    from paceline.training.data import ShardedBatches, load

    torch.manual_seed(SEED)
    model, losses = Small().train(), []
    data = load("digits", None, SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    batches = ShardedBatches(len(data.train), BATCH, 0, 1, SEED)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        total = 0.0
        for rows in batches:
            inputs, targets = data.train.__getitems__(rows)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        losses.append(total / len(data.train))
    return model.state_dict(), losses
