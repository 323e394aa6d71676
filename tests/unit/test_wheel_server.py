"""The parameter server: plain training if driven by one worker, and what happens with several."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from halved import CASES, Case, Make, ManualWorker, batches, equal, plain, sequential, serve, values
from paceline.core.errors import StepDiscarded
from paceline.core.plan import Kind
from paceline.exchange.step import Learning
from paceline.recipes.classification import class_loss, label_loss
from paceline.strategies.wheel.server import ParameterServer
from refusals import refused

OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda model: torch.optim.SGD(
        model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3
    ),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.01),
}
CUTS = {"lenet5": "fc3", "mlp": "layers.3", "dropping": "fc1", "resnet": "classifier.2"}


@pytest.fixture
def mlp() -> tuple[Case, ParameterServer, list[ManualWorker]]:
    case = CASES["mlp"]
    return case, *serve(case, CUTS["mlp"], num_workers=3, staleness=None)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CUTS)
def test_one_worker_trains_as_if_nobody_had_cut_the_model(name: str, optimizer: str):
    """Bit for bit in float64, over 30 steps, losses and running means too."""
    case, make = CASES[name], OPTIMIZERS[optimizer]
    whole = case.model()
    torch.manual_seed(21)
    expected = sequential(whole, make(whole), batches(case, 30))
    server, (hand,) = serve(case, CUTS[name], make)
    torch.manual_seed(21)
    losses = []
    for step, batch in enumerate(batches(case, 30)):
        assert server.may_begin(0, step)
        version, loss = hand.step(step, *batch)
        assert version == step + 1
        losses.append(loss)
    assert losses == expected
    assert losses[0] != losses[-1]
    assert equal(values(server.model), values(whole))
    own = [*hand.halves.body.buffers(), *server.halves.head.buffers()]
    assert equal(own, whole.buffers())
    assert server.updates.by_worker == {"worker0": 30}
    assert server.updates.staleness["all workers"] == {0: 30}


def test_a_part_of_an_uneven_batch_counts_by_its_weight(mlp):
    """Two parts, of 3 and 1 samples, have together the gradient of the mean over 4."""
    case, server, hands = mlp
    (inputs, labels), *_ = batches(case, 1)
    parts = ((hands[0], slice(3), 3 / 4), (hands[1], slice(3, 4), 1 / 4))
    done = [
        hand.forward(0, hand.fetch(), inputs[part], labels[part], weight)
        for hand, part, weight in parts
    ]
    whole = case.model()
    loss = torch.nn.functional.cross_entropy(whole(inputs), labels)
    loss.backward()
    named = {name: p.grad for name, p in whole.named_parameters()}
    assert sum(own for _, own in done) == pytest.approx(float(loss.detach()))
    in_head = [server.workers.of(hand.worker).half.gradients for hand, *_ in parts]
    for name, one, other in zip(server.halves.head_names, *in_head, strict=True):
        torch.testing.assert_close(one + other, named[name])
    expected = torch.cat([named[name].reshape(-1) for name in server.halves.body_names])
    torch.testing.assert_close(done[0][0] + done[1][0], expected)


def test_samples_with_several_labels_are_trained_on():
    case = CASES["mlp"]
    server, (hand,) = serve(case, CUTS["mlp"], learning=Learning(label_loss))
    whole = case.model()
    inputs = case.inputs()
    labels = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0]]).bool()
    _, loss = hand.step(0, inputs, labels)
    expected = label_loss(whole(inputs), labels)
    expected.backward()
    plain(whole).step()
    assert loss == float(expected.detach())
    assert equal(values(server.model), values(whole))


def test_no_samples_ask_for_nothing(mlp):
    case, server, (hand, *_) = mlp
    before = values(server.model)
    hand.step(0, case.inputs()[:0], case.labels()[:0])
    assert equal(values(server.model), before)
    assert server.version == 1


def test_staleness_is_counted_and_slows_an_update_down():
    """The second gradient of a version is one update old: with decay 3 a quarter of it counts."""
    case = CASES["mlp"]
    server, (one, other) = serve(
        case, CUTS["mlp"], num_workers=2, staleness=None, staleness_decay=3.0
    )
    first, second = batches(case, 2)
    version = one.fetch()
    late = other.fetch()
    stale, _ = other.forward(0, late, *second)
    stale_head = server.workers.of(1).half.gradients
    server.update(0, 0, version, one.forward(0, version, *first)[0])
    before = {name: p.detach().clone() for name, p in server.model.named_parameters()}
    assert server.update(1, 0, late, stale) == 2
    for name, gradient in zip(server.halves.head_names, stale_head, strict=True):
        moved = before[name] - dict(server.model.named_parameters())[name].detach()
        torch.testing.assert_close(moved, 0.25 * gradient / 4)
    assert server.updates.staleness["all workers"] == {0: 1, 1: 1}
    assert server.updates.mean_staleness == 0.5
    assert [group["lr"] for group in server.optimizer.param_groups] == [0.25]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedules_and_clipping_are_those_of_plain_training(optimizer: str):
    """Bit for bit: the schedule is told of each update, and all gradients are clipped together."""
    case, make, clip = CASES["mlp"], OPTIMIZERS[optimizer], 0.3

    def halving(of: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(of, lambda step: 0.5 ** (step // 3))

    whole = case.model()
    plainly = make(whole)
    schedule, norms = halving(plainly), []
    for inputs, labels in batches(case, 10):
        torch.nn.functional.cross_entropy(whole(inputs), labels).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), clip)))
        plainly.step()
        plainly.zero_grad()
        schedule.step()
    server, (hand,) = serve(
        case, CUTS["mlp"], make, schedule=halving, learning=Learning(class_loss, clip_norm=clip)
    )
    for step, batch in enumerate(batches(case, 10)):
        hand.step(step, *batch)
    assert min(norms) > clip  # it was clipped, each time
    assert equal(values(server.model), values(whole))
    rates = [[group["lr"] for group in one.param_groups] for one in (server.optimizer, plainly)]
    assert rates[0] == rates[1]


def test_a_server_that_is_restored_goes_on_with_the_schedule():
    def falling(of: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(of, lambda step: 1 / (1 + step))

    case = CASES["mlp"]
    server, (hand,) = serve(case, CUTS["mlp"], schedule=falling)
    server.restore(6, server.workers.progress(), {0: 6})
    server.workers.add(0)
    hand.step(0, *next(batches(case, 1)))
    assert server.optimizer.param_groups[0]["lr"] == pytest.approx(0.25 / 8)


def test_an_update_has_its_part_of_the_learning_rate_of_a_step():
    """Four updates with the mean gradients of a quarter each are one with that of the whole."""
    case = CASES["mlp"]
    server, hands = serve(case, CUTS["mlp"], num_workers=4, staleness=None, updates_per_step=4)
    ((inputs, labels),) = batches(case, 1, size=8)
    whole = case.model()
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


def test_the_learning_rate_is_restored_even_if_an_update_fails(monkeypatch: pytest.MonkeyPatch):
    case = CASES["mlp"]
    server, hands = serve(case, CUTS["mlp"], num_workers=2, staleness=None, staleness_decay=1.0)
    first, second = batches(case, 2)
    version = hands[0].fetch()
    gradients, _ = hands[0].forward(0, version, *first)
    hands[1].step(0, *second)

    def fail() -> None:
        assert [group["lr"] for group in server.optimizer.param_groups] == [0.125]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.optimizer, "step", fail)
    with pytest.raises(RuntimeError):
        server.update(0, 0, version, gradients)
    assert [group["lr"] for group in server.optimizer.param_groups] == [0.25]
    assert all(parameter.grad is None for parameter in server.model.parameters())


def test_a_step_is_applied_once(mlp):
    case, server, (hand, other, _) = mlp
    source = list(batches(case, 3))
    version = hand.fetch()
    gradients, _ = hand.forward(0, version, *source[0])
    assert server.update(0, 0, version, gradients) == 1
    other.step(0, *source[1])
    before = values(server.model)
    assert server.update(0, 0, version, gradients) == 1
    # The whole step once more, as after a connection that was lost before the last reply.
    assert hand.step(0, *source[0])[0] == 1
    assert server.workers.of(0).half is None
    assert equal(values(server.model), before)
    assert server.updates.by_worker == {"worker0": 1, "worker1": 1, "worker2": 0}
    assert server.workers.of(0).next_step == 1
    hand.step(1, *source[2])
    with refused("worker 0"):
        server.update(0, 0, version, gradients)


def test_a_step_begun_again_replaces_what_it_had_left(mlp):
    case, server, (hand, *_) = mlp
    first, second = batches(case, 2)
    other, (lone, *_) = serve(case, CUTS["mlp"])
    hand.forward(0, hand.fetch(), *first)
    hand.step(0, *second)
    lone.step(0, *second)
    assert equal(values(server.model), values(other.model))


def test_a_backward_that_fails_leaves_no_gradients_to_the_next_one(mlp):
    case, server, (hand, *_) = mlp
    other, (lone, *_) = serve(case, CUTS["mlp"])
    (batch,) = batches(case, 1)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    handle = server.halves.head_parameters[0].register_post_accumulate_grad_hook(fail)
    version = hand.fetch()
    with pytest.raises(RuntimeError, match="out of memory"):
        hand.forward(0, version, *batch)
    handle.remove()
    hand.step(0, *batch)
    lone.step(0, *batch)
    assert equal(values(server.model), values(other.model))


def test_a_lost_workers_half_is_dropped_and_begun_again(mlp):
    case, server, (hand, *_) = mlp
    (batch,) = batches(case, 1)
    version = hand.fetch()
    gradients, _ = hand.forward(0, version, *batch)
    server.workers.drop(0)
    assert server.workers.of(0).half is None
    before = values(server.model)
    server.workers.add(0)
    with pytest.raises(StepDiscarded, match="worker 0, step 0"):
        server.update(0, 0, version, gradients)
    assert equal(values(server.model), before)
    assert server.version == 0
    assert hand.step(0, *batch)[0] == 1


def test_what_is_done_for_a_step_can_be_watched(mlp):
    case, server, (hand, *_) = mlp
    seen = []

    class Watched:
        def __init__(self, *of: object) -> None:
            self.of = of

        def __enter__(self) -> None:
            seen.append(self.of)

        def __exit__(self, *_: object) -> None:
            seen.append("end")

    server.watch = Watched
    (batch,) = batches(case, 1)
    hand.step(0, *batch)
    assert seen[::2] == [(0, 0, Kind.FORWARD), (0, 0, Kind.BACKWARD), (0, 0, Kind.STEP)]
    assert seen[1::2] == ["end"] * 3
