"""Take a training step: forward and backward passes of micro-batches, and an optimizer step.

load | forward backward | forward backward ... | forward backward -> exchange | optimizer step
     |    the micro-batches before the last    |    the last micro-batch      |
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from paceline.core.plan import ACCUMULATED, Kind
from paceline.record.recorder import Recorder
from paceline.training.data import BalancedSampler, ShardedBatches
from paceline.training.data.batch import Batch, call
from paceline.training.recipes.losses import class_loss
from paceline.training.recipes.recipe import NAMELESS, Loss, learnable_loss

Optimize = Callable[[nn.Module], Optimizer]


class Share(NamedTuple):
    """One rank's samples of a batch; `inputs` and `targets` are pytrees of tensors.

    `weight`: factor of this rank's mean loss. These factors make the mean of all ranks' gradients
    equal to the gradient of the whole batch, even if ranks have unequal numbers of samples.
    """

    inputs: Any
    targets: Any
    weight: float

    @property
    def num_samples(self) -> int:
        """Number of samples: the length of the first target tensor."""
        return len(tree_leaves(self.targets)[0])

    def split(self, count: int) -> list["Share"]:
        """Split into at most `count` micro-batches, whose weights add up to this `weight`."""
        num_samples = self.num_samples
        count = max(1, min(count, num_samples))
        if count == 1:
            return [self]
        parts = Batch(self.inputs, self.targets).split(count, num_samples)
        made = [Share(*part, self.weight) for part in parts]
        return [one._replace(weight=self.weight * one.num_samples / num_samples) for one in made]


def shares(
    batches: ShardedBatches | BalancedSampler,
    data: Iterable[Any],
    device: torch.device,
) -> Iterator[Share]:
    """Yield this rank's weighted samples of each step of an epoch, moved to `device`."""
    for samples, whole in zip(data, batches.global_sizes[batches.first_step :], strict=True):
        batch = Batch.of(samples)
        weight = len(tree_leaves(batch.targets)[0]) * batches.world_size / whole
        yield Share(*batch.to(device), weight)


@dataclass(frozen=True)
class Learning:
    """The loss and options of a training step.

    `loss`: the loss function of the recipe called `name`. `accumulate`: number of micro-batches per
    step. `bfloat16`: whether to use torch.autocast. `clip_norm`: maximum total norm of gradients.
    """

    loss: Loss
    accumulate: int = 1
    clip_norm: float | None = None
    bfloat16: bool = False
    name: str = NAMELESS

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context for forward and loss: torch.autocast, or none without `bfloat16`."""
        return torch.autocast(device.type, torch.bfloat16) if self.bfloat16 else nullcontext()

    def forward(self, model: Callable[..., Any], share: Share) -> Tensor:
        """Return the weighted loss of a forward pass; without samples, 0 with zero gradients."""
        with self.autocast(tree_leaves(share.inputs)[0].device):
            outputs = call(model, share.inputs)
            if not share.num_samples:  # a mean of no samples would be NaN, a sum is 0
                leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
                return torch.stack([one.sum() for one in leaves if one.requires_grad]).sum()
            return learnable_loss(self.name, self.loss, outputs, share.targets) * share.weight

    def update(self, optimizer: Optimizer) -> None:
        """Clip gradients, update the optimizer's parameters, and clear gradients."""
        self.clip(optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def clip(self, optimizer: Optimizer) -> None:
        """Clip the gradients of the optimizer's parameters, if `clip_norm` is set."""
        if self.clip_norm is not None:
            trained = [one for group in optimizer.param_groups for one in group["params"]]
            clip_grad_norm_(trained, self.clip_norm)


OF_CLASSES = Learning(class_loss)


def train_step(
    model: Callable[..., Any],
    optimizer: Optimizer,
    source: Iterator[Share],
    recorder: Recorder,
    learning: Learning = OF_CLASSES,
    schedule: LRScheduler | None = None,
) -> Tensor:
    """Train `model` by the next batch of `source`; return this rank's weighted loss."""
    with recorder.phase(Kind.LOAD):
        *before, last = next(source).split(learning.accumulate)
    losses = []
    # All ranks must call `no_sync`, even a rank with so few samples that `before` is empty.
    if learning.accumulate > 1:
        no_sync = getattr(model, "no_sync", nullcontext)  # only replicas have this method
        with recorder.phase(Kind.FORWARD, ACCUMULATED), no_sync():
            for share in before:
                loss = learning.forward(model, share)
                loss.backward()
                losses.append(loss.detach())
    with recorder.phase(Kind.FORWARD):
        loss = learning.forward(model, last)
    with recorder.phase(Kind.BACKWARD):
        loss.backward()
    with recorder.phase(Kind.STEP):
        learning.update(optimizer)
        if schedule is not None:
            schedule.step()
    recorder.end_step()
    return torch.stack([*losses, loss.detach()]).sum() if losses else loss.detach()
