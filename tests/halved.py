"""Models that can be cut, and body workers that a test steps: for tests of wheel's server."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler

from nets import Net, residual
from paceline.rpc.tensor_parts import flatten, load_vector
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.protocol import take_gradients
from paceline.strategies.wheel.server import ParameterServer
from paceline.training.models.halves import Halves, cut
from paceline.training.models.networks import MLP, LeNet5


def dropping() -> nn.Module:
    """Build a convolution, batch norm, three kinds of dropout, and a `view` before the head."""

    def compute(net: nn.Module, images: Tensor) -> Tensor:
        maps = F.max_pool2d(net.drop(F.relu(net.norm(net.conv(images)))), 2)
        values = F.dropout(maps.view(maps.size(0), -1), 0.2, net.training)
        hidden = F.dropout(torch.relu(net.fc1(values)), 0.5, training=net.training)
        return net.fc2(hidden)

    first = {"conv": nn.Conv2d(1, 4, 3), "norm": nn.BatchNorm2d(4), "drop": nn.Dropout2d(0.3)}
    return Net(compute, **first, fc1=nn.Linear(4 * 3 * 3, 16), fc2=nn.Linear(16, 5))


def around() -> nn.Module:
    """Build a residual connection around the first layer of the head."""

    def compute(net: nn.Module, samples: Tensor) -> Tensor:
        scale, hidden = net.scale, torch.tanh(net.a(samples))
        return (hidden + net.b(hidden)) * scale

    layers = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 8)}
    return Net(compute, **layers, scale=nn.Parameter(torch.ones(8)))


def remembering() -> nn.Module:
    """Build a head that uses the last time step of a recurrent layer."""
    memory = nn.LSTM(6, 8, num_layers=2, batch_first=True)
    return Net(lambda net, x: net.out(net.memory(x)[0][:, -1]), memory=memory, out=nn.Linear(8, 5))


class Case(NamedTuple):
    """A model, the shape of a sample, the number of classes, and possible first layers of heads."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_classes: int
    cuts: tuple[str, ...]

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(3)
        return self.build().to(dtype)

    def inputs(self, num_samples: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(num_samples)
        return torch.randn(num_samples, *self.shape, generator=generator, dtype=dtype)

    def labels(self, num_samples: int = 4) -> Tensor:
        return torch.arange(num_samples) % self.num_classes


CASES = {
    "lenet5": Case(LeNet5, (1, 32, 32), 10, ("conv2", "fc3", "fc5")),
    "mlp": Case(lambda: MLP([12, 9, 8, 4]), (12,), 4, ("layers.3", "layers.5")),
    "dropping": Case(dropping, (1, 8, 8), 5, ("norm", "fc1", "fc2")),
    "around": Case(around, (6,), 8, ("b",)),
    "remembering": Case(remembering, (7, 6), 5, ("out",)),
    "resnet": Case(residual, (3, 8, 8), 10, ("blocks.1.conv1.0", "classifier.2")),
}


def batches(case: Case, count: int, size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield different batches."""
    for number in range(count):
        generator = torch.Generator().manual_seed(100 + number)
        inputs = torch.randn(size, *case.shape, generator=generator, dtype=torch.float64)
        yield inputs, torch.randint(case.num_classes, (size,), generator=generator)


class ManualWorker:
    """A body worker whose steps the test takes one by one."""

    def __init__(self, server: ParameterServer, halves: Halves, worker: int = 0) -> None:
        self.server, self.halves, self.worker = server, halves, worker

    def fetch(self) -> int:
        version, flat = self.server.body_parameters()
        load_vector(self.halves.body_parameters, flat)
        return version

    def forward(
        self, step: int, version: int, inputs: Tensor, labels: Tensor, weight: float = 1.0
    ) -> tuple[Tensor, float]:
        """Return the body's gradients as a vector, and the loss."""
        activations = self.halves.body(inputs)
        activation_gradients, loss = self.server.answer(
            self.worker, step, version, activations.detach(), labels, weight
        )
        torch.autograd.backward(activations, activation_gradients)
        gradients = take_gradients(self.halves.body_names, self.halves.body_parameters)
        return flatten(gradients), loss

    def step(self, step: int, inputs: Tensor, labels: Tensor) -> tuple[int, float]:
        """Take a step; return the new version, and the loss."""
        version = self.fetch()
        gradients, loss = self.forward(step, version, inputs, labels)
        self.server.update(self.worker, step, version, gradients)
        return self.server.version, loss


Make = Callable[[nn.Module], torch.optim.Optimizer]


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.25)


def serve(
    case: Case,
    first: str,
    make: Make = plain,
    num_workers: int = 1,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    staleness: int | None = 0,
    staleness_decay: float = 0.0,
    **options,
) -> tuple[ParameterServer, list[ManualWorker]]:
    """Return a server, and workers with copies of the body, as in separate processes."""
    model = case.model()
    halves, optimizer = cut(model, case.inputs(), first), make(model)
    config = Wheel(num_workers, staleness=staleness, staleness_decay=staleness_decay)
    options["schedule"] = schedule and schedule(optimizer)
    server = ParameterServer(model, halves, optimizer, config, **options)
    hands = [ManualWorker(server, copy.deepcopy(halves), worker) for worker in range(num_workers)]
    for hand in hands:
        server.workers.add(hand.worker)
    return server, hands


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
