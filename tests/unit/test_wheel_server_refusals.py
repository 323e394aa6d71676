"""What the parameter server refuses, by the worker's name, and leaves as it was."""

from math import inf, isfinite, nan

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from halved import CASES, Case, Make, ManualWorker, batches, equal, plain, serve, values
from paceline.core.errors import NonFinite
from paceline.exchange.step import Learning
from paceline.strategies.wheel.protocol import all_finite, take_gradients
from paceline.strategies.wheel.server import ParameterServer
from refusals import refused

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
    with pytest.raises(NonFinite, match="worker 1, step 0"):
        server.update(1, 0, version, gradients)
    activations = hands[2].halves.body(batch[0]).detach()
    activations[0, 0] = value
    with pytest.raises(NonFinite, match="worker 2, step 0"):
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
    for name, parameter in (("table.weight", table.weight), ("fc.bias", layer.bias)):
        with refused("model") as caught:
            take_gradients([name], [parameter])
        assert name in str(caught.value)


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
    with refused("worker 0, step 0") as caught:
        hand.step(0, case.inputs(), case.labels())
    assert "'head.extra'" in str(caught.value)
    assert all(parameter.grad is None for parameter in server.model.parameters())


def test_what_does_not_fit_is_refused(mlp):
    case, server, (hand, *_) = mlp
    (batch,) = batches(case, 1)
    version = hand.fetch()
    gradients, _ = hand.forward(0, version, *batch)
    activations, labels = torch.zeros(4, 9, dtype=torch.float64), batch[1]
    for activated, targets, asked in [
        (activations[:, :8], labels, 0),
        (activations.float(), labels, 0),
        (activations, labels[:3], 0),
        (activations, labels + 4, 0),
        (activations, torch.ones(4, 5, dtype=torch.bool), 0),
        (activations, labels, 1),
    ]:
        with refused("worker 0, step 0"):
            server.answer(0, 0, asked, activated, targets, 1.0)
    with refused("worker 3"):
        server.may_begin(3, 0)
    with refused("worker 0, step 0"):
        server.update(0, 0, version, gradients[:-1])
    assert server.version == 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, labels: (scores.sum(1) - labels).square(),
        lambda scores, labels: 0.5,
        lambda scores, labels: labels.double().mean(),
        lambda scores, labels: scores["logits"],
    ],
)
def test_a_loss_that_is_no_scalar_of_the_outputs_is_refused_by_the_workers_name(loss):
    case = CASES["mlp"]
    server, (hand,) = serve(case, CUT, learning=Learning(loss))
    with refused("worker 0, step 0"):
        hand.step(0, case.inputs(), case.labels())
    assert server.version == 0


class Nothing(torch.optim.Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})


def nothing(model: nn.Module) -> torch.optim.Optimizer:
    return Nothing(model.parameters())


@pytest.mark.parametrize(
    ("field", "make", "options"),
    [
        ("optimizer", lambda model: torch.optim.LBFGS(model.parameters()), {}),
        ("optimizer", lambda model: torch.optim.SparseAdam(model.parameters()), {}),
        ("optimizer", lambda model: plain(model.layers[:2]), {}),
        ("optimizer", nothing, {"num_workers": 2, "updates_per_step": 2}),
        ("staleness_decay", nothing, {"staleness_decay": 1.0}),
        ("staleness_decay", plain, {"staleness_decay": -1.0}),
        ("staleness_decay", plain, {"staleness_decay": nan}),
        ("staleness", plain, {"staleness": -1}),
    ],
)
def test_optimizers_and_settings_that_cannot_be_are_refused(
    field: str, make: Make, options: dict[str, object]
):
    serve(CASES["mlp"], CUT, nothing)
    with refused(field):
        serve(CASES["mlp"], CUT, make, **options)
