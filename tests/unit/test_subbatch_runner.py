"""Runner of strategy subbatch with one worker: training, rehearsal and refused settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from safetensors.torch import load_model

from language_nets import VOCABULARY, WIDTH, Counting, Language, counting
from paceline.core.cost import PacedDevice, Rate, Totals
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.rendezvous import process_group
from paceline.strategies import STRATEGIES
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.run import start
from paceline.training.recipes.named import given
from refusals import refused

PACED = PacedDevice("paced as a test", Rate(1e12, 1e12), "gpu", Totals(0.02, 0.04))


def session(settings: Any, group: Any, progress: Any = None, device: Any = None) -> TrainingSession:
    config = SubBatch(workers=settings.workers, **settings.options)
    progress = progress or MagicMock()
    return TrainingSession(settings, STRATEGIES["subbatch"], config, "run", group, progress, device)


def told(method: MagicMock) -> list[Any]:
    """Return the first argument of each call of a method."""
    return [one.args[0] for one in method.call_args_list]


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("workers", {"workers": 2}),  # only one has started
        ("clip_norm", {"clip_norm": 1.0, "options": {"updates": "sub-batch"}}),
    ],
)
def test_what_does_not_fit_is_refused(field: str, more: dict[str, Any]):
    given_ones = {"model": "lenet5", "strategy": "subbatch", "workers": 1, "profile_s": 0.1}
    settings = TrainSettings(**given_ones | more)
    with process_group(20.0) as group, refused(field), start(session(settings, group)) as runner:
        runner.measure()


COUNTING = replace(counting(), train=Counting(60))


def test_a_recipe_of_tokens_goes_through_a_session(tmp_path: Path):
    """With bfloat16, clipping, tests within epochs and an incomplete epoch."""
    progress, path = MagicMock(), tmp_path / "model.safetensors"
    with given(COUNTING) as name, process_group(20.0) as group:
        settings = TrainSettings(
            model=name, strategy="subbatch", workers=1, batch_size=6, profile_s=0.1, steps=25,
            learning_rate=0.5, precision="bfloat16", clip_norm=1.0, evaluate_every=4,
        )  # fmt: skip
        with start(session(settings, group, progress)) as runner:
            machine, cost = runner.measure()
            outcome = runner.train(SubBatch(workers=1))
            runner.save(path)
    assert (len(machine.devices), cost is None) == (1, False)
    assert [one.num_steps for one in told(progress.evaluation)] == [4, 8, 12, 16, 24]
    assert told(progress.begin) == [progress.advance.call_count]
    assert told(progress.epoch) == list(outcome.epochs)
    assert len(outcome.epochs) == 3
    assert outcome.evaluations[-1].score < 0.5 * outcome.evaluations[0].score
    assert outcome.score == "bits per byte"
    assert outcome.tokens_per_s == pytest.approx(6 * outcome.samples_per_s)
    assert outcome.head.layers == ("head",)
    # Parameters, gradients and momentum.
    assert outcome.head.state_nbytes == 3 * 4 * VOCABULARY * WIDTH
    assert outcome.head.own_state_nbytes == (outcome.head.state_nbytes,)
    assert {one.purpose: one.planned_nbytes for one in outcome.traffic}["activations"] == 0
    assert not [fault for fault in outcome.faults if "planned" in fault]
    load_model(Language(), str(path))


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
