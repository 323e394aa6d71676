"""Runs of strategy wheel on the digits, and the same training in one piece.

    python turning.py alone EPOCHS       one worker, one lane, beside plain SGD
    python turning.py many WORKERS LANES [CONFIG]

Body processes import this file for its network, whose parameters are float64.
"""

import json
import os
import sys
from functools import partial
from math import ceil
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, SEED, RATE, MOMENTUM = 48, 5, 0.05, 0.5


class Small(nn.Module):
    """A convolution and two matrices, in float64, and a state in the body without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(6, dtype=torch.float64)
        self.fc1 = nn.Linear(54, 48, dtype=torch.float64)
        self.fc2 = nn.Linear(48, 10, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.norm(torch.relu(self.conv(images.double())))
        return self.fc2(torch.relu(self.fc1(F.max_pool2d(maps, 2).flatten(1))))


def run_of(epochs: int, **config):
    from paceline.data import load
    from paceline.models import describe
    from paceline.strategies.wheel.config import Wheel
    from paceline.strategies.wheel.order import Run

    torch.manual_seed(SEED)
    model = Small()
    wheel = Wheel(head="fc1", **config)
    data = load("digits", None, SEED)
    size = ceil(BATCH / wheel.workers)
    return Run(
        model_name="turning:Small",
        num_classes=None,
        data_name="digits",
        input_shape=None,
        model=model,
        workload=describe(model, torch.zeros(size, *data.sample_shape), "small"),
        data=data,
        config=wheel,
        make=partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM),
        batch_size=BATCH,
        epochs=epochs,
        seed=SEED,
        devices=("cpu",) * ceil(wheel.workers / wheel.lanes),
        profile_s=0.05,
        deadline_s=20.0,
        wait_s=60.0,
        say=lambda text: sys.stderr.write(text + "\n"),
    )


def in_one_piece(epochs: int) -> dict[str, Tensor]:
    from paceline.data import ShardedBatches, load

    torch.manual_seed(SEED)
    model = Small().train()
    data = load("digits", None, SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    batches = ShardedBatches(len(data.train), BATCH, 0, 1, SEED)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for rows in batches:
            inputs, targets = data.train.__getitems__(rows)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model.state_dict()


def said(outcome) -> dict:
    statistics = outcome.statistics()
    return {
        "bytes": statistics,
        "formula": {purpose.value: n for purpose, n in outcome.formula_nbytes.items()},
        "wire": outcome.wire_nbytes,
        "faults": outcome.faults,
        "lost": outcome.tally.lost,
        "accuracy": [epoch.accuracy for epoch in outcome.tally.epochs],
        "losses": [epoch.train_loss for epoch in outcome.tally.epochs],
        "samples": outcome.tally.num_samples,
        "steps": outcome.updates.steps,
        "staleness": dict(outcome.updates.staleness),
        "spans": len(outcome.traced.spans),
    }


def main() -> None:
    from paceline.strategies.wheel.run import train

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    torch.set_num_threads(1)
    case, *rest = sys.argv[1:]
    if case == "alone":
        run = run_of(int(rest[0]), workers=1, lanes=1, staleness=0)
        outcome = train(run)
        own, other = run.model.state_dict(), in_one_piece(int(rest[0]))
        same = {key: torch.equal(own[key], other[key]) for key in other}
        print(json.dumps(said(outcome) | {"same": same}))
        return
    workers, lanes, *more = rest
    config = json.loads(more[0]) if more else {}
    run = run_of(2, workers=int(workers), lanes=int(lanes), **config)
    print(json.dumps(said(train(run))))


if __name__ == "__main__":
    main()
