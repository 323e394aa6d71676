"""Models that cannot be cut are refused, and the message says which connection is in the way."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from halved import CASES, equal
from paceline.core.errors import InvalidInput
from paceline.strategies.wheel.cut import cut
from paceline.strategies.wheel.protocol import flatten, load_vector, views


class Base(nn.Module):
    """Two layers; `hidden` is what a subclass makes of the first one's result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, samples: Tensor) -> Tensor:
        return self.last(self.first(samples))


class Skip(Base):
    def forward(self, samples: Tensor) -> Tensor:
        early = self.first(samples)
        late = torch.relu(early)
        return self.last(late) + early[:, :3]


class Input(Base):
    def forward(self, samples: Tensor) -> Tensor:
        return self.last(self.first(samples)) + samples[:, :3]


class ChildServer(Base):
    def forward(self, samples: Tensor) -> Tensor:
        hidden = self.first(samples)
        return self.last(hidden if hidden.sum() > 0 else -hidden)


class Uncalled(Base):
    def forward(self, samples: Tensor) -> Tensor:
        return self.first(samples)


class Detached(Base):
    def forward(self, samples: Tensor) -> Tensor:
        return self.last(self.first(samples).detach())


class Counting(Base):
    calls = 0

    def forward(self, samples: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(samples)) * self.calls


class Strange(Base):
    def forward(self, samples: Tensor) -> SimpleNamespace:
        return SimpleNamespace(scores=self.last(self.first(samples)))


class Summed(Base):
    def forward(self, samples: Tensor) -> Tensor:
        return self.last(self.first(samples).sum(0, keepdim=True))


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight


class Mixed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last.half()


class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Skip, r"2 values .* results of relu\(\) of 'first', 'first', and one can cross"),
        (Input, "the model's input is used behind the cut, too"),
        (ChildServer, "cannot be traced: TraceError"),
        (Uncalled, "never calls that layer"),
        (Detached, "does not depend on the body's parameters"),
        (Counting, "computes something else than in one piece"),
        (Strange, "cannot be traced: NotImplementedError"),
        (Summed, r"hands on shape \(1, 6\) of 4 samples"),
        (Tied, "'first.weight' is used on both sides of the cut, .* with an untied embedding"),
        (Mixed, "'last.weight' of Mixed is torch.float16"),
        (Frozen, "nothing before it is trained"),
    ],
)
def test_what_cannot_be_cut_is_refused_and_says_why(kind: type[nn.Module], message: str):
    torch.manual_seed(1)
    with pytest.raises(InvalidInput, match=message) as refused:
        cut(kind(), torch.randn(4, 6), "last")
    assert "\n" not in str(refused.value)


def test_names_that_leave_no_body_or_are_none_are_refused():
    with pytest.raises(InvalidInput, match="leaves nothing for the body"):
        cut(Base(), torch.randn(4, 6), "first")
    with pytest.raises(InvalidInput, match=r"no layer 'middle'; choose one of \['first', 'last'\]"):
        cut(Base(), torch.randn(4, 6), "middle")


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(InvalidInput, match=r"cannot run on a batch of shape \(4, 7\)"):
        cut(Base(), torch.randn(4, 7), "last")


def test_vectors_that_do_not_fit_are_refused():
    case = CASES["mlp"]
    parameters = cut(case.model(), case.inputs(), "layers.3").body_parameters
    flat = flatten(parameters)
    assert equal(views(flat, parameters), parameters)
    for wrong in (flat[:-1], flat.float(), flat.view(1, -1)):
        with pytest.raises(InvalidInput, match="117 values of float64 belong"):
            load_vector(parameters, wrong)
