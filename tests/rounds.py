"""A small network, its inner steps, and reference implementations of local updates."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.5
# A model, its optimizers, and a function that runs the inner step with a given number.
Loop = tuple[nn.Module, list[Optimizer], Callable[[int], None]]
STEP = {"outer_learning_rate": OUTER_RATE, "outer_momentum": OUTER_MOMENTUM}


def of_torch(tensors: list[Tensor]) -> Optimizer:
    return torch.optim.SGD(tensors, OUTER_RATE, OUTER_MOMENTUM, nesterov=True)


def net(seed: int = 0) -> nn.Sequential:
    rng = torch.Generator().manual_seed(seed)  # threads share torch's default generator
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for one in made.parameters():
            one.copy_(torch.randn(one.shape, generator=rng) / 3)
    return made


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    rng = torch.Generator().manual_seed(1000 * worker + step)
    inputs, targets = torch.randn(4, 6, generator=rng), torch.randn(4, 3, generator=rng)
    return mse_loss(model(inputs), targets)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), 0.01)


def inner_step(model: nn.Module, optimizer: Any, worker: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, worker, step).backward()
    optimizer.step()


def vector(model: nn.Module) -> Tensor:
    """Return all trainable values, gathered from shards, as one vector."""
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in trainable(model)]
    return torch.cat([one.detach().reshape(-1) for one in whole])


def loop(worker: int) -> Loop:
    """Return a worker's plain training loop."""
    model = net()
    optimizer = adamw(model)
    return model, [optimizer], lambda number: inner_step(model, optimizer, worker, number)


def naive(num_steps: list[int], sync_every: list[int]) -> Tensor:
    """Train with DiLoCo in one process, with one fragment and no delay."""
    loops = [loop(worker) for worker in range(len(num_steps))]
    return averaged(loops, num_steps, sync_every, OUTER_RATE, OUTER_MOMENTUM)


def averaged(
    loops: list[Loop],
    num_steps: list[int],
    sync_every: list[int],
    rate: float = 1.0,
    momentum: float = 0.0,
) -> Tensor:
    """Average workers, weighted by their steps, after each worker's round and at the end.

    The outer step is Nesterov's; without its arguments the model is the average.
    """
    group = vector(loops[0][0])
    velocity = torch.zeros_like(group)
    workers = [taken_steps(*one) for one in zip(loops, num_steps, strict=True)]
    while True:
        rounds = zip(map(range, sync_every), workers, strict=True)
        counts = [sum(1 for _ in zip(*one, strict=False)) for one in rounds]
        if not any(counts):
            return group
        sums = [count * vector(loop[0]) for count, loop in zip(counts, loops, strict=True)]
        mean = group - (sums[0] + sums[1]) / sum(counts)
        velocity = momentum * velocity + mean
        group = group - rate * (momentum * velocity + mean)
        for model, _, _ in loops:
            nn.utils.vector_to_parameters(group.clone(), trainable(model))


def taken_steps(loop: Loop, num_steps: int) -> Iterator[int]:
    """Take steps; yield the numbers of steps that changed parameters."""
    model, _, step = loop
    for number in range(num_steps):
        before = vector(model)
        step(number)
        if not torch.equal(before, vector(model)):
            yield number


class InFragments:
    """Streaming DiLoCo in one process, with strided fragments, a delay and mixing.

    Without mixing, a worker adds the group's change since the fragment was sent.
    """

    def __init__(self, every: int, count: int, delay: int, mixing: float | None) -> None:
        self.every, self.count, self.delay, self.mixing = every, count, delay, mixing
        self.models = [net(), net()]
        layers = [[one[i] for i in (0, 2, 4)] for one in self.models]
        self.parts = [
            [nn.ModuleList(own[number::count]) for own in layers] for number in range(count)
        ]
        self.group = [vector(own[0]) for own in self.parts]
        self.velocity = [torch.zeros_like(one) for one in self.group]
        self.due: dict[int, int] = {}
        self.sent: dict[int, list[Tensor]] = {}

    def sent_after(self, number: int) -> int:
        return (number + 1) * self.every // self.count

    def train(self, num_steps: int) -> Tensor:
        optimizers = [adamw(one) for one in self.models]
        for step in range(num_steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, optimizers, strict=True)):
                inner_step(model, optimizer, rank, step)
            if step in self.due:
                self.load(self.due.pop(step), self.mixing)
            for number in range(self.count):
                if step % self.every + 1 == self.sent_after(number):
                    self.send(number)
                    self.due[step + self.delay] = number
                    if not self.delay:
                        self.load(self.due.pop(step), self.mixing)
        self.end()
        return vector(self.models[0])

    def end(self) -> None:
        for number in self.due.values():
            self.load(number, self.mixing)
        for number in range(self.count):
            if self.sent_after(number) < self.every:  # steps followed its last exchange
                self.send(number)
            self.load(number, 0.0)

    def send(self, number: int) -> None:
        self.sent[number] = [vector(one) for one in self.parts[number]]
        deltas = [self.group[number] - one for one in self.sent[number]]
        mean = (deltas[0] + deltas[1]) / 2
        self.velocity[number] = OUTER_MOMENTUM * self.velocity[number] + mean
        step = OUTER_MOMENTUM * self.velocity[number] + mean
        self.group[number] = self.group[number] - OUTER_RATE * step

    def load(self, number: int, own_share: float | None) -> None:
        for one, sent in zip(self.parts[number], self.sent[number], strict=True):
            if own_share is None:
                loaded = vector(one) + (self.group[number] - sent)
            else:
                loaded = own_share * vector(one) + (1 - own_share) * self.group[number]
            nn.utils.vector_to_parameters(loaded, one.parameters())
