"""`describe` does not change the model, and refuses unsupported models and batches."""

import random
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import Net
from paceline.training.models import describe
from refusals import refused


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
