"""What strategy subbatch trains or refuses, and its runner with one worker."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from language_nets import TOKENS, VOCABULARY, WIDTH, Counting, Language, counting
from paceline.core.cost import PacedDevice, Rate, Totals
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.rendezvous import process_group
from paceline.strategies import STRATEGIES
from paceline.strategies.subbatch.build import check_row_wise, describe_recipe, split
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.loss import check_objective, label_message
from paceline.strategies.subbatch.run import start
from paceline.training.data.dataset import TensorSamples
from paceline.training.models.chained_head import bypassed, partition
from paceline.training.recipes.losses import accuracy, bits_per_byte, class_loss, next_token_loss
from paceline.training.recipes.named import given
from paceline.training.recipes.recipe import Recipe
from refusals import refused


def recipe(**changes: Any) -> Recipe:
    images = TensorSamples(torch.randn(4, 6), torch.arange(4))
    known = {"model": nn.Identity, "train": images, "loss": class_loss, "score": None}
    return Recipe(**known | {"name": "mine"} | changes)


def half_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets) / 2


ROWS, ROWS_OF_TOKENS = torch.zeros(1, 6), torch.zeros(1, 3, 6)


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        (class_loss, ROWS),
        (cross_entropy, ROWS),
        (nn.CrossEntropyLoss(), ROWS),
        (next_token_loss, ROWS),
        (next_token_loss, ROWS_OF_TOKENS),
    ],
)
def test_all_forms_of_cross_entropy_are_accepted(loss: Any, outputs: torch.Tensor):
    targets = torch.zeros(outputs.shape[:-1], dtype=torch.int64)
    for score in (bits_per_byte, *([accuracy] if outputs is ROWS else [])):
        check_objective(recipe(loss=loss, score=score), outputs, targets)


INT = torch.int64


@pytest.mark.parametrize(
    ("changes", "outputs", "targets", "field"),
    [
        ({"loss": half_loss}, ROWS, torch.zeros(1), "loss"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, ROWS, torch.zeros(1), "loss"),
        ({"loss": nn.CrossEntropyLoss(torch.ones(6))}, ROWS, torch.zeros(1), "loss"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, ROWS, torch.zeros(1), "loss"),
        ({}, ROWS, torch.zeros(1, 6, dtype=torch.bool), "loss"),
        ({}, ROWS_OF_TOKENS, torch.zeros(1, 3, dtype=INT), "loss"),
        ({}, ROWS, torch.zeros(1), "loss"),
        ({"loss": next_token_loss}, ROWS_OF_TOKENS[0], torch.zeros(1, 3, dtype=INT), "loss"),
        (
            {"loss": next_token_loss, "score": accuracy},
            *(ROWS_OF_TOKENS, torch.zeros(1, 3, dtype=INT), "score of mine"),
        ),
    ],
)
def test_another_loss_is_refused(changes: dict[str, Any], outputs, targets, field: str):
    with refused(field):
        check_objective(recipe(**changes), outputs, targets)


@pytest.mark.parametrize(
    "targets",
    [
        torch.tensor([0, 6]),
        torch.tensor([-1, 2]),
        torch.zeros(2, 4, dtype=torch.int64),  # 8 rows, but at most 6 are allowed
        torch.zeros(2),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets: torch.Tensor):
    with refused("data"):
        label_message(targets, 6, 6)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(optim.SGD, lr=0.1, momentum=0.9),
        partial(optim.AdamW, lr=1e-6),
        partial(optim.RMSprop, lr=0.1),
        partial(optim.Adagrad, lr=0.1),
    ],
)
def test_elementwise_optimizers_are_accepted(optimizer: Any):
    check_row_wise(lambda module: optimizer(module.parameters()))


class Normed(optim.SGD):
    """Scales each gradient by the norm of the whole tensor, as LARS does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.grad /= one.grad.norm()
        super().step()


@pytest.mark.parametrize("optimizer", [partial(optim.Adafactor, lr=1e-4), partial(Normed, lr=1e-6)])
def test_optimizers_of_whole_matrices_are_refused(optimizer: Any):
    with refused("optimizer"):
        check_row_wise(lambda module: optimizer(module.parameters()))


def tied() -> Language:
    model = Language()
    model.head.weight = model.embedding.weight
    return model


class Doubling(Language):
    """Returns twice its last layer's output."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return 2 * super().forward(tokens, mask)


def parted(recipe: Recipe, **more: Any) -> Any:
    workload, _ = describe_recipe(recipe, 3)
    with process_group(20.0) as group:
        config = SubBatch(workers=1, **more)
        return split(recipe.model, workload, config, group, 0, recipe.example(1))


@pytest.mark.parametrize("optional", [True, False])
def test_a_body_is_the_model_up_to_its_last_layer(optional: bool):
    """The assertion and the optional argument must not be traced as constants."""
    torch.manual_seed(0)
    model, tokens = Language(), torch.arange(12).view(2, 6)
    mask = torch.rand(2, 6) > 0.5 if optional else None
    body, [head] = partition(model, ["head"], "tokens", tokens[:1])
    assert torch.equal(head.module(body(tokens, mask)), model(tokens, mask))
    assert body.norm is model.norm
    body.eval()
    assert not body.norm.training


def test_a_head_whose_outputs_are_not_the_models_is_refused():
    tokens = torch.arange(6).view(1, 6)
    assert bypassed(Language(), "norm", tokens) is None
    assert bypassed(Doubling(), "head", tokens) is None
    with refused("head"):
        parted(replace(counting(), model=Doubling))


def test_a_model_that_changes_its_heads_outputs_in_training_is_refused():
    class Changing(Language):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            found = super().forward(tokens, mask)
            return 2 * found if self.training else found

    body = bypassed(Changing().train(), "head", torch.arange(6).view(1, 6))
    assert body is not None
    with refused("head"):
        body(torch.arange(6).view(1, 6))


@pytest.mark.parametrize("head", [None, "head"])
def test_a_tied_head_is_refused(head: str | None):
    recipe = replace(counting(), model=tied)
    with refused("head"):
        parted(recipe, head=head)


def test_a_recipe_is_described_on_the_meta_device():
    """If the factory respects torch.device, describing allocates no head."""
    made = []

    class Watched(Language):
        def __init__(self) -> None:
            super().__init__()
            made.append(self.head.weight.device.type)

    workload, rows_per_sample = describe_recipe(replace(counting(), model=Watched), 3)
    assert made == ["meta"]
    assert (workload.batch_size, rows_per_sample) == (3, TOKENS)


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


def test_a_rehearsal_paces_the_layers_of_the_same_runner():
    with given(COUNTING) as name, process_group(20.0) as group:
        settings = RehearseSettings(
            model=name, strategy="subbatch", workers=1, steps=3, device="any", batch_size=6
        )
        with start(session(settings, group, device=PACED)) as runner:
            runner.measure()
            outcome = runner.train(SubBatch(workers=1))
    assert outcome.timeline.origin == "rehearsed"
    assert len(outcome.step_seconds) == 3
    assert min(outcome.step_seconds) > 0.059
    assert outcome.epochs == ()
    assert not [fault for fault in outcome.faults if "planned" in fault]
