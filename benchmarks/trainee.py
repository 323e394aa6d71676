"""Train a model with plain PyTorch steps, wrapped as each variant of a benchmark requires."""

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
    """A model, its data and its optimizer."""

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Tensor
    targets: Tensor

    @classmethod
    def synthetic(cls, name: str, batch_size: int, device: torch.device) -> "Task":
        """Build a built-in model on random data: AdamW for tokens, else SGD with momentum."""
        architecture = find(name)
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, *(architecture.input_shape or ()))
        num_classes, optimizer = architecture.num_classes or 1, SGD(learning_rate=1e-4).optimizer
        if architecture.input_dtype == torch.int64:
            inputs = torch.randint(num_classes, shape, generator=generator)
            targets, optimizer = inputs.roll(-1, 1), _adamw
        else:
            # Draw many classes: a single class is learnt in five steps. Gradients are then
            # subnormal, and some processors compute with subnormal numbers twenty times slower.
            inputs = torch.randn(shape, generator=generator)
            targets = torch.randint(num_classes, (batch_size,), generator=generator)
        return cls(
            build=lambda: architecture.build(None).to(device),
            optimizer=optimizer,
            inputs=inputs.to(device),
            targets=targets.to(device),
        )

    @classmethod
    def paced(cls, workload: Workload, times: LayerTimes) -> "Task":
        """Build a model whose layers sleep for these times instead of computing."""
        return cls(
            build=lambda: PacedModel(workload, *times),
            optimizer=lambda model: PacedSGD(model.parameters(), times.update_s),
            inputs=torch.zeros(1, 1),
            targets=torch.zeros(1, dtype=torch.int64),
        )


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


@dataclass
class Trainee:
    """A wrapped copy of the task's model, its optimizer, and a plain PyTorch training step."""

    task: Task
    wrap: Wrap

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model = self.task.build()
        self.parallel = self.wrap(model)
        self.optimizer = self.task.optimizer(model)

    def step(self) -> None:
        """Run forward and backward, and update the weights."""
        scores = self.parallel(self.task.inputs).flatten(0, -2)  # rows: samples or tokens
        loss = cross_entropy(scores, self.task.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
