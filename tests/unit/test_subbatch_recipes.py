"""Losses, targets, optimizers and models that strategy subbatch trains or refuses."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from language_nets import TOKENS, Language, counting
from paceline.links.rendezvous import process_group
from paceline.strategies.subbatch.build import check_row_wise, describe_recipe, split
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.loss import check_objective, label_message
from paceline.training.data.dataset import TensorSamples
from paceline.training.models.chained_head import bypassed, partition
from paceline.training.recipes.losses import (
    accuracy,
    bits_per_byte,
    class_loss,
    next_token_loss,
)
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
