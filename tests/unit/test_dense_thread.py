"""Small batches of plain networks in C++, compared with torch's steps."""

import copy
from collections.abc import Callable
from math import isnan, nan

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hogbatch_replicas import classifying, on_threads
from paceline.exchange.step import Learning
from paceline.native import Activation, DenseChain
from paceline.strategies.hogbatch.dense_thread import MOST_SAMPLES, DenseThread
from paceline.strategies.hogbatch.replica import tensors_of
from paceline.training.data.dataset import TensorSamples
from paceline.training.models.networks import MLP, SigmoidMLP
from paceline.training.recipes.losses import class_loss
from paceline.training.recipes.optimizers import optimizer_of
from refusals import refused

WIDTHS = (37, 50, 33, 5)  # no multiples of the SIMD width
NETWORKS = {"rectifiers": lambda: MLP(WIDTHS), "sigmoids": lambda: SigmoidMLP(WIDTHS)}


def samples(num: int = 300) -> TensorSamples:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, 37, generator=generator)
    return TensorSamples(inputs, torch.randint(5, (num,), generator=generator))


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return NETWORKS[name]().train()


def thread_of(
    model: nn.Module,
    learning: Learning = Learning(class_loss),  # noqa: B008 - a frozen record
    *,
    data: TensorSamples | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options,
) -> DenseThread | None:
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = optimizer or torch.optim.SGD(trained, **{"lr": 0.1, **options})
    return DenseThread.of(model, data or samples(), optimizer, learning)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", [1, 3, 14])
def test_steps_are_those_of_torch_in_float64(network: str, momentum: float, size: int):
    data, expected = samples(), built(network).double()
    model = built(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum)
    thread = thread_of(model, data=data, optimizer=optimizer)
    assert thread is not None
    of_torch = torch.optim.SGD(expected.parameters(), 0.1, momentum)
    for number in range(8):
        rows = torch.arange(number, number + size)
        for one in (optimizer, of_torch):
            one.param_groups[0]["lr"] = 0.05 * (1 + number % 3)
        loss = thread.forward(rows)
        thread.backward()
        thread.step()
        inputs, targets = data.__getitems__(rows)
        other = cross_entropy(expected(inputs.double()), targets)
        of_torch.zero_grad()
        other.backward()
        of_torch.step()
        assert loss == pytest.approx(float(other.detach()), rel=1e-5)
    for own, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.double(), right, rtol=1e-4, atol=1e-6)


def test_small_and_large_batches_share_the_momentum():
    """Steps in C++ and in torch alternate, also after loading the optimizer's state."""
    data, rows = samples(), [torch.arange(n) for n in (2, 280, 5, 280, 1, 280)]
    recipe = classifying(lambda: built("rectifiers"), (data.inputs, data.targets))
    make, expected = optimizer_of("sgd", 0.1, 0.9), built("rectifiers")
    of_torch = make(expected.parameters())
    with on_threads(recipe, make) as (replica, shared):
        for number, own in enumerate(rows):
            if number == 3:
                (optimizer,) = replica.optimizers
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            replica.train(own, 1.0, None)
            inputs, targets = data.__getitems__(own)
            of_torch.zero_grad()
            cross_entropy(expected(inputs), targets).backward()
            of_torch.step()
        for name, tensor in tensors_of(expected).items():
            torch.testing.assert_close(shared[name], tensor.detach(), rtol=1e-4, atol=1e-6)


class Doubled(nn.Sequential):
    """A module that looks like a chain, but is not."""

    def forward(self, inputs):
        return 2 * super().forward(inputs)


def changed(change: Callable[[MLP], object]) -> Callable[[], MLP]:
    def make() -> MLP:
        model = MLP(WIDTHS)
        change(model)
        return model

    return make


def double(*args):
    return 2 * args[-1]


def tie(model: MLP) -> None:
    model.layers[3] = nn.Linear(50, 50)
    model.layers[5] = nn.Linear(50, 50)
    model.layers[5].weight = model.layers[3].weight


def replace_forward(model: MLP) -> None:
    model.layers[1].forward = lambda inputs: inputs[:, :1].expand(-1, 50)


def around(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(37, 9), *layers, nn.Linear(9, 5))


OTHERS = {
    "own forward": lambda: Doubled(nn.Linear(37, 5)),
    "dropout": around(nn.Dropout(0.5)),
    "norm": around(nn.BatchNorm1d(9)),
    "twice": around(nn.ReLU(), nn.ReLU()),
    "float64": lambda: MLP(WIDTHS).double(),
    "other inputs": lambda: MLP((38, 5)),
    "hook": changed(lambda one: next(one.modules()).register_forward_hook(double)),
    "gradient hook": changed(lambda one: next(one.parameters()).register_hook(double)),
    "replaced forward": changed(replace_forward),
    "frozen": changed(lambda one: next(one.parameters()).requires_grad_(False)),
    "tied": changed(tie),
    "weight norm": changed(lambda one: nn.utils.parametrizations.weight_norm(one.layers[1])),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_torch_trains_any_other_network(make):
    assert thread_of(make().train()) is None


def test_images_need_a_network_that_flattens_them():
    data = samples()
    images = TensorSamples(data.inputs.reshape(-1, 1, 37), data.targets)
    assert thread_of(MLP(WIDTHS), data=images) is not None
    assert thread_of(nn.Sequential(nn.Linear(37, 5)), data=images) is None


@pytest.mark.parametrize(
    ("learning", "options"),
    [
        (Learning(lambda outputs, targets: class_loss(outputs, targets)), {}),
        (Learning(class_loss, bfloat16=True), {}),
        (Learning(class_loss, clip_norm=1.0), {}),
        (Learning(class_loss), {"weight_decay": 0.1}),
        (Learning(class_loss), {"momentum": 0.9, "nesterov": True}),
        (Learning(class_loss), {"momentum": 0.9, "dampening": 0.5}),
    ],
)
def test_torch_trains_with_any_other_loss_or_option(learning: Learning, options: dict):
    assert thread_of(built("rectifiers")) is not None
    assert thread_of(built("rectifiers"), learning, **options) is None


def test_torch_trains_with_hooks_schedulers_and_other_optimizers():
    model = built("rectifiers")
    hooked_one = torch.optim.SGD(model.parameters(), 0.1)
    hooked_one.register_step_post_hook(lambda *of_step: None)
    scheduled = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.ConstantLR(scheduled)  # replaces the method `step`
    two_rates = torch.optim.SGD([{"params": [one]} for one in model.parameters()], 0.1)
    adam = torch.optim.Adam(model.parameters(), 0.1)
    for optimizer in (hooked_one, scheduled, two_rates, adam):
        assert thread_of(model, optimizer=optimizer) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *of_module: None)
    try:  # a global hook
        assert thread_of(model) is None
    finally:
        handle.remove()


def test_bad_samples_and_infinite_losses_are_left_to_torch():
    model = built("rectifiers")
    thread, before = thread_of(model), copy.deepcopy(model.state_dict())
    assert thread is not None
    data = thread._samples
    data.inputs[3, 7], data.targets[4], data.targets[5] = nan, -1, 5
    assert all(isnan(thread.forward(torch.tensor([0, row]))) for row in (3, 4, 5))
    assert all(isnan(thread.forward(torch.tensor([row]))) for row in (300, -1))
    assert isnan(thread.forward(torch.arange(MOST_SAMPLES + 1)))
    with torch.no_grad():
        next(model.parameters())[0] = torch.inf
    assert isnan(thread.forward(torch.tensor([0])))
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in list(before)[1:])


def test_a_class_out_of_range_is_refused():
    data = samples()
    data.targets[0] = 7
    recipe = classifying(lambda: MLP(WIDTHS), (data.inputs, data.targets))
    threads = on_threads(recipe, optimizer_of("sgd", 0.1, 0.0))
    with threads as (replica, _), refused("loss of classifier"):
        replica.train(torch.arange(2), 1.0, None)


def test_wider_networks_have_smaller_limits_of_samples():
    widths = {(37, 5): 256, (37, 512, 512, 5): 7, (37, 1024, 1024, 5): 4}
    assert {one: thread_of(MLP(one)).most_samples for one in widths} == widths


def layer_of(outputs: int, inputs: int, bias: int | None = None) -> tuple:
    own = None if bias is None else torch.zeros(bias)
    return torch.zeros(outputs, inputs), own, None, None, Activation.RELU


@pytest.mark.parametrize(
    "layers",
    [[], [layer_of(5, 36)], [layer_of(5, 37, bias=4)], [layer_of(6, 37), layer_of(5, 7)]],
)
def test_memory_that_does_not_fit_is_refused(layers):
    data = samples()
    with pytest.raises(ValueError, match=r"match|as many|at least one"):
        DenseChain(layers, data.inputs, data.targets)
