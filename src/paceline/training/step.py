"""One training step, as every synchronous strategy, every profile and every benchmark takes it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.plan import Kind
from paceline.data.balanced import BalancedSampler
from paceline.data.dataset import Batch
from paceline.data.sampler import ShardedBatches
from paceline.record.recorder import Recorder
from paceline.training.objective import objective_for


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum."""

    learning_rate: float = 0.01
    momentum: float = 0.9

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a new optimizer of the model's parameters."""
        return torch.optim.SGD(model.parameters(), self.learning_rate, self.momentum)


class Share(NamedTuple):
    """A rank's part of a step's batch.

    `weight` scales the mean loss of this rank's samples, so that the average of all ranks'
    gradients is the gradient of the mean loss of the whole step, however unequal the parts are.
    """

    inputs: Tensor
    targets: Tensor
    weight: float


def shares(
    batches: ShardedBatches | BalancedSampler, data: Iterable[Batch], device: torch.device
) -> Iterator[Share]:
    """Yield this rank's part of each step of an epoch, on `device`."""
    for (inputs, targets), whole in zip(data, batches.global_sizes, strict=True):
        weight = len(targets) * batches.world_size / whole
        yield Share(
            inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True), weight
        )


def train_step(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    source: Iterator[Share],
    recorder: Recorder,
) -> Tensor:
    """Load, go forward and backward, update the weights; return the weighted loss."""
    with recorder.phase(Kind.LOAD):
        share = next(source)
    with recorder.phase(Kind.FORWARD):
        objective = objective_for(share.targets)
        reduction = "mean" if len(share.targets) else "sum"  # no samples have no mean
        outputs = model(share.inputs)
        loss = objective.loss(outputs, share.targets, reduction=reduction) * share.weight
    with recorder.phase(Kind.BACKWARD):
        loss.backward()
    with recorder.phase(Kind.STEP):
        optimizer.step()
        optimizer.zero_grad()
    recorder.end_step()
    return loss.detach()
