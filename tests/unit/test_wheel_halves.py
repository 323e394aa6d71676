"""Halves of models: they are the model, to the last bit, or the model is not cut."""

import copy
from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from halved import CASES, equal
from paceline.models import describe, layers_of
from paceline.strategies.wheel.cut import Halves, cut
from paceline.strategies.wheel.protocol import flatten, load_vector, views
from paceline.strategies.wheel.split import Split
from refusals import refused

CUTS = [(name, first) for name, case in CASES.items() for first in case.cuts]
DTYPES = (torch.float32, torch.float64)


def in_one_piece(model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(11)
    scores = model(inputs)
    scores.square().sum().backward()
    return scores, taken(model.parameters())


def in_halves(halves: Halves, model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Forward and backward, with nothing but tensors going from one half to the other."""
    torch.manual_seed(11)
    activations = halves.body(inputs)
    taken_in = activations.detach().clone().requires_grad_()
    scores = halves.head(taken_in)
    scores.square().sum().backward()
    torch.autograd.backward(activations, taken_in.grad.clone())
    return scores, taken(model.parameters())


def taken(parameters) -> list[Tensor]:
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "first"), CUTS)
def test_halves_compute_the_model_to_the_last_bit(name: str, first: str, dtype: torch.dtype):
    """Scores, gradients of all parameters, running means; dropout draws the same numbers."""
    case = CASES[name]
    model, other = case.model(dtype), case.model(dtype)
    halves = cut(model, case.inputs(dtype=dtype), first)
    for num_samples in (4, 3):  # the last batch of an epoch may be smaller
        inputs = case.inputs(num_samples, dtype)
        scores, gradients = in_halves(halves, model, inputs)
        expected, in_whole = in_one_piece(other, inputs)
        assert torch.equal(scores, expected)
        assert equal(gradients, in_whole)
    assert equal(state(model).values(), state(other).values())


@pytest.mark.parametrize("name", ["lenet5", "mlp", "dropping", "resnet"])
def test_the_plan_and_the_run_cut_alike(name: str):
    """What the plan says is in the body, and crosses the cut, is what the halves do."""
    case = CASES[name]
    model = case.model(torch.float32)
    example = case.inputs(dtype=torch.float32)
    workload = describe(model, example)
    numbers = {layer.name: index for index, layer in enumerate(workload.layers)}
    for first in case.cuts:
        halves, parts = cut(model, example, first), Split.before(workload, numbers[first])
        named = dict(model.named_parameters())
        names = (*halves.body_names, *halves.head_names)
        own = (*halves.body_parameters, *halves.head_parameters)
        assert sorted(names) == sorted(named)
        assert all(named[key] is parameter for key, parameter in zip(names, own, strict=True))
        planned = {p.name for layer in parts.body.layers for p in layer.parameters}
        assert set(halves.body_names) == planned
        assert parts.head.input_nbytes == 4 * len(example) * prod(halves.crossing)


def test_cutting_leaves_everything_as_it_was():
    case = CASES["dropping"]
    model = case.model().eval()
    model.norm.train()
    before, modes = state(model), [module.training for module in model.modules()]
    attributes = set(vars(model))
    torch.manual_seed(5)
    random = torch.get_rng_state()
    cut(model, case.inputs(), "fc1")
    assert equal(state(model).values(), before.values())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert set(vars(model)) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_halves_follow_the_mode_of_the_model():
    case = CASES["resnet"]
    model = case.model()
    halves = cut(model, case.inputs(), "classifier.2")
    model.eval()
    assert torch.equal(halves.head(halves.body(case.inputs(2))), model(case.inputs(2)))
    case = CASES["dropping"]
    model, other = case.model().eval(), case.model()
    halves = cut(model, case.inputs(), "fc1")
    model.train()
    scores, _ = in_halves(halves, model, case.inputs())
    assert torch.equal(scores, in_one_piece(other, case.inputs())[0])


def test_hooks_of_layers_run_in_the_halves():
    case = CASES["lenet5"]
    model = case.model()
    halves = cut(model, case.inputs(), "fc3")
    seen = []
    for layer in layers_of(model):
        layer.module.register_forward_pre_hook(lambda *_, name=layer.name: seen.append(name))
    halves.head(halves.body(case.inputs()))
    assert seen == ["conv1", "conv2", "fc3", "fc4", "fc5"]


def test_copies_of_halves_are_apart():
    """Each lane of a device has parameters of its own."""
    case = CASES["lenet5"]
    halves = cut(case.model(), case.inputs(), "fc3")
    other = copy.deepcopy(halves)
    load_vector(other.body_parameters, torch.zeros_like(flatten(other.body_parameters)))
    assert not flatten(other.body_parameters).any()
    assert flatten(halves.body_parameters).any()


class Centred(nn.Module):
    """A forward pass that makes a tensor of numbers, on each side of the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, samples: Tensor) -> Tensor:
        hidden = self.first(samples - torch.tensor([0.25, 0.5, 0.75, 1.0, 1.25, 1.5]))
        return self.last(hidden) * torch.tensor(2.0)


def test_tensors_that_a_forward_pass_makes_stay_out_of_the_model():
    torch.manual_seed(1)
    model, samples = Centred(), torch.randn(4, 6)
    attributes, names = set(vars(model)), list(model.state_dict())
    halves = cut(model, samples, "last")
    assert torch.equal(halves.head(halves.body(samples)), model(samples))
    assert set(vars(model)) == attributes
    assert list(model.state_dict()) == names


class Base(nn.Module):
    """Two layers, of which subclasses connect the second in ways that cannot be cut before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, samples: Tensor) -> Tensor:
        return self.last(self.first(samples))


class Skip(Base):
    def forward(self, samples: Tensor) -> Tensor:
        early = self.first(samples)
        return self.last(torch.relu(early)) + early[:, :3]


class Input(Base):
    def forward(self, samples: Tensor) -> Tensor:
        return super().forward(samples) + samples[:, :3]


class Branching(Base):
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
        return super().forward(samples) * self.calls


class Strange(Base):
    def forward(self, samples: Tensor) -> SimpleNamespace:
        return SimpleNamespace(scores=super().forward(samples))


class Summed(Base):
    def forward(self, samples: Tensor) -> Tensor:
        return self.last(self.first(samples).sum(0, keepdim=True))


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight


class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


CONNECTED = (Skip, Input, Branching, Uncalled, Detached, Counting, Strange, Summed, Tied, Frozen)


@pytest.mark.parametrize("kind", CONNECTED)
def test_what_cannot_be_cut_is_refused(kind: type[nn.Module]):
    torch.manual_seed(1)
    with refused("head"):
        cut(kind(), torch.randn(4, 6), "last")


@pytest.mark.parametrize(("first", "width"), [("first", 6), ("middle", 6), ("last", 7)])
def test_names_and_batches_that_do_not_fit_are_refused(first: str, width: int):
    """The first layer leaves nothing for the body; there is no middle one."""
    with refused("head"):
        cut(Base(), torch.randn(4, width), first)


def test_parameters_of_two_types_are_refused():
    model = Base()
    model.last.half()
    with refused("model"):
        cut(model, torch.randn(4, 6), "last")


def test_vectors_that_do_not_fit_are_refused():
    case = CASES["mlp"]
    parameters = cut(case.model(), case.inputs(), "layers.3").body_parameters
    flat = flatten(parameters)
    assert equal(views(flat, parameters), parameters)
    for wrong in (flat[:-1], flat.float(), flat.view(1, -1)):
        with refused("parameters"):
            load_vector(parameters, wrong)
