"""`describe`: layers, their outputs, the order of gradients, unchanged models, and refusals."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nets import Net
from paceline.training.models import describe, layers_of
from paceline.training.models.inception import InceptionBlock
from refusals import refused


def parallel() -> nn.Module:
    """A long branch and a short one on one stem; the branch registered first runs last."""

    def compute(net: nn.Module, x: Tensor) -> Tensor:
        x = net.stem(x)
        return net.long(x) * net.short(x)

    long = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return Net(compute, short=nn.Linear(4, 3), long=long, stem=nn.Linear(2, 4))


def recomputed() -> nn.Module:
    """One layer runs inside and outside re-entrant checkpointing, so it gets two gradients."""

    def compute(net: nn.Module, x: Tensor) -> Tensor:
        return net.twice(net.once(checkpoint(net.twice, net.stem(x), use_reentrant=True)))

    return Net(compute, **{name: nn.Linear(4, 4) for name in ("stem", "twice", "once")})


def around() -> nn.Module:
    """A module that uses one parameter before its child and one after it."""
    scale, shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    return Net(
        lambda net, x: net.inner(x * net.scale) + net.shift,
        scale=scale,
        inner=nn.Linear(4, 4),
        shift=shift,
    )


def tied() -> nn.Module:
    """A decoder that shares the embedding's weight and has its own bias."""
    parts = {"embed": nn.Embedding(7, 4), "inner": nn.Linear(4, 4), "decode": nn.Linear(4, 7)}
    parts["decode"].weight = parts["embed"].weight
    return Net(lambda net, x: net.decode(net.inner(net.embed(x))), **parts)


def last_step() -> nn.Module:
    parts = {"lstm": nn.LSTM(4, 3, batch_first=True), "head": nn.Linear(3, 2)}
    return Net(lambda net, x: net.head(net.lstm(x)[0][:, -1]), **parts)


def partial() -> nn.Module:
    """A frozen stem, a layer that runs without a gradient, and one that never runs."""

    def compute(net: nn.Module, x: Tensor) -> Tensor:
        scores = net.head(net.stem(x))
        net.watch(scores.detach())
        return scores

    stem, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)
    return Net(compute, stem=stem, head=head, unused=nn.Linear(4, 9), watch=nn.Linear(3, 1))


def named() -> nn.Module:
    """Two inputs, and a dictionary with a nested tuple and an integer tensor as output."""

    def compute(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"scores": net.a(x), "more": (net.b(y), torch.arange(3)), "none": None}

    return Net(compute, a=nn.Linear(4, 3), b=nn.Linear(2, 5))


def real_backward_order(model: nn.Module, batch: Tensor) -> list[str]:
    """Return the layers in the order of their last gradients in a real backward pass."""
    order: list[str] = []
    for layer in layers_of(model):
        for _, parameter in layer.parameters:
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=layer.name: order.append(name)
            )
    model(batch).sum().backward()
    return list(dict.fromkeys(reversed(order)))[::-1]


ORDERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str] | None]] = {
    "parallel": (parallel, (5, 2), ["stem", "long.0", "long.2", "short"]),
    "recomputed": (recomputed, (3, 4), ["stem", "twice", "once"]),
    "around": (around, (2, 4), ["(root)", "inner"]),
    "tied": (tied, (2, 5), ["embed", "inner", "decode"]),
    "inception": (lambda: InceptionBlock(16, (4, 3, 5, 2, 6, 3)), (2, 16, 6, 6), None),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        *((2, 5, 8), None),
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_layers_are_in_forward_order_and_gradients_in_backward_order(case: str) -> None:
    build, shape, names = ORDERS[case]
    model = build()
    batch = torch.zeros(shape, dtype=torch.long) if case == "tied" else torch.randn(shape)
    workload = describe(model, batch)
    assert names is None or [one.name for one in workload.layers] == names
    assert [one.name for one in workload.in_backward_order] == real_backward_order(model, batch)
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())


def test_parameters_are_in_the_order_of_their_gradients() -> None:
    def parameters(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
        first = describe(model, torch.zeros(2, 4)).layers[0]
        return [(one.name, one.shape) for one in first.parameters]

    model, order = nn.Linear(4, 3), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: order.append((n, p.shape)))
    model(torch.ones(2, 4)).sum().backward()
    assert parameters(model) == order
    assert parameters(around()) == [("shift", (4,)), ("scale", (4,))]
    model.weight.requires_grad_(False)
    assert parameters(model) == [("bias", (3,))]


@pytest.mark.parametrize(
    ("model", "batch", "values"),
    [
        # Both branches read the stem's output; the product reads the output of each branch.
        (parallel(), torch.zeros(5, 2), [5 * 4, 5 * 6, 5 * 3, 5 * 3]),
        (last_step(), torch.zeros(2, 5, 4), [2 * 3, 2 * 2]),  # only the part that is read
        (named(), (torch.zeros(6, 4), torch.zeros(6, 2)), [6 * 3, 6 * 5 + 3 * 2]),
    ],
    ids=["parallel", "last step", "named"],
)
def test_activations_are_read_by_others(model: nn.Module, batch: Any, values: list[int]) -> None:
    workload = describe(model, batch)
    assert [layer.activation_nbytes for layer in workload.layers] == [4 * one for one in values]
    assert all(layer.backward.flops > 0 for layer in workload.layers)
    tensors = batch if isinstance(batch, tuple) else (batch,)
    assert workload.input_nbytes == sum(tensor.nbytes for tensor in tensors)


def test_frozen_and_unused_layers() -> None:
    workload = describe(partial(), torch.zeros(2, 4))
    head, unused, watch = workload.layers
    assert [one.name for one in workload.layers] == ["head", "unused", "watch"]
    assert head.forward.flops == 2 * 2 * 4 * 4 + 2 * 2 * 4 * 3  # includes the frozen stem
    assert head.backward.flops == 2 * 2 * 4 * 3 + 2 * 3  # no gradient for the stem
    assert [one.name for one in workload.in_backward_order] == ["head", "watch", "unused"]
    assert unused.forward.flops == unused.backward.flops == 0
    assert unused.num_parameters == 45
    assert watch.forward.flops == 2 * 2 * 3
    assert watch.backward.flops == watch.activation_nbytes == 0


def test_a_module_that_only_its_parent_reads_has_no_forward_cost() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    batch = torch.zeros(2, 5, 8)
    attention, projection = describe(model, (batch, batch, batch)).layers
    assert (attention.name, projection.name) == ("(root)", "out_proj")
    products = 2 * 2 * 5 * (3 * 8 * 8 + 8 * 8) + 2 * (2 * 2 * 2 * 5 * 5 * 4)
    assert attention.forward.flops > products
    assert projection.forward.flops == projection.forward.num_calls == 0
    assert projection.backward.flops > 0
    assert projection.activation_nbytes == attention.activation_nbytes


def test_a_module_called_twice_is_one_layer() -> None:
    inner = nn.Linear(4, 4)
    (layer,) = describe(nn.Sequential(inner, nn.ReLU(), inner), torch.zeros(2, 4)).layers
    assert (layer.name, layer.forward.flops) == ("0", 2 * (2 * 2 * 4 * 4) + 8)


def test_a_layer_has_the_kind_of_the_class_that_computes():
    same = type("Same", (nn.Linear,), {})
    other = type("Other", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
    layers = [same(4, 4), other(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)]
    described = describe(nn.Sequential(*layers), torch.zeros(2, 4)).layers
    assert [one.kind for one in described] == ["Linear", "Other", "LayerNorm", "BatchNorm1d"]


class Recording(nn.Module):
    """Counts its calls, records their devices, and may read its input's values."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Linear(4, 3)
        self.constant = torch.full((3,), 2.0)
        self.looks = looks
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        random.random()
        DEVICES.append(x.device.type)
        x.add_(1)
        if self.looks and float(x.sum()) < 0:
            raise AssertionError("only with real values")
        self.last = self.inner(F.dropout(self.norm(x), 0.5)) * self.constant + torch.zeros(3)
        return self.last


DEVICES: list[str] = []


@pytest.mark.parametrize("looks", [False, True])
def test_model_is_left_as_it_was(looks: bool) -> None:
    model = Recording(looks).train()
    model.inner.eval()
    model.norm.weight.grad = torch.full((4,), 7.0)
    model.inner.register_forward_hook(lambda *_: None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator, python = torch.get_rng_state(), random.getstate()
    batch = torch.ones(3, 4)
    DEVICES.clear()

    describe(model, batch)

    assert (["meta", "cpu"] if looks else ["meta"]) == DEVICES
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert all(p.device.type == "cpu" and p.is_leaf for p in model.parameters())
    assert (model.norm.weight.grad.tolist(), model.norm.bias.grad) == ([7.0] * 4, None)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    assert hooks == [(0, 0), (0, 0), (0, 1)]
    assert [m.training for m in model.modules()] == [True, True, False]
    assert (model.calls, model.last) == (0, None)
    assert torch.equal(batch, torch.ones(3, 4))
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_describe_works_if_gradients_are_disabled(mode: Any) -> None:
    with mode():
        assert describe(nn.Linear(4, 3), torch.zeros(2, 4)).layers[0].backward.flops > 0


class Locked(nn.Linear):
    """A layer that cannot be copied, because it has a lock."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.lock, self.calls = threading.Lock(), 0

    def see(self, *_: Any) -> None:
        self.calls += 1


def test_hook_whose_owner_cannot_be_copied_still_runs() -> None:
    watcher, model = Locked(), nn.Linear(4, 3)
    model.register_forward_pre_hook(watcher.see)
    describe(model, torch.zeros(2, 4))
    assert watcher.calls == 1


def test_a_recurrent_model_runs_once_on_the_cpu_even_from_meta() -> None:
    with torch.device("meta"):
        empty = nn.LSTM(4, 3)
    devices = []
    empty.register_forward_hook(lambda *found: devices.append(found[2][0].device.type))
    batch = torch.zeros(5, 2, 4)
    assert describe(empty, batch.to("meta")) == describe(nn.LSTM(4, 3), batch)
    assert devices == ["cpu"]


@pytest.mark.parametrize(
    ("model", "batch", "field"),
    [
        (nn.ReLU(), torch.zeros(2, 4), "ReLU"),  # has no parameters
        (nn.Linear(4, 3), torch.zeros(2, 5), "Linear"),
        (nn.BatchNorm1d(4), torch.zeros(1, 4), "BatchNorm1d"),  # training requires two samples
        (Net(lambda net, x: 2 * x, w=nn.Parameter(torch.ones(1))), torch.zeros(2, 4), "model"),
        (Locked(), torch.zeros(2, 4), "Locked"),
        (nn.LazyLinear(3), torch.zeros(2, 4), "model"),
        (nn.Linear(4, 3), torch.tensor(1.0), "Linear"),
        (nn.Linear(4, 3), torch.zeros(0, 4), "Linear"),
        (nn.Linear(4, 3), (), "Linear"),
    ],
)
def test_models_and_batches_are_refused(model: nn.Module, batch: Any, field: str) -> None:
    with refused(field):
        describe(model, batch)
