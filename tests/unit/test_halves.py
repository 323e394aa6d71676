"""Halves of a model compute the same bits as the model, or the cut is refused."""

from collections.abc import Callable
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halved import CASES, equal
from nets import Net
from paceline.core.cutting import Split
from paceline.rpc.tensor_parts import flatten, load_vector, views
from paceline.training.models import describe, layers_of
from paceline.training.models import paced as module_of_paced
from paceline.training.models.halves import Halves, cut
from paceline.training.models.paced import paced_halves
from refusals import refused
from ticking import Sleeping

CUTS = [(name, first) for name, case in CASES.items() for first in case.cuts]
DTYPES = (torch.float32, torch.float64)


def in_one_piece(model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(11)
    scores = model(inputs)
    scores.square().sum().backward()
    return scores, taken(model.parameters())


def in_halves(halves: Halves, model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Run forward and backward; only tensors pass from one half to the other."""
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
    """Scores, gradients and running means are equal; dropout draws the same numbers."""
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


@pytest.mark.parametrize("name", ["lenet5", "mlp", "dropping", "remembering", "resnet"])
def test_the_plan_and_the_run_cut_alike(name: str):
    """Plan and halves agree on the body's parameters and on the bytes that cross the cut."""
    case = CASES[name]
    model, example = case.model(torch.float32), case.inputs(dtype=torch.float32)
    workload, named = describe(model, example), dict(model.named_parameters())
    numbers = {layer.name: index for index, layer in enumerate(workload.layers)}
    for first in case.cuts:
        halves, parts = cut(model, example, first), Split.before(workload, numbers[first])
        names = (*halves.body_names, *halves.head_names)
        own = (*halves.body_parameters, *halves.head_parameters)
        assert sorted(names) == sorted(named)
        assert all(named[key] is parameter for key, parameter in zip(names, own, strict=True))
        planned = {p.name for layer in parts.body.layers for p in layer.parameters}
        assert set(halves.body_names) == planned
        assert parts.head.input_nbytes == 4 * len(example) * prod(halves.crossing)


def test_a_cut_changes_neither_model_nor_random_state():
    case = CASES["dropping"]
    model = case.model().eval()
    model.norm.train()

    def now() -> tuple:
        modes = [module.training for module in model.modules()]
        return modes, set(vars(model)), torch.get_rng_state().tolist()

    before, as_it_was = state(model), now()
    cut(model, case.inputs(), "fc1")
    assert equal(state(model).values(), before.values())
    assert now() == as_it_was
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


def chain(net: nn.Module, samples: Tensor) -> Tensor:
    return net.last(net.first(samples))


def connected(compute: Callable[..., Any] = chain) -> Net:
    net = Net(compute, first=nn.Linear(6, 6), last=nn.Linear(6, 3))
    net.calls = 0
    return net


def test_constants_of_the_forward_pass_do_not_become_attributes():
    """There is a constant on each side of the cut."""
    torch.manual_seed(1)
    model = connected(lambda net, x: chain(net, x - torch.tensor(0.5)) * torch.tensor(2.0))
    samples = torch.randn(4, 6)
    attributes, names = set(vars(model)), list(model.state_dict())
    halves = cut(model, samples, "last")
    assert torch.equal(halves.head(halves.body(samples)), model(samples))
    assert (set(vars(model)), list(model.state_dict())) == (attributes, names)


def skipping(net: nn.Module, samples: Tensor) -> Tensor:
    early = net.first(samples)
    return net.last(torch.relu(early)) + early[:, :3]


def branching(net: nn.Module, samples: Tensor) -> Tensor:
    hidden = net.first(samples)
    return net.last(hidden if hidden.sum() > 0 else -hidden)


def counting(net: nn.Module, samples: Tensor) -> Tensor:
    net.calls += 1
    return chain(net, samples) * net.calls


def changed(change: Callable[[Net], object]) -> Net:
    net = connected()
    change(net)
    return net


def tie(net: Net) -> None:
    net.last = nn.Linear(6, 6)
    net.last.weight = net.first.weight


UNCUT = {
    "skipping": lambda: connected(skipping),
    "input": lambda: connected(lambda net, x: chain(net, x) + x[:, :3]),
    "branching": lambda: connected(branching),
    "uncalled": lambda: connected(lambda net, x: net.first(x)),
    "detached": lambda: connected(lambda net, x: net.last(net.first(x).detach())),
    "counting": lambda: connected(counting),
    "strange": lambda: connected(lambda net, x: SimpleNamespace(scores=chain(net, x))),
    "summed": lambda: connected(lambda net, x: net.last(net.first(x).sum(0, keepdim=True))),
    "tied": lambda: changed(tie),
    "frozen": lambda: changed(lambda net: net.first.requires_grad_(False)),
}


@pytest.mark.parametrize(
    ("make", "first", "width", "field"),
    [
        *(pytest.param(make, "last", 6, "head", id=name) for name, make in UNCUT.items()),
        (connected, "first", 6, "head"),  # nothing is left for the body
        (connected, "middle", 6, "head"),  # no such layer
        (connected, "last", 7, "head"),
        (lambda: changed(lambda net: net.last.half()), "last", 6, "model"),  # two dtypes
    ],
)
def test_what_cannot_be_cut_is_refused(make: Callable[[], nn.Module], first, width, field):
    torch.manual_seed(1)
    with refused(field):
        cut(make(), torch.randn(4, width), first)


def test_vectors_that_do_not_fit_are_refused():
    case = CASES["mlp"]
    parameters = cut(case.model(), case.inputs(), "layers.3").body_parameters
    flat = flatten(parameters)
    assert equal(views(flat, parameters), parameters)
    for wrong in (flat[:-1], flat.float(), flat.view(1, -1)):
        with refused("parameters"):
            load_vector(parameters, wrong)


def test_paced_halves_have_names_and_times_of_the_real_layers(monkeypatch):
    clock, case = Sleeping(), CASES["lenet5"]
    monkeypatch.setattr(module_of_paced, "time", clock)
    model, example = case.model(torch.float32), case.inputs(dtype=torch.float32)
    parts, real = Split.before(describe(model, example), 2), cut(model, example, "fc3")
    whole, halves = paced_halves(*parts, [1, 2, 4, 8, 16], [32, 64, 128, 256, 512])
    assert halves.crossing == real.crossing
    assert set(halves.body_names) == set(real.body_names)
    assert set(halves.head_names) == set(real.head_names)
    named = dict(whole.named_parameters())
    pairs = zip(halves.body_names, halves.body_parameters, strict=True)
    assert all(named[key] is parameter for key, parameter in pairs)
    ends = [0.0]
    activations = halves.body(torch.zeros(3, 1, 32, 32))
    ends.append(clock.now)
    taken_in = activations.detach().requires_grad_()
    scores = halves.head(taken_in)
    ends.append(clock.now)
    scores.sum().backward()
    ends.append(clock.now)
    torch.autograd.backward(activations, taken_in.grad)
    ends.append(clock.now)
    assert [end - start for start, end in pairwise(ends)] == pytest.approx([3, 28, 896, 96])
    assert torch.equal(taken_in.grad, torch.zeros(3, 400))
