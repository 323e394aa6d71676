"""The training loop: losses, scores and evaluations, compared with naive ones."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from absent_ranks import group_of
from paceline.core.outcome import Epoch
from paceline.core.plan import Kind
from paceline.core.settings import TrainSettings
from paceline.exchange.learner import evaluate
from paceline.exchange.loop import Place, Trained, traced_steps, train
from paceline.exchange.replica import SingleReplica
from paceline.exchange.session import Progress, TrainingSession
from paceline.exchange.setup import TrainingSetup, epochs_of, share_batches
from paceline.exchange.step import shares, train_step
from paceline.links.clock import Clock
from paceline.record.recorder import Recorder
from paceline.strategies.host import STRATEGY
from paceline.strategies.host.config import HostReduce
from paceline.training.data.dataset import Dataset, TensorSamples, loader
from paceline.training.data.sampler import ShardedBatches
from paceline.training.models import describe
from paceline.training.recipes.losses import bits_per_byte, next_token_loss
from paceline.training.recipes.named import recipe_of_data
from paceline.training.recipes.recipe import Recipe, built
from refusals import refused
from ticking import Ticking

CPU = torch.device("cpu")


def samples(num: int, num_classes: int = 3, width: int = 4, dtype=torch.float32) -> TensorSamples:
    source = torch.Generator().manual_seed(num)
    inputs = torch.randn(num, width, generator=source, dtype=dtype)
    return TensorSamples(inputs, torch.randint(num_classes, (num,), generator=source))


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "world_size"), [(7, 7, 3), (21, 6, 4), (20, 11, 3), (12, 12, 1)]
)
def test_unequal_shares_give_the_gradient_of_the_whole_batch(num_samples, batch_size, world_size):
    torch.manual_seed(0)
    data = samples(num_samples, dtype=torch.float64)
    start = nn.Linear(4, 3, dtype=torch.float64)
    steps, losses, indices, sizes = [], [], [], set()
    for number in range(world_size):
        batches = ShardedBatches(num_samples, batch_size, number, world_size, seed=1)
        source = shares(batches, loader(data, batches), CPU)
        model = nn.Linear(4, 3, dtype=torch.float64)
        model.load_state_dict(start.state_dict())
        # With a learning rate of one, a step is the gradient.
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        losses.append(train_step(model, optimizer, source, Recorder(Clock(), "cpu0", number)))
        steps.append((start.weight - model.weight, start.bias - model.bias))
        mine = next(iter(batches))
        indices += mine
        sizes.add(len(mine))
    assert world_size == 1 or len(sizes) > 1  # otherwise the test shows nothing
    weight, bias = (sum(parts) / world_size for parts in zip(*steps, strict=True))
    inputs, targets = data.__getitems__(indices)
    loss = nn.functional.cross_entropy(start(inputs), targets)
    loss.backward()
    assert torch.allclose(weight, start.weight.grad, rtol=1e-12, atol=1e-14)
    assert torch.allclose(bias, start.bias.grad, rtol=1e-12, atol=1e-14)
    assert float(sum(losses) / world_size) == pytest.approx(float(loss.detach()), rel=1e-12)


def recipe_of(data: TensorSamples, num_classes: int) -> Recipe:
    return recipe_of_data(Dataset("toy", data, data, num_classes, (4,)))


@pytest.mark.parametrize("num_samples", [1, 5, 256, 257, 600])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_is_tested_exactly_once(num_samples: int, world_size: int):
    data = samples(num_samples, num_classes=4)
    rows = [
        evaluate(nn.Dropout(0.9).train(), data, group_of(number, world_size), recipe_of(data, 4))
        for number in range(world_size)
    ]
    loss, correct = (sum(column) for column in zip(*rows, strict=True))
    expected = nn.functional.cross_entropy(data.inputs, data.targets, reduction="sum")
    assert loss == pytest.approx(float(expected), rel=1e-5)
    assert correct == pytest.approx(
        sum(
            max(range(4), key=row.__getitem__) == target
            for row, target in zip(data.inputs.tolist(), data.targets.tolist(), strict=True)
        )
    )


def test_a_recipe_with_its_own_loss_may_have_several_labels_per_sample():
    inputs, labels = torch.randn(8, 4), torch.rand(8, 3) > 0.5

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(scores, labels.float())

    train = torch.utils.data.TensorDataset(inputs, labels)
    model = built(Recipe(model=lambda: nn.Linear(4, 3), train=train, loss=loss, num_classes=3), 0)
    assert model.training


@dataclass
class Watching(Progress):
    """Progress that records epochs and calls a function after each step."""

    reports: list[Epoch]
    each_step: Callable[[], None]

    def advance(self, count: int = 1) -> None:
        self.each_step()

    def epoch(self, epoch: Epoch, score: str) -> None:
        self.reports.append(epoch)


Optimize = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(rate: float) -> Optimize:
    return lambda model: torch.optim.SGD(model.parameters(), rate, momentum=0.9)


def run(
    num_steps: int,
    epochs: int,
    clock=None,
    optimizer: Optimize | None = None,
    each_step: Callable[[nn.Module, Recorder], None] = lambda model, recorder: None,
) -> Trained:
    """Train a linear model with `num_steps` batches of four samples per epoch.

    Asserts that every epoch is reported, and that the replica records once and is closed once.
    """
    data = Dataset("toy", samples(4 * num_steps), samples(10), 3, (4,))
    group, calls = group_of(), []
    progress = Watching([], lambda: each_step(model, recorder))
    torch.manual_seed(0)
    batches = share_batches(len(data.train), 4, 0, group)
    model = nn.Linear(4, 3)
    setup = TrainingSetup(
        model=model,
        workload=describe(model, torch.zeros(4, 4), "toy"),
        source=epochs_of(batches, data.train, CPU),
        epoch_steps=(len(batches),) * epochs,
        samples_per_step=4,
        optimizer=optimizer or sgd(0.01),
        learning_rate=None,
        recipe=recipe_of_data(data),
    )
    settings = TrainSettings(model="toy", strategy="host")
    session = TrainingSession(settings, STRATEGY, HostReduce(1), "run", group, progress)
    recorder = Recorder(clock or Clock(), "cpu0", 0)

    class Watched(SingleReplica):
        def record(self, other: Recorder | None) -> None:
            calls.append(other)

        def close(self) -> None:
            calls.append("close")

    outcome = train(session, setup, recorder, Watched(model))
    assert calls == [recorder, "close"]
    assert progress.reports == list(outcome.epochs)
    return outcome


@pytest.mark.parametrize(
    ("num_steps", "epochs", "first", "last", "num_measured"),
    [
        # The second half of a single epoch is traced, at least two steps, but not all.
        (5, 1, 3, 5, 1),
        (12, 1, 7, 12, 5),
        # Of several epochs the last is traced: its last 20 steps, but not its first two.
        # The steps before are measured, except the first two of each epoch.
        (5, 2, 5 + 2, 5 + 5, 3),
        (23, 2, 23 + 3, 23 + 23, 21 + 1),
        (30, 3, 60 + 10, 60 + 30, 28 + 28 + 8),
    ],
)
def test_the_traced_steps_lie_in_one_epoch_and_are_not_measured(
    num_steps, epochs, first, last, num_measured
):
    tracing, training = [], []

    def watch(model: nn.Module, recorder: Recorder) -> None:
        tracing.append(recorder.tracing)
        training.append(model.training)

    outcome = run(num_steps, epochs, Ticking(mark_s=1), each_step=watch)
    assert all(training)  # also after the test of an epoch
    assert [epoch.number for epoch in outcome.epochs] == list(range(epochs))
    assert [i for i, traced in enumerate(tracing) if traced] == list(range(first, last))
    assert len(tracing) == num_steps * epochs
    # An untraced step sets one mark, a traced one ten: no traced step is measured.
    assert outcome.step_seconds == (1,) * num_measured
    updates = [span for span in outcome.spans if span.kind is Kind.STEP]
    assert [span.name for span in updates] == [f"s{i}/step@worker0" for i in range(last - first)]
    ends = [span.end_s for span in updates]
    gaps = {later - earlier for earlier, later in pairwise(ends)}
    assert len(gaps) == 1  # no test of an epoch is between two traced steps


@pytest.mark.parametrize(
    ("epoch_steps", "first", "traced"),
    [
        ((22,) * 69, None, (68, 2)),
        ((22, 22, 4), None, (1, 2)),  # the last epoch is too short for a trace
        ((30, 30), Place(1, 12), (1, 12 + 10)),  # resumed in the only epoch left
        ((30, 30, 30), Place(1, 12), (2, 10)),
        ((30, 4), Place(0, 28), (0, 28)),  # no epoch has enough steps left
        ((30,), Place(0, 30), (0, 30)),  # only the test after the last step is left
    ],
)
def test_the_last_steps_of_the_last_long_epoch_are_traced(epoch_steps, first, traced):
    assert traced_steps(epoch_steps, first) == traced


def test_the_losses_and_the_accuracy_are_means_over_the_samples():
    # The learning rate is negligible, so every batch has the same weights.
    outcome = run(6, 2, optimizer=sgd(1e-30))
    torch.manual_seed(0)
    model, train_set, test_set = nn.Linear(4, 3), samples(24), samples(10)
    for epoch in outcome.epochs:
        for loss, data in ((epoch.train_loss, train_set), (epoch.test_loss, test_set)):
            expected = nn.functional.cross_entropy(model(data.inputs), data.targets).detach()
            assert loss == pytest.approx(float(expected), rel=1e-5)
        right = (model(test_set.inputs).argmax(1) == test_set.targets).sum()
        assert epoch.score == int(right) / 10


class LastStepDiverges(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == 6:
            self.param_groups[0]["params"][0].data.fill_(float("inf"))


@pytest.mark.parametrize(
    "optimizer", [sgd(1e38), sgd(3e38), lambda model: LastStepDiverges(model.parameters())]
)
def test_losses_that_are_not_finite_refuse_the_learning_rate(optimizer):
    with refused("learning_rate"):
        run(6, 1, optimizer=optimizer)


def test_the_loss_of_tokens_and_its_gradient_are_those_of_the_softmax_in_float64() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(3, 4, 7, generator=generator)).requires_grad_()
    targets = torch.randint(7, (3, 4), generator=generator)
    softmax = logits.detach().double().softmax(-1)
    is_target = torch.nn.functional.one_hot(targets, 7)
    targets[2, 0] = -100
    softmax[2, 0] = is_target[2, 0] = 0
    loss = next_token_loss(logits, targets)
    loss.backward()
    assert loss.item() == pytest.approx(-softmax[is_target > 0].log().mean().item(), rel=1e-6)
    exact = (softmax - is_target) / 11
    torch.testing.assert_close(logits.grad.double(), exact, rtol=1e-5, atol=1e-8)
    # 256 equal logits need eight bits.
    logits, targets = torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64)
    assert bits_per_byte(logits, targets).item() == pytest.approx(8, rel=1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (2, 3)])
def test_without_any_target_loss_and_gradients_are_zero(shape: tuple[int, ...]) -> None:
    """A worker without samples must add zero gradients to the others'."""
    logits = torch.randn(*shape, 7, requires_grad=True)
    loss = next_token_loss(logits, torch.full(shape, -100))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("model", "is_enough"),
    [
        *((nn.Linear(4, 3), True), (nn.Linear(4, 5), True), (nn.Linear(4, 2), False)),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)), False),  # no matrix of scores
    ],
)
def test_a_model_has_an_output_for_each_class(model: nn.Module, is_enough: bool) -> None:
    recipe = replace(recipe_of(samples(2), 3), model=lambda: model, name="net")
    assert recipe.score_name == "accuracy"
    with nullcontext() if is_enough else refused("model net"):
        built(recipe, 0)
