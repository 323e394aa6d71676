"""What the parameter server refuses, by the worker's name, and leaves as it was."""

from math import inf, isfinite, nan

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from halved import CASES, Case, Make, ManualWorker, batches, equal, plain, serve, values
from paceline.core.errors import InvalidInput, NonFinite
from paceline.exchange.step import Learning
from paceline.strategies.wheel.protocol import all_finite, take_gradients
from paceline.strategies.wheel.server import ParameterServer

CUT = "layers.3"


@pytest.fixture
def mlp() -> tuple[Case, ParameterServer, list[ManualWorker]]:
    case = CASES["mlp"]
    return case, *serve(case, CUT, num_workers=3, staleness=None)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_gradients_that_are_not_finite_are_refused_by_the_workers_name(mlp, value: float):
    case, server, hands = mlp
    (batch,) = batches(case, 1)
    before = values(server.model)
    version = hands[1].fetch()
    gradients, _ = hands[1].forward(0, version, *batch)
    gradients[5] = value
    with pytest.raises(NonFinite, match="worker 1, step 0: the body's gradients"):
        server.update(1, 0, version, gradients)
    activations = hands[2].halves.body(batch[0]).detach()
    activations[0, 0] = value
    with pytest.raises(NonFinite, match="worker 2, step 0: the activations are NaN"):
        server.answer(2, 0, version, activations, batch[1], 1.0)
    assert equal(values(server.model), before)
    assert server.version == 0
    assert all(parameter.grad is None for parameter in server.model.parameters())
    assert hands[1].step(0, *batch)[0] == 1


@given(
    st.lists(st.floats(width=32), max_size=8),
    st.sampled_from([torch.float32, torch.float64]),
)
@example([3e38, 3e38], torch.float32)
def test_all_finite_is_whether_each_value_is(numbers: list[float], dtype: torch.dtype):
    """Sums of float32 that overflow are no reason to refuse."""
    tensor = torch.tensor(numbers, dtype=dtype)
    assert all_finite([tensor, torch.zeros(2)]) == all(map(isfinite, numbers))


def test_sparse_and_missing_gradients_are_refused():
    table, layer = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(InvalidInput, match=r"'table.weight' has sparse gradients"):
        take_gradients(["table.weight"], [table.weight])
    with pytest.raises(InvalidInput, match=r"'fc.bias' got no gradient"):
        take_gradients(["fc.bias"], [layer.bias])


class Unused(nn.Module):
    """A head with a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)
        self.head.extra = nn.Parameter(torch.ones(2))

    def forward(self, samples: Tensor) -> Tensor:
        return self.head(self.body(samples))


def test_a_head_without_a_gradient_is_refused_by_name():
    case = Case(Unused, (6,), 3, ("head",))
    server, (hand,) = serve(case, "head")
    with pytest.raises(InvalidInput, match=r"worker 0, step 0: parameter 'head.extra' got no"):
        hand.step(0, case.inputs(), case.labels())
    assert all(parameter.grad is None for parameter in server.model.parameters())


def test_what_does_not_fit_is_refused(mlp):
    case, server, (hand, *_) = mlp
    (batch,) = batches(case, 1)
    version = hand.fetch()
    gradients, _ = hand.forward(0, version, *batch)
    activations, labels = torch.zeros(4, 9, dtype=torch.float64), batch[1]

    def refused(message: str, given: Tensor = activations, of: Tensor = labels, version: int = 0):
        with pytest.raises(InvalidInput, match=message):
            server.answer(0, 0, version, given, of, 1.0)

    refused("of shape \\(8,\\) a sample", activations[:, :8])
    refused("activations torch.float32", activations.float())
    refused("targets of 3 samples with weight 1.0, and activations of 4", of=labels[:3])
    fails = "worker 0, step 0: loss of the recipe: fails on outputs float64 4x4 and targets"
    refused(f"{fails} int64 4: IndexError", of=labels + 4)
    refused(f"{fails} bool 4x5: RuntimeError", of=torch.ones(4, 5, dtype=torch.bool))
    refused("parameters of version 1; the server has made 0", version=1)
    with pytest.raises(InvalidInput, match="worker 3: there are 3, numbered from 0"):
        server.may_begin(3, 0)
    with pytest.raises(InvalidInput, match="worker 0, step 0: a tensor of 116 values"):
        server.update(0, 0, version, gradients[:-1])
    assert server.version == 0


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda scores, labels: (scores.sum(1) - labels).square(),
            "is float64 4; it must be",
        ),
        (lambda scores, labels: 0.5, "loss of the recipe: is float; it must be a scalar"),
        (
            lambda scores, labels: labels.double().mean(),
            "recipe: does not depend on",
        ),
        (lambda scores, labels: scores["logits"], "fails on outputs float64 4x4 .*: IndexError"),
    ],
)
def test_a_loss_that_is_no_scalar_of_the_outputs_is_refused_by_the_workers_name(loss, message):
    case = CASES["mlp"]
    server, (hand,) = serve(case, CUT, learning=Learning(loss))
    with pytest.raises(InvalidInput, match=f"worker 0, step 0: .*{message}"):
        hand.step(0, case.inputs(), case.labels())
    assert server.version == 0


class Nothing(torch.optim.Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})


def test_an_optimizer_without_a_rate_has_none_to_divide_by_the_updates_of_a_step():
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Nothing(model.parameters())

    serve(CASES["mlp"], CUT, make)
    with pytest.raises(InvalidInput, match=r"Nothing has no learning rate .* 2 updates of a step"):
        serve(CASES["mlp"], CUT, make, num_workers=2, updates_per_step=2)


@pytest.mark.parametrize(
    ("make", "decay", "message"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), 0.0, "LBFGS cannot be used"),
        (lambda model: torch.optim.SparseAdam(model.parameters()), 0.0, "SparseAdam cannot"),
        (lambda model: plain(model.layers[:2]), 0.0, "does not have parameter 'layers.3.weight'"),
        (lambda model: Nothing(model.parameters()), 1.0, "has no learning rate"),
        (plain, -1.0, "staleness_decay: -1.0"),
        (plain, nan, "staleness_decay: nan"),
    ],
)
def test_optimizers_that_cannot_update_all_are_refused(make: Make, decay: float, message: str):
    with pytest.raises(InvalidInput, match=message):
        serve(CASES["mlp"], CUT, make, staleness_decay=decay)
