"""A split head within one process: cuts, refused models, and the values of parts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.core.cost import PacedDevice, Rate, Roofline, Totals
from paceline.core.plan import Kind, PriceKey
from paceline.core.strategy import Window
from paceline.core.workload import Cost
from paceline.strategies.subbatch import paced
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layers import DropoutMasks, dropout_seed
from paceline.strategies.subbatch.loss import CrossEntropy, loss_terms
from paceline.strategies.subbatch.paced import paced_model
from paceline.strategies.subbatch.plan import plan, weights_of
from paceline.training.models import find, sharded
from paceline.training.models.chained_head import partition
from paceline.training.models.sharded import Shard, Sharding, build_sharded
from refusals import refused
from subbatches import BATCH, CONV, FC1, FC2, FEATURES, model, ring_of

ROWS, RANKS = 7, 3


class Functional(nn.Module):
    """Calls functions between its layers in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc1, self.fc2 = nn.Linear(16, 9), nn.Linear(9, 5)

    def forward(self, images: Tensor) -> Tensor:
        values = torch.flatten(F.relu(self.conv(images)), 1)
        return self.fc2(F.leaky_relu(self.fc1(values), 0.2, inplace=True))


class Skipping(Functional):
    """A residual connection skips the head's first layer."""

    def forward(self, images: Tensor) -> Tensor:
        values = torch.flatten(self.conv(images), 1)
        return self.fc2(self.fc1(values) + values[:, :9])


class Dropping(Functional):
    """Calls functional dropout, which a trace would keep active in evaluation."""

    def forward(self, images: Tensor) -> Tensor:
        values = torch.flatten(self.conv(images), 1)
        return self.fc2(F.dropout(self.fc1(values), 0.5, self.training))


def chained(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), *between, nn.Linear(6, 3))


def test_body_and_head_are_the_model():
    torch.manual_seed(0)
    model, images = Functional(), torch.randn(2, 1, 4, 4)
    body, head = partition(model, ["fc1", "fc2"], "net", images)
    values = body(images)
    assert [name for name, _ in body.named_parameters()] == ["conv.weight", "conv.bias"]
    for layer in head:
        values = layer.module(values)
        for _, module in layer.following:
            values = module(values)
    assert torch.equal(values, model(images))
    assert [len(layer.following) for layer in head] == [1, 0]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Skipping(), ["fc1", "fc2"]),
        (Dropping(), ["fc1", "fc2"]),
        (chained(nn.LayerNorm(6)), ["2", "3", "4"]),
        (chained(nn.Softmax(1)), ["2", "4"]),
        (chained(nn.RReLU()), ["2", "4"]),
        (chained(nn.Linear(6, 6).requires_grad_(False)), ["2", "4"]),
        (nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), ["1"]),  # no layer before it is trained
    ],
)
def test_what_cannot_be_split_is_refused(model, names):
    with refused("head"):
        partition(model, names, "net", torch.randn(2, 4))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_masks_are_those_of_torch_on_the_whole_batch(p: float):
    values = torch.randn(ROWS, 9)
    torch.manual_seed(dropout_seed(1, 2, "drop"))
    expected = nn.Dropout(p)(values)
    masks, found = DropoutMasks(1, 2, ROWS), torch.empty_like(values)
    for rows in ([4, 5, 6], [0, 1], [2, 3]):
        for first, width in ((0, 5), (5, 4)):
            part = values[rows, first : first + width]
            noise = masks.noise("drop", p, 9, torch.tensor(rows), Shard(first, width), part)
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
    """The sigmoid MLP subtracts the mean of its weights, so it is built whole and then cut."""

    def build() -> nn.Module:
        return find(name).build(10)

    torch.manual_seed(7)
    expected = build().state_dict()
    shards = dict(zip(layers, (Shard(3, 5), Shard(8, 2)), strict=True))
    found = build_sharded(build, shards, 7).state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        own = shards.get(key.rpartition(".")[0])
        rows = expected[key] if own is None else own(expected[key])
        assert torch.equal(tensor, rows), key


def test_no_more_than_one_tensor_of_a_head_is_ever_whole(monkeypatch):
    """While a head is initialised, only its parts and the current tensor are in memory."""
    made: list[int] = []
    dispatch = sharded._KeepRows.__torch_dispatch__

    def counted(self, *args):
        result = dispatch(self, *args)
        made.append(
            sum(one.values.numel() for one in self._tensors.values() if one.values is not None)
        )
        return result

    monkeypatch.setattr(sharded._KeepRows, "__torch_dispatch__", counted)
    shards = {name: Shard(0, 2) for name in ("2", "3")}
    model = build_sharded(chained, shards, 0)
    assert max(made) == sum(
        parameter.numel() for name in shards for parameter in model.get_submodule(name).parameters()
    )


SCALE = 0.125


def parted(
    logits: torch.Tensor, targets: torch.Tensor, ranks: int
) -> tuple[CrossEntropy, torch.Tensor]:
    """Return loss and gradients, computed by ranks that have some columns each."""
    sharding = Sharding.even(logits.shape[1], ranks)
    shards = [sharding.shard(rank) for rank in range(ranks)]
    own = list(logits.split(sharding.sizes, 1))
    terms = [loss_terms(one, targets, shard) for one, shard in zip(own, shards, strict=True)]
    loss = CrossEntropy.of(torch.stack(terms), targets)
    parts = [loss.gradients(one, targets, at, SCALE) for one, at in zip(own, shards, strict=True)]
    return loss, torch.cat(parts, 1)


@given(
    st.integers(0, 7), st.integers(4, 13), st.integers(1, 4), st.integers(0, 2**20), st.floats(0, 1)
)
def test_loss_and_derivatives_are_torchs(
    rows: int, classes: int, ranks: int, seed: int, ignored: float
):
    source = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(rows, classes, generator=source, dtype=torch.float64)
    targets = torch.randint(classes, (rows,), generator=source)
    targets[torch.rand(rows, generator=source) < ignored] = -100
    loss, gradients = parted(logits, targets, ranks)
    whole = logits.clone().requires_grad_()
    expected = cross_entropy(whole, targets, reduction="none")
    (SCALE * expected.sum()).backward()
    torch.testing.assert_close(loss.losses, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradients, whole.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("ranks", [1, 3])
def test_logits_that_overflow_exp_have_a_loss(ranks: int):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-2e4, -2e4, -2e4]])
    targets = torch.tensor([1, 2])
    loss, gradients = parted(logits, targets, ranks)
    torch.testing.assert_close(loss.losses, cross_entropy(logits, targets, reduction="none"))
    assert gradients.isfinite().all()


NBYTES_PER_S, CALL_S = 2e3, 0.25
FAST = {"memory_bandwidth_bytes_per_s": NBYTES_PER_S, "call_latency_s": CALL_S}
RATE = Rate(1e9, NBYTES_PER_S, CALL_S)


def moving(layer):
    """Return the layer with memory traffic (weights, and bytes per sample) instead of flops."""
    forward, backward = Cost(0, layer.gradient_nbytes + 960, 1), Cost(0, 0, 2)
    backward = replace(backward, nbytes=2 * layer.gradient_nbytes + 1920)
    return replace(layer, forward=forward, backward=backward)


NET = model(CONV, moving(FC1), moving(FC2))


@pytest.mark.parametrize("sub_batch", [None, 2, 6, 10, 24])
@pytest.mark.parametrize("totals", [Totals(), Totals(30.0, 90.0)])
def test_each_sub_batch_takes_what_the_plan_says(monkeypatch, sub_batch, totals):
    slept: list[float] = []
    monkeypatch.setattr(paced.time, "sleep", slept.append)
    config, machine = SubBatch(2, sub_batch=sub_batch), ring_of(2, **FAST)
    device = PacedDevice("paced as a test", RATE, "gpu", totals)
    layer = paced_model(NET, config, 0, device).head[0]
    whole = PacedDevice("unscaled", RATE, "gpu").times(NET)
    forward_s, backward_s = sum(whole.forward_s), sum(whole.backward_s)
    backward_scale = (totals.backward_s or backward_s) / backward_s
    scales = ((totals.forward_s or forward_s) / forward_s, backward_scale, backward_scale)
    roofline = Roofline.of(machine)
    tasks = {task.price_key: task for task in plan(NET, machine, config, Window(1)).tasks}
    num_passes = config.num_sub_batches(BATCH)
    for number in range(num_passes):
        rows = 2 * (BATCH // num_passes + (number < BATCH % num_passes))
        values, masks = torch.zeros(rows, FEATURES), DropoutMasks(0, 0, 2 * BATCH)
        outputs = layer.forward(number, values, torch.arange(rows), masks)
        layer.backward_input(number, outputs, 1.0)
        layer.backward_weight(number, 1.0)
        keys = (
            PriceKey("gpu0", Kind.FORWARD, "fc1", number),
            PriceKey("gpu0", Kind.BACKWARD, "fc1", number),
            PriceKey("gpu0", Kind.BACKWARD, weights_of("fc1"), number),
        )
        seconds = [roofline.seconds(tasks[key]) for key in keys]
        expected = [scale * one for scale, one in zip(scales, seconds, strict=True)]
        assert slept[-3:] == pytest.approx(expected)
