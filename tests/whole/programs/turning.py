"""Train a float64 network on the digits with strategy wheel; `in_one_piece` uses plain SGD.

    python turning.py WORKERS LANES CONFIG

Worker processes import the network from this file.
"""

import json
import os
import sys
from pathlib import Path

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


class Quiet:
    """Progress that counts samples, checks its arguments, and prints nothing."""

    samples = 0
    score = "accuracy"

    def begin(self, total: int, unit: str) -> None:
        assert unit == "samples"

    def advance(self, count: int = 1) -> None:
        self.samples += count

    def epoch(self, epoch, score: str) -> None:
        assert score == self.score

    def status(self, text: str) -> None:
        assert text.startswith("update ")


def session_of(model: str, progress: Quiet, settings: dict, **config):
    from paceline.core.settings import TrainSettings
    from paceline.exchange.session import TrainingSession
    from paceline.links.group import Group
    from paceline.strategies.wheel import STRATEGY
    from paceline.strategies.wheel.config import Wheel

    wheel = Wheel(**config)
    known = {"strategy": "wheel", "seed": SEED, "profile_s": 0.05, "deadline_s": 60.0}
    asked = TrainSettings(model=model, workers=wheel.workers, **known | settings)
    alone = Group.alone(torch.device("cpu"), asked.deadline_s)
    return TrainingSession(asked, STRATEGY, wheel, "turning", alone, progress)


def small(epochs: int, **config):
    settings = {"batch_size": BATCH, "epochs": epochs, "optimizer": "sgd", "wait_s": 600.0}
    settings |= {"learning_rate": RATE, "momentum": MOMENTUM}
    return session_of("turning:Small", Quiet(), settings, **{"head": "fc1"} | config)


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


def trained(session) -> tuple[dict, dict[str, Tensor]]:
    """Train a session; return its outcome, and the parameters and buffers of its model."""
    from safetensors.torch import load_file

    path = Path("model.safetensors")
    with session.strategy.runner().start(session) as runner:
        calibrated = runner.measure()
        outcome = runner.train(session.config)
        runner.save(path)
    assert calibrated is not None
    found = {
        "bytes": {row.purpose: row.nbytes for row in outcome.traffic},
        "formula": {row.purpose: row.planned_nbytes for row in outcome.traffic},
        "wire": outcome.wire_nbytes,
        "faults": outcome.faults,
        "lost": outcome.lost,
        "accuracy": [epoch.score for epoch in outcome.epochs],
        "losses": [epoch.train_loss for epoch in outcome.epochs],
        "test_losses": [epoch.test_loss for epoch in outcome.epochs],
        "evaluations": [[one.num_steps, one.test_loss, one.score] for one in outcome.evaluations],
        "samples": session.progress.samples,
        "steps": list(outcome.updates.by_worker.values()),
        "staleness": dict(outcome.updates.staleness["all workers"]),
    }
    return found, load_file(path)


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    torch.set_num_threads(1)
    workers, lanes, config = map(json.loads, sys.argv[1:])
    print(json.dumps(trained(small(2, workers=workers, lanes=lanes, **config))[0]))


if __name__ == "__main__":
    main()
