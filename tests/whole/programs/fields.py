"""Train a recipe of mappings with strategy wheel, and with plain SGD in this process.

    python fields.py SETTINGS   one worker with one lane

A sample is a mapping, which is both inputs and targets. Worker processes import the recipe from
this file.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import own_recipes
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.strategies.wheel import STRATEGY
from paceline.strategies.wheel.config import Wheel
from paceline.training.data import ShardedBatches
from paceline.training.recipes.recipe import Recipe

SEED, BATCH, RATE, MOMENTUM = 5, 12, 0.5, 0.5


def recipe() -> Recipe:
    return replace(own_recipes.fields(), test=own_recipes.FieldData())


class Quiet:
    """Progress that counts samples and tests within epochs, checks its arguments, and is silent."""

    samples = tests = 0

    def begin(self, total: int, unit: str) -> None:
        assert unit == "samples"

    def advance(self, count: int = 1) -> None:
        self.samples += count

    def epoch(self, epoch, score: str) -> None:
        assert score == "loss"

    def evaluation(self, found, score: str) -> None:
        self.tests += 1

    def status(self, text: str) -> None:
        assert text.startswith("update ")


def session_of(more: dict) -> TrainingSession:
    known = {"model": "fields:recipe", "strategy": "wheel", "workers": 1, "seed": SEED}
    known |= {"batch_size": BATCH, "learning_rate": RATE, "momentum": MOMENTUM, "profile_s": 0.05}
    asked = TrainSettings(**known | more)
    config = Wheel(workers=1, lanes=1, staleness=0, head="head")
    alone = Group.alone(torch.device("cpu"), asked.deadline_s)
    return TrainingSession(asked, STRATEGY, config, "fields", alone, Quiet())


def in_one_piece(settings: TrainSettings) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    own = recipe()
    model = own.model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    batches = ShardedBatches(len(own.samples), BATCH, 0, 1, SEED)
    is_bfloat16 = settings.precision == "bfloat16"
    for step in range(settings.steps):
        epoch, first = divmod(step, len(batches))
        batches.set_epoch(epoch, first)
        batch = own.samples.__getitems__(next(iter(batches)))
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            value = own.loss(model(**batch), batch)
        optimizer.zero_grad()
        value.backward()
        if settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
    return model.state_dict()


def main() -> None:
    torch.set_num_threads(1)
    session = session_of(json.loads(sys.argv[1]))
    with session.strategy.runner().start(session) as runner:
        assert runner.measure() is not None
        outcome = runner.train(session.config)
        runner.save(Path("model.safetensors"))
    own, other = load_file("model.safetensors"), in_one_piece(session.settings)
    found = {
        "bytes": {row.purpose: row.nbytes for row in outcome.traffic},
        "formula": {row.purpose: row.planned_nbytes for row in outcome.traffic},
        "faults": outcome.faults,
        "lost": outcome.lost,
        "test_losses": [epoch.test_loss for epoch in outcome.epochs],
        "evaluations": [[one.num_steps, one.test_loss] for one in outcome.evaluations],
        "samples": session.progress.samples,
        "tests": session.progress.tests,
        "same": {key: torch.equal(own[key], other[key]) for key in other},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
