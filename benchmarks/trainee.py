"""A model in training, as anybody writes it in PyTorch: what variants of a benchmark step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.core.cost import LayerTimes
from paceline.core.workload import Workload
from paceline.exchange.step import SGD
from paceline.training.models import find
from paceline.training.models.paced import PacedModel, PacedSGD

Wrap = Callable[[nn.Module], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Task:
    """What is trained, on what data and by which optimizer."""

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Tensor
    targets: Tensor

    @classmethod
    def synthetic(cls, name: str, batch_size: int, device: torch.device) -> "Task":
        """Return a built-in model on random data: with momentum, or AdamW if it reads tokens."""
        architecture = find(name)
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, *(architecture.input_shape or ()))
        if architecture.input_dtype == torch.int64:
            tokens = torch.randint(architecture.num_classes or 1, shape, generator=generator)
            return cls(
                build=lambda: architecture.build(None).to(device),
                optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-4),
                inputs=tokens.to(device),
                targets=tokens.roll(-1, 1).to(device),
            )
        # Of many classes: one alone is learnt in five steps, and then gradients are subnormal
        # numbers, with which some processors take twenty times as long.
        inputs = torch.randn(shape, generator=generator)
        targets = torch.randint(architecture.num_classes or 1, (batch_size,), generator=generator)
        return cls(
            build=lambda: architecture.build(None).to(device),
            optimizer=SGD(learning_rate=1e-4).optimizer,
            inputs=inputs.to(device),
            targets=targets.to(device),
        )

    @classmethod
    def paced(cls, workload: Workload, times: LayerTimes) -> "Task":
        """Return a stand-in whose layers take these times and compute nothing."""
        return cls(
            build=lambda: PacedModel(workload, *times),
            optimizer=lambda model: PacedSGD(model.parameters(), times.update_s),
            inputs=torch.zeros(1, 1),
            targets=torch.zeros(1, dtype=torch.int64),
        )


@dataclass
class Trainee:
    """A copy of the task's model, and a step of it as anybody writes it in PyTorch."""

    task: Task
    wrap: Wrap

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model = self.task.build()
        self.parallel = self.wrap(model)
        self.optimizer = self.task.optimizer(model)

    def step(self) -> None:
        """Go forward and backward, and update the weights."""
        scores = self.parallel(self.task.inputs).flatten(0, -2)  # of samples, or of tokens
        loss = cross_entropy(scores, self.task.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
