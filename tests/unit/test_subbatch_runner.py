"""The runner of strategy subbatch in a session of one worker: trained, rehearsed and refused."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_model

from paceline.core.cost import PacedDevice, Rate, Totals
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.group import process_group
from paceline.models import find
from paceline.strategies import STRATEGIES
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.run import start

PACED = PacedDevice("paced as a test", Rate(1e12, 1e12), "gpu", Totals(0.02, 0.04))


@dataclass
class Collected:
    """A progress that only collects."""

    total: int = 0
    count: int = 0
    epochs: list[Epoch] = field(default_factory=list)

    def begin(self, total: int, unit: str) -> None:
        self.total = total

    def advance(self, count: int = 1) -> None:
        self.count += count

    def epoch(self, epoch: Epoch, score: str) -> None:
        self.epochs.append(epoch)

    def status(self, text: str) -> None:
        pass


def session(settings: Any, group: Any, progress: Any = None, device: Any = None) -> TrainingSession:
    config, strategy = SubBatch(workers=settings.workers), STRATEGIES["subbatch"]
    return TrainingSession(
        settings, strategy, config, "run", group, progress or Collected(), device
    )


def test_a_session_is_measured_trained_and_saved(tmp_path: Path):
    settings = TrainSettings(
        model="lenet5", strategy="subbatch", workers=1, epochs=1, profile_s=0.1, batch_size=128
    )
    progress = Collected()
    with process_group(20.0) as group, start(session(settings, group, progress)) as runner:
        assert runner.about == "lenet5: 61,706 parameters in 5 layers; profiling for 0.1 s"
        machine, cost = runner.measure()
        outcome = runner.train(SubBatch(workers=1))
        runner.save(tmp_path / "model.safetensors")
    assert len(machine.devices) == 1
    assert cost is not None
    assert outcome.epochs[0].score > 0.2
    assert outcome.samples_per_s > 0
    assert outcome.head.layers == ("fc3", "fc4", "fc5")
    assert outcome.head.own_state_nbytes == (outcome.head.state_nbytes,)
    assert {one.purpose: one.planned_nbytes for one in outcome.traffic}["activations"] == 0
    assert not [fault for fault in outcome.faults if "planned" in fault]
    assert progress.count == progress.total
    assert progress.epochs == list(outcome.epochs)
    load_model(find("lenet5").build(10), str(tmp_path / "model.safetensors"))


def test_a_rehearsal_paces_the_layers_of_the_same_runner():
    settings = RehearseSettings(
        model="lenet5", strategy="subbatch", workers=1, steps=3, device="any", batch_size=8
    )
    with process_group(20.0) as group, start(session(settings, group, device=PACED)) as runner:
        runner.measure()
        outcome = runner.train(SubBatch(workers=1))
    assert outcome.timeline.origin == "rehearsed"
    assert len(outcome.step_seconds) == 3
    assert min(outcome.step_seconds) > 0.059
    assert outcome.epochs == ()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"workers": 2}, "workers: 2 asked for, 1 started"),
        ({"data": "delicious-like:samples=500", "model": "mlp"}, "several labels"),
    ],
)
def test_what_does_not_fit_is_refused(more: dict[str, Any], message: str):
    settings = TrainSettings(**{"model": "lenet5", "strategy": "subbatch", "workers": 1} | more)
    with (
        process_group(20.0) as group,
        pytest.raises(InvalidInput, match=message),
        start(session(settings, group)),
    ):
        pass
