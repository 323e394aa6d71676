"""A head in parts within one process: what is cut, what is refused, and what parts compute."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.commands.options import with_codecs
from paceline.core.errors import InvalidInput
from paceline.models import find
from paceline.settings import validated_settings
from paceline.strategies.subbatch import narrow
from paceline.strategies.subbatch.chain import Elementwise, apart
from paceline.strategies.subbatch.dropout import Masks, dropout_seed
from paceline.strategies.subbatch.loss import Columns
from paceline.strategies.subbatch.narrow import narrowed
from paceline.strategies.subbatch.split import Rows, Stage, Widths

ROWS, RANKS = 7, 3


class Functional(nn.Module):
    """Calls functions between its layers, in a forward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc1, self.fc2 = nn.Linear(16, 9), nn.Linear(9, 5)

    def forward(self, images: Tensor) -> Tensor:
        values = torch.flatten(F.relu(self.conv(images)), 1)
        return self.fc2(F.leaky_relu(self.fc1(values), 0.2, inplace=True))


class Skipping(Functional):
    """A connection passes the head's first layer by."""

    def forward(self, images: Tensor) -> Tensor:
        values = torch.flatten(self.conv(images), 1)
        return self.fc2(self.fc1(values) + values[:, :9])


class Dropping(Functional):
    """Calls a dropout that would be one of training in tests, too."""

    def forward(self, images: Tensor) -> Tensor:
        values = torch.flatten(self.conv(images), 1)
        return self.fc2(F.dropout(self.fc1(values), 0.5, self.training))


def chained(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), *between, nn.Linear(6, 3))


def test_body_and_links_are_the_model():
    torch.manual_seed(0)
    model, images = Functional(), torch.randn(2, 1, 4, 4)
    parts = apart(model, ["fc1", "fc2"], "net")
    values = parts.body(images)
    assert [name for name, _ in parts.body.named_parameters()] == ["conv.weight", "conv.bias"]
    for link in parts.links:
        values = link.module(values)
        for _, module in link.after:
            values = module(values)
    assert torch.equal(values, model(images))
    [(_, between)] = parts.links[0].after
    assert isinstance(between, Elementwise)


@pytest.mark.parametrize(
    ("model", "names", "message"),
    [
        (Skipping(), ["fc1", "fc2"], "takes something else than the result of fc1"),
        (Dropping(), ["fc1", "fc2"], "it calls dropout() around it; use nn.Dropout"),
        (chained(nn.LayerNorm(6)), ["2", "3", "4"], "layer '3' is LayerNorm, which works on all"),
        (chained(nn.Softmax(1)), ["2", "4"], "'3' is Softmax there"),
        (chained(nn.RReLU()), ["2", "4"], "'3' is RReLU there"),
        (chained(nn.Linear(6, 6).requires_grad_(False)), ["2", "4"], "'3' is Linear there"),
        (nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), ["1"], "nothing before it is trained"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_by_name(model, names, message):
    with pytest.raises(InvalidInput) as caught:
        apart(model, names, "net")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["labels=half", "activations", "errors=", "gradients=none,errors"])
def test_a_codec_of_what_does_not_travel_is_refused(text: str):
    with pytest.raises(InvalidInput, match="is not PURPOSE=CODEC with one of activations, errors"):
        with_codecs({}, text)


def test_codecs_are_fields_of_the_configuration():
    chosen = with_codecs({"head": "fc2"}, "activations=dynamic8,gradients=none")
    assert chosen == {"head": "fc2", "activations": "dynamic8", "gradients": None}
    with pytest.raises(InvalidInput, match="activations travels by 'half', but is named before"):
        with_codecs(chosen, "activations=half")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"balance": "auto"}, "balance: goes not with strategy subbatch"),
        ({"options": {"activations": "threshold:1"}}, "not one for activations and errors"),
        ({"options": {"chunk": 2}}, "strategy subbatch: chunk"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(more: dict, message: str):
    with pytest.raises(InvalidInput, match=message):
        validated_settings({"model": "lenet5", "strategy": "subbatch", **more})


def test_a_layer_in_parts_has_the_outputs_errors_and_gradients_of_the_whole():
    torch.manual_seed(0)
    layer, norm = nn.Linear(10, 8), nn.BatchNorm1d(8)
    nn.init.uniform_(norm.weight)
    model = nn.Sequential(nn.Linear(4, 10), layer, nn.ReLU(), nn.Dropout(0.4), norm).double()
    name, step, seed = "3", 5, 11
    inputs = torch.randn(ROWS, 10, dtype=torch.float64, requires_grad=True)
    of_outputs = torch.randn(ROWS, 8, dtype=torch.float64)
    torch.manual_seed(dropout_seed(seed, step, name))
    expected = model[1:](inputs)
    expected.backward(of_outputs)

    rows = Rows(list(range(ROWS)), Masks(seed, step, ROWS))
    outputs, errors, gradients = [], torch.zeros_like(inputs), []
    widths = Widths.of(8, RANKS)
    for rank in range(RANKS):
        torch.manual_seed(0)
        own = narrowed(
            lambda: _copied(model), {"1": widths.columns(rank), "4": widths.columns(rank)}, 0
        )
        links = apart(own, ["1", "4"], "net").links
        linear, normal = (Stage(link, widths, rank) for link in links)
        outputs.append(normal.forward(0, linear.forward(0, inputs.detach(), rows), rows))
        by_own = of_outputs.split(widths.parts, 1)[rank]
        errors += linear.errors(0, normal.errors(0, by_own, 1.0), 1.0)
        linear.weights(0, 1.0)
        gradients.append([one.grad for stage in (linear, normal) for one in stage.parameters])
    torch.testing.assert_close(torch.cat(outputs, 1), expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(errors, inputs.grad, rtol=1e-13, atol=1e-13)
    for parts, parameter in zip(
        zip(*gradients, strict=True), [*layer.parameters(), *norm.parameters()], strict=True
    ):
        torch.testing.assert_close(torch.cat(parts), parameter.grad, rtol=1e-13, atol=1e-13)


def _copied(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.grad = None
    return copied


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_masks_are_those_of_plain_dropouts_on_the_whole_batch(p: float):
    values = torch.randn(ROWS, 9)
    torch.manual_seed(dropout_seed(1, 2, "drop"))
    expected = nn.Dropout(p)(values)
    masks, found = Masks(1, 2, ROWS), torch.empty_like(values)
    for rows in ([4, 5, 6], [0, 1], [2, 3]):
        for first, width in ((0, 5), (5, 4)):
            part = values[rows, first : first + width]
            noise = masks.noise("drop", p, 9, rows, first, part)
            found[rows, first : first + width] = part * noise
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("lenet5", ("fc3", "fc5")),
        ("mlp-20-16-12-10", ("layers.3", "layers.5")),
        ("sigmoid-mlp-20-16-12-10", ("layers.3", "layers.5")),
    ],
)
def test_parts_are_rows_of_the_model_that_is_built_whole(name: str, layers: tuple[str, ...]):
    """The last one subtracts means of its weights: it is built whole, and cut afterwards."""

    def build() -> nn.Module:
        return find(name).build(10)

    torch.manual_seed(7)
    expected = build().state_dict()
    columns = dict(zip(layers, (Columns(3, 5), Columns(8, 2)), strict=True))
    found = narrowed(build, columns, 7).state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        own = columns.get(key.rpartition(".")[0])
        rows = expected[key] if own is None else expected[key][own.first : own.first + own.width]
        assert torch.equal(tensor, rows), key


def test_no_more_than_one_tensor_of_a_head_is_ever_whole(monkeypatch):
    """While the head is filled, what there is of it are the parts, and the tensor at hand."""
    made: list[int] = []
    fill = narrow._Kept._fill

    def counted(self, found, tensor, *rest) -> None:
        fill(self, found, tensor, *rest)
        made.append(
            sum(one.values.numel() for one in self._rows.values() if one.values is not None)
        )

    monkeypatch.setattr(narrow._Kept, "_fill", counted)
    columns = {name: Columns(0, 2) for name in ("2", "3")}
    model = narrowed(chained, columns, 0)
    assert max(made) == sum(
        parameter.numel()
        for name in columns
        for parameter in model.get_submodule(name).parameters()
    )
