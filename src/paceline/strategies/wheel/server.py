"""The parameter server, and the head's answers beside it (Du et al. 2017, sections 3.1 and 3.3).

    fetch       body parameters, and the version that they are of
    answer      activations and labels  ->  residuals; the head's gradients wait here
    update      the body's gradients: both halves are there, and the optimizer takes its step

Every update is asynchronous SGD: a gradient is applied to whatever the parameters are by then. Its
staleness is the number of updates since its body parameters were fetched.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput, NonFinite, StepDiscarded
from paceline.core.plan import Kind
from paceline.strategies.wheel.answers import answer, check_labels
from paceline.strategies.wheel.flat import all_finite, flatten, views
from paceline.strategies.wheel.gathered import Gathered
from paceline.strategies.wheel.halves import Halves
from paceline.strategies.wheel.updates import apply, check_optimizer
from paceline.strategies.wheel.workers import Half, Progress, Workers

Watch = Callable[[int, int, Kind], AbstractContextManager[None]]


@dataclass(frozen=True)
class ServerStatistics:
    """The updates so far, by worker, and how many of them had which staleness."""

    version: int
    steps: tuple[int, ...]
    staleness: Mapping[int, int]

    @property
    def mean_staleness(self) -> float:
        """The staleness of an update on average; 0 if there was none."""
        counted = sum(self.staleness.values())
        return sum(key * count for key, count in self.staleness.items()) / max(1, counted)


class ParameterServer:
    """Holds the parameters of `model`, and updates them with any optimizer of torch.

    With a `staleness`, no worker begins a step more than that many steps before the slowest live
    one has completed its own; 0 keeps them in step, None leaves them free. An update with
    gradients that are `s` updates old has the learning rate divided by `1 + staleness_decay * s`.
    A worker is named by its number, below `num_workers`. In a rehearsal, whose values are all
    zeros, `looks` is False: values are not looked at.

    Not to be used by two threads at a time. `watch` may be set: what it returns for (worker, step,
    kind) is entered around each forward and backward of the head, and each update.
    """

    def __init__(
        self,
        model: nn.Module,
        halves: Halves,
        optimizer: torch.optim.Optimizer,
        *,
        num_workers: int,
        staleness: int | None,
        staleness_decay: float = 0.0,
        looks: bool = True,
    ) -> None:
        check_optimizer(optimizer, halves, staleness_decay)
        self.model = model
        self.halves = halves
        self.optimizer = optimizer
        self.version = 0
        self.workers = Workers(num_workers, staleness)
        self.watch: Watch = lambda worker, step, kind: nullcontext()
        self._decay = staleness_decay
        self._looks = looks
        self._staleness: Counter[int] = Counter()
        self._body, self._head = halves.body_parameters, halves.head_parameters
        optimizer.zero_grad(set_to_none=True)

    @property
    def statistics(self) -> ServerStatistics:
        """What was done so far, before a snapshot that was loaded, too."""
        steps = tuple(worker.num_updates for worker in self.workers.all)
        staleness = MappingProxyType(dict(sorted(self._staleness.items())))
        return ServerStatistics(self.version, steps, staleness)

    def joined(self, worker: int) -> None:
        """Count on the worker, from now on until it is lost."""
        self.workers.joined(worker)

    def lost(self, worker: int) -> None:
        """Wait for the worker no longer: it is away, or done. Its half-done step is dropped."""
        self.workers.lost(worker)

    def next_step(self, worker: int) -> int:
        """Return the step that follows the last one of the worker that was applied."""
        return self.workers.of(worker).next_step

    def may_begin(self, worker: int, step: int) -> bool:
        """Return whether the worker may begin a step now; ask again after any update."""
        return self.workers.may_begin(worker, step)

    def body_parameters(self) -> tuple[int, Tensor]:
        """Return the version, and a copy of the body's parameters as one vector."""
        return self.version, flatten(self._body)

    def whole(self) -> tuple[int, Tensor, Tensor]:
        """Return the version, and copies of the body's and the head's parameters as vectors."""
        return self.version, flatten(self._body), flatten(self._head)

    def answer(
        self,
        worker: int,
        step: int,
        version: int,
        activations: Tensor,
        labels: Tensor,
        weight: float,
    ) -> tuple[Tensor, float]:
        """Run the head forward and backward; return the residuals and the loss.

        `version` is that of the parameters with which the body computed `activations`; `weight`
        scales the mean loss of the batch's samples, as in a `Share`. The head's gradients wait for
        those of the body; they replace those of the same step begun before. A step that was applied
        already is answered, and nothing of it is kept. InvalidInput if the tensors do not fit,
        NonFinite if a gradient is NaN or infinite.
        """
        own = self.workers.of(worker)
        who = f"worker {worker}, step {step}"
        self._check_version(who, version)
        self._check_activations(who, activations, labels)
        with _named(who):
            answered = answer(
                self.halves,
                activations,
                labels,
                weight,
                lambda kind: self.watch(worker, step, kind),
            )
        self._check_finite(who, "head", [answered.residuals, *answered.gradients])
        if step >= own.next_step:
            own.half = Half(step, version, answered.gradients)
        return answered.residuals, answered.loss

    def update(self, worker: int, step: int, version: int, gradients: Tensor) -> int:
        """Update all parameters, as the body's gradients complete a step; return the new version.

        A step that was applied already is not applied again: its version is returned. Raises
        StepDiscarded if the other half is not there, as the worker was lost in between: the worker
        begins the step again. After NonFinite, or InvalidInput for gradients that do not fit, the
        parameters are as before, and the step is to be begun again.
        """
        own = self.workers.of(worker)
        who = f"worker {worker}, step {step}"
        if (applied := self.workers.applied(worker, step)) is not None:
            return applied
        half, own.half = own.half, None
        if half is None or half.step != step:
            raise StepDiscarded(f"{who}: the head's gradients are not there; begin the step again")
        if half.version != version:
            raise InvalidInput(
                f"{who}: gradients of version {version}, activations of version {half.version}"
            )
        with _named(who):
            of_body = views(gradients.detach(), self._body)
        self._check_finite(who, "body", [gradients])
        with self.watch(worker, step, Kind.STEP):
            self._apply(version, of_body, half.gradients)
        own.completed(step, self.version)
        return self.version

    def merge(self, worker: int, step: int, gathered: Gathered, below: tuple[int, ...]) -> None:
        """Update all parameters with the mean of what a child hub has gathered.

        All of its workers have done `step` steps, and `below` has the next step of each. It is
        applied whatever was before: that it comes once is the wire's promise. Errors are those of
        `update`.
        """
        own = self.workers.of(worker)
        who = f"worker {worker}, step {step}"
        self._check_version(who, gathered.version)
        with _named(who):
            of_body, of_head = views(gathered.body, self._body), views(gathered.head, self._head)
        self._check_finite(who, "child hub", [gathered.body, gathered.head])
        self._apply(gathered.version, of_body, of_head)
        own.gathered(step, self.version, below)

    def passed(self, worker: int, step: int) -> None:
        """Note that a worker has so many steps behind it, whoever has done them."""
        own = self.workers.of(worker)
        own.next_step = max(own.next_step, step)

    def _apply(self, version: int, body: list[Tensor], head: list[Tensor]) -> None:
        """Take a step with gradients that were computed with parameters of a version."""
        staleness = self.version - version
        parameters = [*self._body, *self._head]
        apply(self.optimizer, parameters, [*body, *head], 1 + self._decay * staleness)
        self.version += 1
        self._staleness[staleness] += 1

    def restore(self, version: int, workers: list[Progress], staleness: Mapping[int, int]) -> None:
        """Go on where another server was; the parameters and the optimizer's state are there."""
        self.version, self._staleness = version, Counter(staleness)
        self.workers.restore(workers)
        self.optimizer.zero_grad(set_to_none=True)

    def _check_version(self, who: str, version: int) -> None:
        if not 0 <= version <= self.version:
            raise InvalidInput(
                f"{who}: parameters of version {version}; the server has made {self.version}"
            )

    def _check_activations(self, who: str, activations: Tensor, labels: Tensor) -> None:
        dtype, crossing = self._head[0].dtype, self.halves.crossing
        shape = tuple(activations.shape[1:])
        if activations.dtype != dtype or (crossing and shape != crossing):
            raise InvalidInput(
                f"{who}: activations {activations.dtype} of shape {shape} a sample, where the head "
                f"takes {dtype} of shape {crossing}"
            )
        check_labels(who, labels, len(activations))

    def _check_finite(self, who: str, half: str, gradients: list[Tensor]) -> None:
        if self._looks and not all_finite(gradients):
            raise NonFinite(
                f"{who}: the {half}'s gradients are NaN or infinite, and were not applied; "
                "choose a smaller learning_rate"
            )


@contextmanager
def _named(who: str) -> Iterator[None]:
    """Have an InvalidInput say whose fault it is."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{who}: {error}") from None
