"""Hold and update the parameters of body and head (Du et al. 2017, sections 3.1 and 3.3).

Updates are asynchronous: the optimizer applies gradients to the current parameters. The staleness
of gradients is the number of updates since the worker fetched the parameters that it used.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.errors import InvalidInput, NonFinite, StepDiscarded, first_line
from paceline.core.outcome import Updates
from paceline.core.plan import Kind
from paceline.exchange.step import OF_CLASSES, Learning, Share
from paceline.rpc import tensor_parts
from paceline.rpc.value_checks import LARGEST_LOSS, ValueChecks, naming
from paceline.strategies.wheel import protocol
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.staleness import (
    HeadGradients,
    LossSum,
    WorkerProgress,
    Workers,
    WorkerState,
)
from paceline.training.models.halves import Halves, trainable
from paceline.training.recipes.recipe import described

Watch = Callable[[int, int, Kind], AbstractContextManager[None]]
Losses = Mapping[int, LossSum]  # sums of losses by epoch
# The gradients of the activations, the weighted loss, and the gradients of the head.
Answered = tuple[Tensor, float, list[Tensor]]
ALL_WORKERS = "all workers"  # this strategy's only key in `Updates.staleness`


@dataclass
class GradientSum:
    """The sum of the gradients of `count` steps, as a vector of all parameters' gradients.

    A step's weight in the sum is its number of samples, divided by the mean number of samples per
    step. `version`: the version of the oldest parameters that workers used. `losses`: the sums of
    losses, by epoch.
    """

    vector: Tensor
    version: int
    count: int = 1
    losses: dict[int, LossSum] = field(default_factory=lambda: defaultdict(LossSum))


class LentHead:
    """The head (last layers) on a device; main memory lends it parameters when needed.

        server, in main memory     parameters, optimizer state, waiting gradients
                |  parameters                             ^  gradients
                v                                         |
        hub's device               head (last layers): forward, backward

    The device has the head's parameters only while it computes an answer to a worker (section
    3.4.2).

    `model`: a second copy of the model. `head`: the head of this copy, which moves to the device.
    `kept`: the head in main memory.
    """

    def __init__(
        self, model: nn.Module, head: nn.Module, kept: nn.Module, device: torch.device
    ) -> None:
        self.model, self.head = model, head.to(device)
        self._kept, self.device = kept, device
        self.parameters = trainable(self.head)  # have values only during an answer
        self.empty()

    def fill(self) -> None:
        """Copy the parameters and buffers from main memory to the device."""
        for own, kept in zip(self.head.parameters(), self._kept.parameters(), strict=True):
            own.data = kept.detach().to(self.device)
        self._copy_buffers(self._kept, self.head)

    def done(self, gradients: list[Tensor]) -> list[Tensor]:
        """Copy gradients and buffers to main memory after an answer; return the gradients."""
        self._copy_buffers(self.head, self._kept)
        return [one.cpu() for one in gradients]

    def empty(self) -> None:
        """Free the parameters' memory on the device."""
        for own in self.head.parameters():
            own.grad = None
            own.data = torch.empty(0, dtype=own.dtype, device=self.device)

    @torch.no_grad()
    def _copy_buffers(self, source: nn.Module, target: nn.Module) -> None:
        for found, own in zip(source.buffers(), target.buffers(), strict=True):
            own.copy_(found)


class ParameterServer:
    """Holds a model, and updates its parameters with a torch optimizer.

    `halves`: the model's first layers, the body, and its last layers, the head, which runs here.
    `config`: has the number of workers, and the limit and the decay of staleness.
    `updates_per_step`: the number of updates in a step of all workers, by which the learning rate
    is divided. `learning`: the loss, and the norm to which gradients are clipped. `schedule`: the
    learning-rate schedule, which advances with each update. `checks_values`: False in rehearsals,
    whose values are zeros. `lent`: the head on a device, if the model is in main memory.
    `steps_per_epoch`: the number of steps in an epoch, by which losses are summed.

    Not thread-safe. `watch(worker, step, kind)` returns a context manager, which the server enters
    for each update, and for each forward, backward and copy of the head.
    """

    def __init__(
        self,
        model: nn.Module,
        halves: Halves,
        optimizer: Optimizer,
        config: Wheel,
        *,
        updates_per_step: int = 1,
        learning: Learning = OF_CLASSES,
        schedule: LRScheduler | None = None,
        checks_values: bool = True,
        lent: LentHead | None = None,
        steps_per_epoch: int = 1,
    ) -> None:
        _check_optimizer(optimizer, halves, config.staleness_decay, updates_per_step)
        self._body = halves.body_parameters
        self.parameters = [*self._body, *halves.head_parameters]
        self.model, self.halves, self.optimizer = model, halves, optimizer
        self.lent = lent
        self.version = 0
        self.workers = Workers(config.workers, config.staleness)
        self.watch: Watch = lambda *_: nullcontext()
        self.schedule = schedule
        self._learning, self._updates_per_step = learning, updates_per_step
        self.steps_per_epoch = steps_per_epoch
        self._decay = config.staleness_decay
        is_clipped = learning.clip_norm is not None
        self.checks = ValueChecks(
            self.parameters, reads_values=checks_values, is_clipped=is_clipped
        )
        self._staleness: Counter[int] = Counter()
        optimizer.zero_grad(set_to_none=True)

    @property
    def device(self) -> torch.device:
        """The device on which the head computes."""
        return self._body[0].device if self.lent is None else self.lent.device

    @property
    def updates(self) -> Updates:
        """Counts of updates by worker and by staleness, including updates before a resume."""
        staleness = dict(sorted(self._staleness.items()))
        missed = sum(key * count for key, count in staleness.items())
        return Updates(
            self.version,
            {f"worker{number}": one.num_updates for number, one in enumerate(self.workers.all)},
            {ALL_WORKERS: staleness},
            missed / max(1, self._staleness.total()),
        )

    def may_begin(self, worker: int, step: int) -> bool:
        """Return whether `config.staleness` allows the worker to begin this step now."""
        return self.workers.may_begin(worker, step)

    def body_parameters(self) -> tuple[int, Tensor]:
        """Return the number of updates so far, and a copy of the body's parameters as a vector."""
        return self.version, tensor_parts.flatten(self._body)

    def vector_in(self, part: memoryview) -> Tensor:
        """Decode the values of all parameters as a vector; InvalidInput for a wrong size."""
        count, like = sum(one.numel() for one in self.parameters), self.parameters[0]
        return tensor_parts.values_of(part, like.dtype, count).to(like.device)

    def answer(
        self,
        worker: int,
        step: int,
        version: int,
        activations: Tensor,
        targets: Any,
        weight: float,
    ) -> tuple[Tensor, float]:
        """Run the head (last layers) forward and backward; return activation gradients and loss.

        `version`: the version of the body's parameters that computed `activations`. `weight`:
        scales the batch's mean loss, so that all samples of a step have equal weight. The server
        keeps the head's gradients until the body's gradients arrive. Raises InvalidInput if the
        tensors do not fit, and NonFinite for NaN, infinity or too large a loss.
        """
        who, share = f"worker {worker}, step {step}", Share(activations, targets, weight)
        self.checks.activations(who, worker, activations)
        with naming(who):
            of_inputs, loss, gradients = self._run_head(worker, step, share)
        self.checks.finite(who, "head's gradients", [of_inputs, *gradients])
        # If a worker has no samples in this step, weight and loss are 0: do not divide by 0.
        num_samples = share.num_samples
        total = loss / weight * num_samples if weight else 0.0
        if not abs(total) <= LARGEST_LOSS * max(1, num_samples):
            raise NonFinite(f"{who}: the loss is {loss:.3g}, which is too large or not finite")
        half = HeadGradients(step, version, gradients, LossSum(num_samples, total))
        self.workers.of(worker).half = half
        return of_inputs, loss

    def update(self, worker: int, step: int, version: int, gradients: Tensor) -> Losses:
        """Update all parameters with the body's gradients of a step; return its loss by epoch.

        Raises StepDiscarded if the server has dropped the head's gradients, because the worker was
        lost after the answer. Raises NonFinite or InvalidInput for wrong gradients. After an error,
        the parameters are unchanged, and the step is void.
        """
        own = self.workers.of(worker)
        who = f"worker {worker}, step {step}"
        half, own.half = own.half, None
        if half is None or half.step != step:
            raise StepDiscarded(f"{who}: the hub has dropped the step; the worker repeats it")
        if half.version != version:
            problem = f"gradients and activations must have the same version, {half.version}"
            raise InvalidInput(who, problem, got=version)
        with naming(who):
            of_body = tensor_parts.views(gradients.detach(), self._body)
        self.checks.gradients(who, "body's gradients", worker, [gradients, *half.gradients])
        losses = {step // self.steps_per_epoch: half.loss}
        with self.watch(worker, step, Kind.STEP):
            self._apply(version, [*of_body, *half.gradients], losses)
        own.complete(step + 1)
        return losses

    def merge(self, worker: int, step: int, mean: GradientSum, below: tuple[int, ...]) -> None:
        """Update all parameters with a child hub's mean gradients.

        `step`: the number of steps that all workers of the child hub have completed. `below`: the
        next step of each of these workers. Raises NonFinite or InvalidInput for wrong gradients.
        """
        own = self.workers.of(worker)
        who = f"worker {worker}, step {step}"
        with naming(who):
            gradients = tensor_parts.views(mean.vector, self.parameters)
        self.checks.gradients(who, "child hub's gradients", worker, [mean.vector])
        self._apply(mean.version, gradients, mean.losses)
        own.complete(step, below)

    def restore(
        self, version: int, workers: Sequence[WorkerProgress], staleness: Mapping[int, int]
    ) -> None:
        """Restore the version, the workers' progress, and the counts of staleness."""
        self.version, self._staleness = version, Counter(staleness)
        self.workers.all = [WorkerState(**asdict(one)) for one in workers]
        self.optimizer.zero_grad(set_to_none=True)

    def _apply(self, version: int, gradients: list[Tensor], losses: Losses) -> None:
        """Take an optimizer step with gradients that belong to parameters of `version`.

        `losses`: the update's losses by epoch, which only a child hub needs.
        """
        staleness = self.version - version
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._learning.clip(self.optimizer)
        divisor = self._updates_per_step * (1 + self._decay * staleness)
        groups = [] if divisor == 1 else self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate / divisor
        self.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        if self.schedule is not None:
            self.schedule.step()
        self.version += 1
        self._staleness[staleness] += 1

    def _run_head(self, worker: int, step: int, share: Share) -> Answered:
        """Run the head; return activation gradients, weighted loss, and the head's gradients."""
        lent = self.lent
        if lent is None:
            return self._run(self.halves.head, worker, step, share)
        # Do not record copies of a head without layers, which has nothing to copy.
        watch: Watch = self.watch if lent.parameters else lambda *_: nullcontext()
        try:
            with watch(worker, step, Kind.H2D):
                lent.fill()
            of_inputs, loss, gradients = self._run(lent.head, worker, step, share)
            with watch(worker, step, Kind.D2H):
                return of_inputs, loss, lent.done(gradients)
        finally:
            lent.empty()

    def _run(self, head: nn.Module, worker: int, step: int, share: Share) -> Answered:
        inputs = share.inputs.detach().requires_grad_()
        with torch.enable_grad(), self.watch(worker, step, Kind.FORWARD):
            loss = self._loss(head, share._replace(inputs=inputs))
        with self.watch(worker, step, Kind.BACKWARD):
            loss.backward()
        gradients = protocol.take_gradients(self.halves.head_names, trainable(head))
        if inputs.grad is None:
            raise InvalidInput("loss", "does not depend on the outputs of the worker's layers")
        return inputs.grad, float(loss.detach()), gradients

    def _loss(self, head: nn.Module, share: Share) -> Tensor:
        """Return the weighted loss; InvalidInput if the head or the loss fails."""
        try:
            return self._learning.forward(head, share)
        except InvalidInput:
            raise
        except Exception as error:
            problem = (
                f"head or loss fails on activations {described(share.inputs)} and targets "
                f"{described(share.targets)}: {first_line(error)}"
            )
            raise InvalidInput("model", problem) from error


def _check_optimizer(
    optimizer: Optimizer, halves: Halves, staleness_decay: float, updates_per_step: int
) -> None:
    """Raise InvalidInput if the optimizer does not suit the server, or lacks a model parameter."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise InvalidInput("optimizer", "must work with one dense gradient per step", got=kind)
    if any("lr" not in group for group in optimizer.param_groups):
        if staleness_decay:
            raise InvalidInput("staleness_decay", f"requires an optimizer with lr, not {kind}")
        if updates_per_step > 1:
            hint = "or set workers=1"
            raise InvalidInput("optimizer", "requires a learning rate (lr)", got=kind, hint=hint)
    updated = {id(one) for group in optimizer.param_groups for one in group["params"]}
    names = (*halves.body_names, *halves.head_names)
    own = (*halves.body_parameters, *halves.head_parameters)
    for name, parameter in zip(names, own, strict=True):
        if id(parameter) not in updated:
            raise InvalidInput(
                "optimizer", f"must update all parameters, but lacks {name!r}", got=kind
            )
