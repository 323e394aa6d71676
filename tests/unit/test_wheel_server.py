"""Parameter server with one worker, which equals plain training, and with several."""

from math import isfinite, nan

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from halved import CASES, Make, ManualWorker, batches, equal, plain, serve, values
from paceline.core.errors import NonFinite, StepDiscarded
from paceline.exchange.step import Learning
from paceline.rpc.value_checks import all_finite
from paceline.strategies.wheel.protocol import take_gradients
from paceline.strategies.wheel.server import ParameterServer
from paceline.training.recipes.losses import class_loss
from refusals import refused

CASE, CUT = CASES["mlp"], "layers.3"
(BATCH,) = batches(CASE, 1)
CUTS = [("lenet5", "fc3"), ("mlp", CUT), ("mlp", "loss"), ("dropping", "fc1")]
RESNET = ("resnet", "classifier.2")


@pytest.fixture
def mlp() -> tuple[ParameterServer, list[ManualWorker]]:
    return serve(CASE, CUT, num_workers=3, staleness=None)


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5 ** (step // 3))


@pytest.mark.parametrize(
    ("name", "first", "clip"),
    [*((*one, None) for one in (*CUTS, RESNET)), ("mlp", CUT, 0.3), (*RESNET, 0.3)],
)
def test_one_worker_trains_as_if_nobody_had_cut_the_model(name, first, clip):
    """Bit for bit in float64, including losses and running means.

    With `clip`, gradients of both halves are clipped together, and a schedule follows updates.
    """
    case, num_steps = CASES[name], 10 if clip else 30
    whole = case.model()
    plainly, expected, norms = decaying(whole), [], []
    schedule = halving(plainly) if clip else None
    torch.manual_seed(21)
    for inputs, labels in batches(case, num_steps):
        loss = class_loss(whole(inputs), labels)
        loss.backward()
        expected.append(float(loss.detach()))
        norms.append(float(clip_grad_norm_(whole.parameters(), clip or torch.inf)))
        plainly.step()
        plainly.zero_grad()
        if schedule:
            schedule.step()
    learning = Learning(class_loss, clip_norm=clip)
    server, (hand,) = serve(
        *(case, first, decaying), schedule=halving if clip else None, learning=learning
    )
    torch.manual_seed(21)
    losses = []
    for step, batch in enumerate(batches(case, num_steps)):
        assert server.may_begin(0, step)
        version, loss = hand.step(step, *batch)
        assert version == step + 1
        losses.append(loss)
    assert losses == expected
    assert losses[0] != losses[-1]
    assert clip is None or max(norms) > clip  # something was clipped
    assert equal(values(server.model), values(whole))
    own = [*hand.halves.body.buffers(), *server.halves.head.buffers()]
    assert equal(own, whole.buffers())
    rates = [[group["lr"] for group in one.param_groups] for one in (server.optimizer, plainly)]
    assert rates[0] == rates[1]
    assert server.updates.by_worker == {"worker0": num_steps}
    assert server.updates.staleness["all workers"] == {0: num_steps}


def test_a_batch_without_samples_changes_no_parameter(mlp):
    server, (hand, *_) = mlp
    before = values(server.model)
    hand.step(0, CASE.inputs()[:0], CASE.labels()[:0])
    assert equal(values(server.model), before)
    assert server.version == 1


def test_staleness_is_counted_and_makes_an_update_smaller():
    """The second gradient is one update old: with decay 3, the server applies a quarter of it."""
    server, (one, other) = serve(CASE, CUT, num_workers=2, staleness=None, staleness_decay=3.0)
    first, second = batches(CASE, 2)
    version = one.fetch()
    late = other.fetch()
    stale, _ = other.forward(0, late, *second)
    stale_head = server.workers.of(1).half.gradients
    server.update(0, 0, version, one.forward(0, version, *first)[0])
    before = {name: p.detach().clone() for name, p in server.model.named_parameters()}
    server.update(1, 0, late, stale)
    assert server.version == 2
    for name, gradient in zip(server.halves.head_names, stale_head, strict=True):
        moved = before[name] - dict(server.model.named_parameters())[name].detach()
        torch.testing.assert_close(moved, 0.25 * gradient / 4)
    assert server.updates.staleness["all workers"] == {0: 1, 1: 1}
    assert server.updates.mean_staleness == 0.5
    assert [group["lr"] for group in server.optimizer.param_groups] == [0.25]


def test_updates_of_a_step_share_its_learning_rate():
    """Four updates by quarters of a batch equal one update by the whole batch."""
    server, hands = serve(CASE, CUT, num_workers=4, staleness=None, updates_per_step=4)
    ((inputs, labels),) = batches(CASE, 1, size=8)
    whole = CASE.model()
    torch.nn.functional.cross_entropy(whole(inputs), labels).backward()
    plain(whole).step()
    done = []
    for hand in hands:
        rows = slice(2 * hand.worker, 2 * hand.worker + 2)
        done.append(hand.forward(0, hand.fetch(), inputs[rows], labels[rows])[0])
    for hand, gradients in zip(hands, done, strict=True):
        server.update(hand.worker, 0, 0, gradients)
    for one, other in zip(values(server.model), values(whole), strict=True):
        torch.testing.assert_close(one, other)
    assert server.optimizer.param_groups[0]["lr"] == 0.25


def test_the_half_done_step_of_a_lost_worker_is_dropped_and_repeated(mlp):
    server, (hand, *_) = mlp
    version = hand.fetch()
    gradients, _ = hand.forward(0, version, *BATCH)
    server.workers.drop(0)
    assert server.workers.of(0).half is None
    before = values(server.model)
    server.workers.add(0)
    with pytest.raises(StepDiscarded, match="worker 0, step 0"):
        server.update(0, 0, version, gradients)
    assert equal(values(server.model), before)
    assert server.version == 0
    assert hand.step(0, *BATCH)[0] == 1
    # Nothing is left of the gradients of the dropped step.
    other, (lone,) = serve(CASE, CUT)
    lone.step(0, *BATCH)
    assert equal(values(server.model), values(other.model))


def test_values_that_are_not_finite_are_refused_with_worker_and_step(mlp):
    server, hands = mlp
    before = values(server.model)
    version = hands[1].fetch()
    gradients, _ = hands[1].forward(0, version, *BATCH)
    gradients[5] = nan
    with pytest.raises(NonFinite, match="worker 1, step 0"):
        server.update(1, 0, version, gradients)
    activations = hands[2].halves.body(BATCH[0]).detach()
    activations[0, 0] = nan
    with pytest.raises(NonFinite, match="worker 2, step 0"):
        server.answer(2, 0, version, activations, BATCH[1], 1.0)
    assert equal(values(server.model), before)
    assert server.version == 0
    assert all(parameter.grad is None for parameter in server.model.parameters())
    assert hands[1].step(0, *BATCH)[0] == 1


@given(st.lists(st.floats(width=32), max_size=8), st.sampled_from([torch.float32, torch.float64]))
@example([3e38, 3e38], torch.float32)
def test_all_finite_is_true_if_each_value_is_finite(numbers: list[float], dtype: torch.dtype):
    """Finite values pass even if their float32 sum overflows."""
    tensor = torch.tensor(numbers, dtype=dtype)
    assert all_finite([tensor, torch.zeros(2)]) == all(map(isfinite, numbers))


def test_sparse_and_missing_gradients_are_refused():
    table, layer = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2)
    table(torch.tensor([1, 2])).sum().backward()
    for name, parameter in (("table.weight", table.weight), ("fc.bias", layer.bias)):
        with refused("model") as caught:
            take_gradients([name], [parameter])
        assert name in str(caught.value)


def test_what_does_not_fit_is_refused(mlp):
    server, (hand, *_) = mlp
    version = hand.fetch()
    gradients, _ = hand.forward(0, version, *BATCH)
    activations, labels = torch.zeros(4, 9, dtype=torch.float64), BATCH[1]
    for activated, targets in [
        (activations[:, :8], labels),
        (activations.float(), labels),
        (activations, labels[:3]),
        (activations, labels + 4),
        (activations, torch.ones(4, 5, dtype=torch.bool)),
    ]:
        with refused("worker 0, step 0"):
            server.answer(0, 0, 0, activated, targets, 1.0)
    with refused("worker 0, step 0"):
        server.update(0, 0, version, gradients[:-1])
    assert server.version == 0


def test_a_loss_without_a_gradient_is_refused_with_worker_and_step():
    server, (hand,) = serve(CASE, CUT, learning=Learning(lambda scores, labels: 0.5))
    with refused("worker 0, step 0"):
        hand.step(0, *BATCH)
    assert server.version == 0


class Nothing(torch.optim.Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})


@pytest.mark.parametrize(
    ("field", "make", "options"),
    [
        ("optimizer", lambda model: torch.optim.LBFGS(model.parameters()), {}),
        ("optimizer", lambda model: torch.optim.SparseAdam(model.parameters()), {}),
        ("optimizer", lambda model: plain(model.layers[:2]), {}),
        ("optimizer", Nothing, {"num_workers": 2, "updates_per_step": 2}),
        ("staleness_decay", Nothing, {"staleness_decay": 1.0}),
    ],
)
def test_unsupported_optimizers_and_settings_are_refused(
    field: str, make: Make, options: dict[str, object]
):
    serve(CASE, CUT, Nothing)
    with refused(field):
        serve(CASE, CUT, make, **options)
