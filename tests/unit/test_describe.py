"""Which layer pays for what, what it hands on, and in which order the gradients come."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.core.workload import Layer, Workload
from paceline.models import describe, layers_of
from paceline.models.inception import InceptionBlock
from paceline.models.networks import BasicBlock


def names_of(workload: Workload) -> list[str]:
    return [layer.name for layer in workload.layers]


def only(workload: Workload) -> Layer:
    (layer,) = workload.layers
    return layer


def backward_names(workload: Workload) -> list[str]:
    return [layer.name for layer in workload.in_backward_order]


def real_backward_order(model: nn.Module, *batch: Tensor) -> list[str]:
    """In what order the last gradients of the layers come in a real backward pass."""
    order: list[str] = []
    for layer in layers_of(model):
        for _, parameter in layer.parameters:
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=layer.name: order.append(name)
            )
    model(*batch).sum().backward()
    return list(dict.fromkeys(reversed(order)))[::-1]


def test_chain() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    workload = describe(model, torch.zeros(5, 2, 3), name="chain")
    assert workload.name == "chain"
    assert workload.batch_size == 5
    assert workload.input_nbytes == 5 * 6 * 4
    assert names_of(workload) == ["1", "3", "5"]
    assert workload.backward_order == (2, 1, 0)
    assert [layer.num_parameters for layer in workload.layers] == [56, 36, 10]
    assert [layer.activation_nbytes for layer in workload.layers] == [5 * 8 * 4, 5 * 4 * 4, 40]
    assert workload.layers[0].forward.flops == 2 * 5 * 6 * 8 + 5 * (5 * 8)  # with its tanh
    assert workload.layers[2].backward.flops == 2 * (2 * 5 * 4 * 2) + 5 * 2
    assert workload.layers[1].backward.flops == 2 * (2 * 5 * 8 * 4) + 5 * 4 + 5 * 4  # and the relu


def test_parameters_stand_in_the_order_of_their_gradients() -> None:
    model = nn.Linear(4, 3)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(torch.ones(2, 4)).sum().backward()
    layer = only(describe(model, torch.ones(2, 4)))
    assert [parameter.name for parameter in layer.parameters] == order
    assert {p.name: p.shape for p in layer.parameters} == {"weight": (3, 4), "bias": (3,)}
    assert {parameter.element_size for parameter in layer.parameters} == {4}


class Parallel(nn.Module):
    """Two branches on one stem; the branch registered first runs last."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(4, 3)
        self.early = nn.Linear(4, 3)
        self.stem = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        product: Tensor = self.early(x) * self.late(x)
        return product


def test_branches_stand_in_the_order_in_which_they_run() -> None:
    workload = describe(Parallel(), torch.zeros(5, 2))
    assert names_of(workload) == ["stem", "early", "late"]
    assert backward_names(workload) == real_backward_order(Parallel(), torch.zeros(5, 2))
    # The stem hands one tensor to both branches; early hands its own to the product.
    assert [layer.activation_nbytes for layer in workload.layers] == [5 * 4 * 4, 5 * 3 * 4, 60]


class Detour(nn.Module):
    """The layer that runs first lies on the short way, so that its gradient does not come last."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(4, 4)
        self.long = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.long(x) + self.short(x)
        return total


class Recomputed(nn.Module):
    """One layer runs inside and outside of re-entrant checkpointing: two gradients, far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.once = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.twice, self.stem(x), use_reentrant=True)
        outer: Tensor = self.twice(self.once(inner))
        return outer


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Detour(), (3, 4)),
        (Recomputed(), (3, 4)),
        (InceptionBlock(16, (4, 3, 5, 2, 6, 3)), (2, 16, 6, 6)),
        (nn.Sequential(nn.Conv2d(3, 4, 1), BasicBlock(4, 4, 1, nn.Identity())), (2, 3, 5, 5)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    ],
    ids=["detour", "recomputed", "inception", "residual", "transformer"],
)
def test_backward_order_is_that_of_a_real_backward_pass(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    workload = describe(model, torch.zeros(shape))
    assert backward_names(workload) == real_backward_order(model, torch.randn(shape))


class Around(nn.Module):
    """A module with one parameter before its child and one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.inner(x * self.scale) + self.shift
        return total


def test_a_layer_is_ready_when_the_last_of_its_gradients_is() -> None:
    workload = describe(Around(), torch.zeros(2, 4))
    assert names_of(workload) == ["(root)", "inner"]
    assert [p.name for p in workload.layers[0].parameters] == ["shift", "scale"]
    assert backward_names(workload) == ["inner", "(root)"]


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x)
        scores: Tensor = self.head(outputs[:, -1])
        return scores


def test_a_layer_hands_on_only_the_part_that_is_read() -> None:
    lstm, head = describe(LastStep(), torch.zeros(2, 5, 4)).layers
    assert lstm.activation_nbytes == 2 * 3 * 4
    assert head.activation_nbytes == 2 * 2 * 4


class Tied(nn.Module):
    """A decoder that shares the embedding's table and has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 7)
        self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.decode(self.inner(self.embed(x)))
        return scores


def test_tied_weights_belong_to_the_first_layer_and_are_ready_last() -> None:
    model = Tied()
    workload = describe(model, torch.zeros(2, 5, dtype=torch.long))
    assert [layer.num_parameters for layer in workload.layers] == [28, 20, 7]
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())
    assert backward_names(workload) == ["decode", "inner", "embed"]


class Partial(nn.Module):
    """Frozen stem; one layer that runs but gets no gradient, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 9)
        self.watch = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stem(x))
        self.watch(scores.detach())
        return scores


def test_frozen_and_unused_layers() -> None:
    workload = describe(Partial(), torch.zeros(2, 4))
    head, unused, watch = workload.layers
    assert names_of(workload) == ["head", "unused", "watch"]
    assert head.forward.flops == 2 * 2 * 4 * 4 + 2 * 2 * 4 * 3  # with the frozen stem before it
    assert head.backward.flops == 2 * 2 * 4 * 3 + 2 * 3  # no gradient for the stem
    assert backward_names(workload) == ["head", "watch", "unused"]
    assert unused.forward.flops == unused.backward.flops == 0
    assert unused.num_parameters == 45
    assert watch.forward.flops == 2 * 2 * 3
    assert watch.backward.flops == watch.activation_nbytes == 0


def test_partly_frozen_module_keeps_its_trainable_parameter() -> None:
    model = nn.Linear(4, 3)
    model.weight.requires_grad_(False)
    assert [p.name for p in only(describe(model, torch.zeros(2, 4))).parameters] == ["bias"]


def test_module_that_only_its_parent_reads_has_no_forward_cost() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    batch = torch.zeros(2, 5, 8)
    workload = describe(model, (batch, batch, batch))
    attention, projection = workload.layers
    assert (attention.name, projection.name) == ("(root)", "out_proj")
    products = 2 * 2 * 5 * (3 * 8 * 8 + 8 * 8) + 2 * (2 * 2 * 2 * 5 * 5 * 4)
    assert attention.forward.flops > products
    assert projection.forward.flops == projection.forward.num_calls == 0
    assert projection.backward.flops > 0
    assert projection.activation_nbytes == attention.activation_nbytes


def test_module_called_twice_is_one_layer() -> None:
    inner = nn.Linear(4, 4)
    workload = describe(nn.Sequential(inner, nn.ReLU(), inner), torch.zeros(2, 4))
    layer = only(workload)
    assert layer.name == "0"
    assert layer.forward.flops == 2 * (2 * 2 * 4 * 4) + 8


class Named(nn.Module):
    """Two inputs, and a dictionary with a nested tuple and an integer tensor as output."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.b = nn.Linear(2, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"scores": self.a(x), "more": (self.b(y), torch.arange(3)), "none": None}


def test_several_inputs_and_named_outputs() -> None:
    workload = describe(Named(), (torch.zeros(6, 4), torch.zeros(6, 2)))
    assert workload.input_nbytes == 4 * 6 * (4 + 2)
    assert [layer.activation_nbytes for layer in workload.layers] == [6 * 3 * 4, 6 * 5 * 4 + 24]
    assert all(layer.backward.flops > 0 for layer in workload.layers)


def test_layers_name_their_own_trainable_parameters() -> None:
    layers = layers_of(Tied())
    assert [layer.name for layer in layers] == ["embed", "inner", "decode"]
    assert [name for layer in layers for name, _ in layer.parameters] == [
        "embed.weight",
        "inner.weight",
        "inner.bias",
        "decode.bias",
    ]
    assert layers_of(nn.Linear(4, 3))[0].name == "(root)"


def test_a_layer_says_as_what_it_computes():
    class Same(nn.Linear):
        """A linear layer by another name."""

    class Other(nn.Linear):
        """Computes something of its own."""

        def forward(self, values: Tensor) -> Tensor:
            return 2 * super().forward(values)

    layers = [Same(4, 4), Other(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)]
    described = describe(nn.Sequential(*layers), torch.zeros(2, 4)).layers
    assert [one.kind for one in described] == ["Linear", "Other", "LayerNorm", "BatchNorm1d"]
