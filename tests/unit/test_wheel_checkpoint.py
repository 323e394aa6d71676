"""Checkpoints of a parameter server: a resumed run equals the uninterrupted one."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from halved import CASES, Case, Make, ManualWorker, batches, equal, serve
from paceline.core.outcome import Epoch
from paceline.exchange.checkpoints import State
from paceline.strategies.wheel.checkpoint import load, state_of
from paceline.strategies.wheel.server import ParameterServer
from paceline.training.models.networks import MLP
from refusals import refused

OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.01, amsgrad=True),
}
LAYOUT = '{"settings": {"batch_size": 32}}'


def pair(
    case: Case = CASES["mlp"],
    first: str = "layers.3",
    make: Make = OPTIMIZERS["momentum"],
) -> tuple[ParameterServer, list[ManualWorker]]:
    schedule = partial(CosineAnnealingWarmRestarts, T_0=7)
    return serve(case, first, make, 2, schedule, staleness=None)


def mlp(**options) -> ParameterServer:
    return pair(**options)[0]


def train(server: ParameterServer, hands: list[ManualWorker], case: Case, steps: range) -> None:
    """Train with two workers in turn; the second's gradients are one update old."""
    source = list(batches(case, 2 * steps.stop))
    for step in steps:
        versions = [hand.fetch() for hand in hands]
        for hand, version in zip(hands, versions, strict=True):
            gradients, _ = hand.forward(step, version, *source[2 * step + hand.worker])
            server.update(hand.worker, step, version, gradients)


def state(server: ParameterServer) -> list[Tensor]:
    return [value.clone() for value in server.model.state_dict().values()]


def saved(server: ParameterServer, epochs: tuple[Epoch, ...] = ()) -> State:
    """Return a copy of the state, which further training does not change."""
    state = state_of(server, LAYOUT, epochs)
    return State({name: one.clone() for name, one in state.tensors.items()}, state.parts)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "first"), [("mlp", "layers.3"), ("dropping", "norm")])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    name: str, first: str, optimizer: str
):
    """Parameters, running means, optimizer, schedule and dropout's random numbers."""
    case, make = CASES[name], OPTIMIZERS[optimizer]
    (whole, own), (before, lost), (after, again) = (pair(case, first, make) for _ in range(3))
    torch.manual_seed(8)
    train(whole, own, case, range(10))
    torch.manual_seed(8)
    train(before, lost, case, range(5))
    kept = saved(before)
    torch.manual_seed(99)
    assert (load(kept, after, LAYOUT).version, after.version) == (10, 10)
    train(after, again, case, range(5, 10))
    assert equal(state(after), state(whole))
    assert after.updates == whole.updates
    assert after.updates.staleness["all workers"] == {0: 10, 1: 10}
    assert after.updates.by_worker == {"worker0": 10, "worker1": 10}


def test_a_resumed_server_has_completed_steps_and_the_epochs_of_all_workers():
    epochs = tuple(Epoch(number, 0.5, float("nan"), 0.9, 1.0) for number in (1, 2))
    (server, hands), after, case = pair(), mlp(), CASES["mlp"]
    hands[1].forward(0, hands[1].fetch(), case.inputs(), case.labels())
    for worker, num_steps in ((0, 7), (1, 5)):
        server.workers.of(worker).complete(num_steps)
    progress = load(saved(server, epochs), after, LAYOUT)
    assert repr(progress.epochs_over(steps_per_epoch=4)) == repr([*epochs[:1]])
    assert after.workers.next_steps == [7, 5]
    assert after.workers.of(1).half is None
    assert not after.workers.live


@pytest.mark.parametrize(
    ("build", "layout"),
    [
        (mlp, '{"settings": {"batch_size": 64}}'),
        (lambda: mlp(make=OPTIMIZERS["adam"]), LAYOUT),
        (lambda: mlp(case=CASES["mlp"]._replace(build=lambda: MLP([12, 9, 7, 4]))), LAYOUT),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    build: Callable[[], ParameterServer], layout: str
):
    kept, server = saved(mlp()), build()
    before = state(server)
    with refused("resume"):
        load(kept, server, layout)
    assert equal(state(server), before)
    assert server.version == 0


@pytest.mark.parametrize("change", [{"version": "many"}, {"other": 1}, {"workers": [3, 4]}])
def test_invalid_progress_is_refused(change: dict[str, object]):
    kept = saved(mlp())
    kept.parts["server"] |= change
    with refused("resume") as caught:
        load(kept, mlp(), LAYOUT)
    assert f"server.json: {next(iter(change))}" in str(caught.value)
    fewer = saved(mlp())
    fewer.parts["server"]["workers"].pop()
    with refused("resume"):
        load(fewer, mlp(), LAYOUT)
    with refused("resume"):
        load(State({}, {"progress": {"strategy": "host"}}), mlp(), LAYOUT)
