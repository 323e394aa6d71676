"""The runner of strategy subbatch in a session of one worker: trained, rehearsed and refused."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.core.cost import PacedDevice, Rate, Totals
from paceline.core.outcome import Epoch, Evaluation
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.rendezvous import process_group
from paceline.models import find
from paceline.recipes.losses import bits_per_byte, next_token_loss
from paceline.recipes.named import given
from paceline.recipes.recipe import Recipe
from paceline.strategies import STRATEGIES
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.run import start
from refusals import refused

PACED = PacedDevice("paced as a test", Rate(1e12, 1e12), "gpu", Totals(0.02, 0.04))


@dataclass
class Collected:
    """A progress that only collects."""

    total: int = 0
    count: int = 0
    epochs: list[Epoch] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def begin(self, total: int, unit: str) -> None:
        self.total = total

    def advance(self, count: int = 1) -> None:
        self.count += count

    def epoch(self, epoch: Epoch, score: str) -> None:
        self.epochs.append(epoch)

    def evaluation(self, found: Evaluation, score: str) -> None:
        self.evaluations.append(found)

    def status(self, text: str) -> None:
        pass


def session(settings: Any, group: Any, progress: Any = None, device: Any = None) -> TrainingSession:
    strategy = STRATEGIES["subbatch"]
    config = SubBatch(workers=settings.workers, **settings.options)
    return TrainingSession(
        settings, strategy, config, "run", group, progress or Collected(), device
    )


def test_a_session_is_measured_trained_and_saved(tmp_path: Path):
    settings = TrainSettings(
        model="lenet5", strategy="subbatch", workers=1, epochs=1, profile_s=0.1, batch_size=128
    )
    progress = Collected()
    with process_group(20.0) as group, start(session(settings, group, progress)) as runner:
        machine, cost = runner.measure()
        outcome = runner.train(SubBatch(workers=1))
        runner.save(tmp_path / "model.safetensors")
    assert len(machine.devices) == 1
    assert cost is not None
    assert outcome.epochs[0].score > 0.2
    assert outcome.head.layers == ("fc3", "fc4", "fc5")
    assert outcome.head.own_state_nbytes == (outcome.head.state_nbytes,)
    assert {one.purpose: one.planned_nbytes for one in outcome.traffic}["activations"] == 0
    assert not [fault for fault in outcome.faults if "planned" in fault]
    assert progress.count == progress.total
    assert progress.epochs == list(outcome.epochs)
    load_model(find("lenet5").build(10), str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("workers", {"workers": 2}),  # one has started
        ("data", {"data": "delicious-like:samples=500", "model": "mlp"}),  # of several labels
        ("clip_norm", {"clip_norm": 1.0, "options": {"updates": "sub-batch"}}),
    ],
)
def test_what_does_not_fit_is_refused(field: str, more: dict[str, Any]):
    given_ones = {"model": "lenet5", "strategy": "subbatch", "workers": 1, "profile_s": 0.1}
    settings = TrainSettings(**given_ones | more)
    with (
        process_group(20.0) as group,
        refused(field),
        start(session(settings, group)) as runner,
    ):
        runner.measure()


class Language(nn.Module):
    """A model of tokens with a head of its own, and of their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.mixed, self.head = nn.Linear(16, 16), nn.Linear(16, 11, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens) * mask.unsqueeze(2)
        return self.head(self.norm(x + self.mixed(x).relu()))


class Counting(Dataset):
    """Tokens that count up, with their inputs by name; the last target of a sample is ignored."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens = (index + torch.arange(6)) % 11
        targets = tokens[1:].clone()
        targets[-1] = -100
        return {"tokens": tokens[:-1], "mask": torch.ones(5, dtype=torch.bool)}, targets


COUNTING = Recipe(
    model=Language, train=Counting(), test=Counting(), loss=next_token_loss, score=bits_per_byte
)


def test_a_recipe_of_tokens_goes_through_a_session():
    """Inputs by name, bfloat16, clipped gradients, tests within the epoch, a run cut short."""
    progress = Collected()
    with given(COUNTING) as name, process_group(20.0) as group:
        settings = TrainSettings(
            model=name, strategy="subbatch", workers=1, batch_size=6, profile_s=0.1, steps=25,
            learning_rate=0.5, precision="bfloat16", clip_norm=1.0, evaluate_every=4,
        )  # fmt: skip
        with start(session(settings, group, progress)) as runner:
            runner.measure()
            outcome = runner.train(SubBatch(workers=1))
    assert [one.num_steps for one in progress.evaluations] == [4, 8, 12, 16, 24]
    assert len(outcome.epochs) == 3
    assert outcome.evaluations[-1].score < 0.5 * outcome.evaluations[0].score
    assert outcome.score == "bits per byte"
    assert outcome.tokens_per_s == pytest.approx(5 * outcome.samples_per_s)
    assert outcome.head.layers == ("head",)
    # Parameters, gradients and momentum of 11 x 16 values.
    assert outcome.head.state_nbytes == 3 * 4 * 11 * 16
    assert not [fault for fault in outcome.faults if "planned" in fault]


@pytest.mark.parametrize("of_tokens", [False, True])
def test_a_rehearsal_paces_the_layers_of_the_same_runner(of_tokens: bool):
    with given(COUNTING) as name, process_group(20.0) as group:
        settings = RehearseSettings(
            model=name if of_tokens else "lenet5", strategy="subbatch", workers=1, steps=3,
            device="any", batch_size=6,
        )  # fmt: skip
        with start(session(settings, group, device=PACED)) as runner:
            runner.measure()
            outcome = runner.train(SubBatch(workers=1))
    assert outcome.timeline.origin == "rehearsed"
    assert len(outcome.step_seconds) == 3
    assert min(outcome.step_seconds) > 0.059
    assert outcome.epochs == ()
    assert not [fault for fault in outcome.faults if "planned" in fault]
