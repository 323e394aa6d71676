"""Losses and scores of classes, of several labels a sample and of tokens, beside naive ones."""

from math import exp, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from groups import group_of
from paceline.data.dataset import Dataset, TensorSamples, loader
from paceline.data.sampler import ShardedBatches
from paceline.exchange.learner import evaluate
from paceline.exchange.step import SGD, Learning, shares, train_step
from paceline.recipes.classification import accuracy, class_loss, label_loss, precision_at_1
from paceline.recipes.losses import bits_per_byte, next_token_loss
from paceline.recipes.named import recipe_of_data
from paceline.recipes.recipe import Recipe
from paceline.record.clock import HostClock
from paceline.record.recorder import Recorder

SCORES = st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4)
LABELS = st.lists(st.booleans(), min_size=4, max_size=4)


def naive_loss(scores: list[float], labels: list[bool]) -> float:
    """Cross entropy between the softmax and equal shares of the labels, one value at a time."""
    total = log(sum(map(exp, scores)))
    wanted = [total - score for score, label in zip(scores, labels, strict=True) if label]
    return sum(wanted) / len(wanted) if wanted else 0.0


@given(st.lists(st.tuples(SCORES, LABELS), min_size=1, max_size=6))
@settings(deadline=None)
def test_several_labels_as_a_naive_reader_of_the_formula(rows) -> None:
    outputs = torch.tensor([scores for scores, _ in rows], dtype=torch.float64)
    targets = torch.tensor([labels for _, labels in rows])
    losses = [naive_loss(scores, labels) for scores, labels in rows]
    assert float(label_loss(outputs, targets)) == pytest.approx(sum(losses) / len(rows))
    right = [labels[scores.index(max(scores))] for scores, labels in rows]
    assert float(precision_at_1(outputs, targets)) == pytest.approx(sum(right) / len(rows))


def test_one_label_is_the_loss_of_its_class() -> None:
    outputs = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(20) % 5
    labels = nn.functional.one_hot(classes, 5).bool()
    torch.testing.assert_close(label_loss(outputs, labels), class_loss(outputs, classes))
    assert precision_at_1(outputs, labels) == accuracy(outputs, classes)


def test_a_sample_without_labels_moves_nothing() -> None:
    outputs = torch.randn(2, 3, requires_grad=True)
    targets = torch.tensor([[False, False, False], [True, True, False]])
    label_loss(outputs, targets).backward()
    assert outputs.grad is not None
    assert not outputs.grad[0].any()
    assert outputs.grad[1].all()


def recipe_of(samples: TensorSamples) -> Recipe:
    return recipe_of_data(Dataset("toy", samples, samples, 6, (4,)))


def several(num: int) -> TensorSamples:
    source = torch.Generator().manual_seed(num)
    inputs = torch.randn(num, 4, generator=source, dtype=torch.float64)
    return TensorSamples(inputs, torch.rand(num, 6, generator=source) < 0.4)


@pytest.mark.parametrize(
    ("samples", "name"),
    [
        (several(3), "precision@1"),
        (TensorSamples(torch.zeros(2, 4), torch.tensor([0, 1])), "accuracy"),
    ],
)
def test_the_data_set_says_which_and_the_name_is_honest(samples: TensorSamples, name: str) -> None:
    assert recipe_of(samples).score_name == name


@pytest.mark.parametrize(("num_samples", "batch_size", "world_size"), [(7, 7, 3), (21, 6, 4)])
def test_unequal_shares_of_labels_give_the_gradient_of_the_batch(
    num_samples: int, batch_size: int, world_size: int
) -> None:
    data, start = several(num_samples), nn.Linear(4, 6, dtype=torch.float64)
    steps, indices = [], []
    for rank in range(world_size):
        batches = ShardedBatches(num_samples, batch_size, rank, world_size, seed=1)
        source = shares(batches, loader(data, batches), torch.device("cpu"))
        model = nn.Linear(4, 6, dtype=torch.float64)
        model.load_state_dict(start.state_dict())
        optimizer = SGD(learning_rate=1.0, momentum=0.0).optimizer(model)
        recorder, learning = Recorder(HostClock(), "cpu0", rank), Learning(label_loss)
        train_step(model, optimizer, source, recorder, learning)
        steps.append(start.weight - model.weight)
        indices += next(iter(batches))
    inputs, targets = data.__getitems__(indices)
    label_loss(start(inputs), targets).backward()
    assert start.weight.grad is not None
    torch.testing.assert_close(sum(steps) / world_size, start.weight.grad, rtol=1e-12, atol=1e-14)


class AsGiven(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.pad(inputs, (0, 2))


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_counts_each_sample_once(world_size: int) -> None:
    data = several(300)
    groups = [group_of(rank, world_size) for rank in range(world_size)]
    rows = [evaluate(AsGiven(), data, group, recipe_of(data)) for group in groups]
    loss, right = (sum(column) for column in zip(*rows, strict=True))
    padded = AsGiven()(data.inputs).tolist()
    labels = data.targets.tolist()
    assert loss == pytest.approx(sum(map(naive_loss, padded, labels)))
    expected = sum(of[row.index(max(row))] for row, of in zip(padded, labels, strict=True))
    assert right == pytest.approx(expected)


def naive_tokens(logits: Tensor, targets: Tensor) -> float:
    """The mean of -log(softmax), one token after the other, in Python's float64."""
    rows = zip(logits.flatten(0, -2).tolist(), targets.flatten().tolist(), strict=True)
    losses = [
        log(sum(exp(value - row[target]) for value in row))
        for row, target in rows
        if target != -100
    ]
    return sum(losses) / len(losses)


def tokens(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    logits = 3 * torch.randn(*shape, 7, generator=generator)
    return logits, torch.randint(7, shape, generator=generator)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_loss_is_the_mean_over_all_tokens(shape: tuple[int, ...]) -> None:
    logits, targets = tokens(*shape)
    loss = next_token_loss(logits, targets)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(naive_tokens(logits, targets), rel=1e-6)


def test_gradient_is_the_softmax_less_one_at_the_target() -> None:
    logits, targets = tokens(3, 4)
    targets[2, 0] = -100
    logits.requires_grad_()
    loss = next_token_loss(logits, targets)
    loss.backward()
    exact = logits.detach().double().softmax(-1)
    exact -= torch.nn.functional.one_hot(targets.clamp(min=0), 7)
    exact[2, 0] = 0
    assert loss.item() == pytest.approx(naive_tokens(logits.detach(), targets), rel=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact / 11, rtol=1e-5, atol=1e-8)


def test_equal_chances_cost_the_logarithm_of_their_number() -> None:
    logits, targets = torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64)
    assert next_token_loss(logits, targets).item() == pytest.approx(log(256), rel=1e-6)
    assert bits_per_byte(logits, targets).item() == pytest.approx(8, rel=1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (2, 3)])
def test_without_any_target_the_loss_is_zero_and_moves_nothing(shape: tuple[int, ...]) -> None:
    """A worker without samples in a step adds its gradients to the others'."""
    logits = torch.randn(*shape, 7, requires_grad=True)
    loss = next_token_loss(logits, torch.full(shape, -100))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()
