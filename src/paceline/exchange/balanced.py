"""Weight gradients by ranks' numbers of samples, and balance batches by ranks' speeds.

Each rank's loss is the mean over its n samples, and the all-reduce averages the gradients of W
ranks. To get the mean over all N samples, each rank scales its gradient by n W / N. `Balanced`
scales the gradients of the module's outputs, before backward reaches the parameters. Gradients of
loss terms that depend only on parameters, such as weight decay, are not scaled.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from statistics import median, mode
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from paceline.core.balance import Balance
from paceline.core.errors import InvalidInput
from paceline.exchange.readiness import in_backward
from paceline.exchange.replica import ModelReplica, Statistics
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.training.data.sampler import BalancedSampler

_MOST_PASSES = 256
_NUM_WARM_UP = 2
logger = logging.getLogger(__name__)


def _num_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the batch size: the number of rows of the first tensor argument of forward."""
    first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    if first is None or not first.ndim:
        problem = "requires a batch dimension in the module's first tensor"
        raise InvalidInput("balance", problem, hint="or call model.samples(n) before each pass")
    return len(first)


Admit = Callable[[Sequence[float], BalancedSampler], Sequence[int]]


class Balanced:
    """Wraps a data-parallel `replica` of `module`: weights its gradients, and balances batches.

    If each rank's loss is a mean over its samples, the averaged gradients equal those of a single
    process with the whole batch. With a `sampler`, each rank measures its computing time, which
    excludes waits for other ranks. Every few steps, all ranks agree on a new number of samples for
    each rank, and update the sampler. `weighs`: False if the caller's losses are already weighted.
    `admit(speeds, sampler)`: called once, when the speeds of all ranks (samples per second) are
    known; returns the ranks that get no samples from then on.
    """

    def __init__(
        self,
        replica: ModelReplica,
        module: nn.Module,
        group: Group,
        sampler: BalancedSampler | None = None,
        *,
        weighs: bool = True,
        admit: Admit = lambda speeds, sampler: (),
    ) -> None:
        self._replica, self._module, self._group = replica, module, group
        self.record, self.close, self.no_sync = replica.record, replica.close, replica.no_sync
        self.prepare, self.exchange_state = replica.prepare, replica.exchange_state
        self.load_exchange_state, self.statistics = replica.load_exchange_state, replica.statistics
        self._weighs, self._admit = weighs, admit
        self._num_samples: int | None = None  # set by `samples` for the next forward pass
        self._meter = SpeedMeter(group.device)
        self._shares: BalancedShares | None = None
        if sampler is not None:
            self.follow(sampler)

    def follow(self, sampler: BalancedSampler) -> None:
        """Balance batches of `sampler`; collective; InvalidInput if it does not fit the group."""
        self._shares = BalancedShares(sampler, self._group, self._meter, self._admit)

    def samples(self, number: int) -> None:
        """Set the number of samples in this rank's next forward pass."""
        if number < 0:
            raise InvalidInput("samples", "must be 0 or more", got=number)
        self._num_samples = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replica's forward pass, as `run` does."""
        return self.run(self._replica, args, kwargs)

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `forward`, and weight the gradients of its outputs by the number of samples."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if in_backward():
            problem = "cannot weight a model that is called within an activation checkpoint"
            raise InvalidInput("balance", problem, hint="use torch's checkpoint inside the model")
        if self._module.training and self._shares is not None:
            self._shares.step()
        own = _num_samples(args, kwargs) if self._num_samples is None else self._num_samples
        self._num_samples = None
        one = _Pass(own, self._group, self._meter, self._weighs)
        # not in evaluation, which has no backward pass to wait for the sum that `begin` starts
        if self._weighs and self._module.training:
            one.begin()
        # To exclude waits for other ranks, hooks on the module itself record the times: the replica
        # may wait before it calls the module. Hooks are prepended so that their callback at the end
        # of backward runs before the replica's callback, which waits for the all-reduce.
        handles = [
            self._module.register_forward_pre_hook(one.mark, prepend=True),
            self._module.register_forward_hook(one.left, prepend=True),
            self._module.register_forward_hook(one.mark),
        ]
        try:
            with _statistics_kept(self._module, own):
                return forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    @property
    def shares(self) -> tuple[int, ...]:
        """Each rank's number of samples per step; empty without a sampler."""
        return () if self._shares is None else self._shares.balance.shares

    def shared(self, statistics: Statistics) -> Statistics:
        """Add all ranks' batch sizes and speeds to `statistics`, if batches are balanced."""
        if self._shares is None:
            return statistics
        balance = self._shares.balance
        return replace(statistics, shares=balance.shares, samples_per_s=balance.samples_per_s)


class BalancedShares:
    """Adapts shares (each rank's samples per step) to the ranks' speeds; created collectively."""

    def __init__(
        self, sampler: BalancedSampler, group: Group, meter: "SpeedMeter", admit: Admit
    ) -> None:
        if (sampler.rank, sampler.world_size) != (group.rank, group.world_size):
            got = f"rank {sampler.rank} of {sampler.world_size}"
            problem = f"must be created for rank {group.rank} of {group.world_size}"
            raise InvalidInput("sampler", problem, got=got)
        own = [sampler.num_samples, sampler.batch_size, sampler.seed, list(sampler.most)]
        if any(row != own for row in group.gather(own)):
            problem = "must have equal samples, batch_size, seed and limits (most) on all ranks"
            raise InvalidInput("sampler", problem)
        self._sampler, self._group, self._meter, self._admit = sampler, group, meter, admit
        self.balance = Balance(sampler.batch_size, sampler.world_size, sampler.most)
        self._left = _NUM_WARM_UP + self.balance.interval
        self._began_s: float | None = None  # when the last step began
        self._steps_s = deque[float](maxlen=_MOST_PASSES)  # of the steps since the last agreement
        # each rank's number of samples in its passes before the last change of the shares
        self._before: list[int | None] = []

    def step(self) -> None:
        """Begin a step; every few steps, agree on each rank's number of samples; collective."""
        now_s = time.monotonic()
        if self._began_s is not None:
            self._steps_s.append(now_s - self._began_s)
        self._began_s = now_s
        self._left -= 1
        if self._left >= 0:
            return
        sampler, balance = self._sampler, self.balance
        meter, own_s = self._meter, median(self._steps_s)
        self._steps_s.clear()
        measured = [meter.seconds_per_sample(), sampler.drawn, meter.num_samples, own_s]
        rows = self._group.gather(measured)
        last = [num_samples for _, _, num_samples, _ in rows]
        if None not in last and last == self._before:
            # DataLoaders had prefetched most of these batches before the shares changed.
            self._left = balance.interval - 1
            return
        self._before = []
        known_before = None not in balance.samples_per_s
        balance.shares = sampler.shares  # a sampler that resumed from a checkpoint has others
        # all ranks record the same speeds, so all ranks compute the same shares
        step_s = min(own_s for *_, own_s in rows)
        shares = balance.record([seconds for seconds, *_ in rows], step_s)
        speeds = [speed for speed in balance.samples_per_s if speed is not None]
        if not known_before and len(speeds) == self._group.world_size:
            for rank in self._admit(speeds, sampler):
                shares = balance.exclude(rank)
        if shares != sampler.shares:
            if self._group.rank == 0:
                before, after = (" + ".join(map(str, one)) for one in (sampler.shares, shares))
                logger.info("balance: %s samples from now on, before %s", after, before)
            epoch, step = max(place for _, place, *_ in rows)
            sampler.update(shares, (epoch, step))
            self._before = last
        self._left = balance.interval - 1


class SpeedMeter:
    """Measures this rank's forward and backward seconds per sample, excluding waits for ranks."""

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_for(device)
        # For each forward pass: its number of samples, and four clock marks (begin and end of the
        # module's forward, begin and end of its backward).
        self._passes = deque[tuple[int, list[Any]]](maxlen=_MOST_PASSES)
        self._num_warm_up = _NUM_WARM_UP
        self.num_samples: int | None = None  # in most of the passes that were timed

    def watch(self, outputs: Sequence[Tensor], num_samples: int, marks: list[Any]) -> None:
        """Append two times to `marks`: when backward reaches `outputs`, and when backward ends."""

        def reached(gradient: Tensor) -> None:
            if len(marks) == 2:  # mark only the first output that backward reaches
                marks.append(self.clock.mark())
                Variable._execution_engine.queue_callback(ended)

        def ended() -> None:
            if len(marks) != 3:
                return
            marks.append(self.clock.mark())
            if self._num_warm_up:
                self._num_warm_up -= 1
            elif num_samples:
                self._passes.append((num_samples, marks))

        for output in outputs:
            output.register_hook(reached)

    def seconds_per_sample(self) -> float | None:
        """Return the median seconds per sample since the last call; None if nothing was timed.

        Uses only the most frequent number of samples, `num_samples`, because fixed costs make
        seconds per sample depend on it.
        """
        if self._passes:
            self.num_samples = mode(num_samples for num_samples, _ in self._passes)
        passes = [one for one in self._passes if one[0] == self.num_samples]
        self._passes.clear()
        # convert all marks in one call, because each call waits for the GPU
        times = self.clock.seconds([mark for _, marks in passes for mark in marks])
        seconds = []
        for number, (num_samples, _) in enumerate(passes):
            entered, left, reached, ended = times[4 * number : 4 * number + 4]
            seconds.append((left - entered + ended - reached) / num_samples)
        # never return 0, because a rank's share is proportional to 1 / seconds
        return max(median(seconds), 1e-12) if seconds else None


class _Pass:
    """A forward pass with its backward pass: weights the gradients, and measures the times."""

    def __init__(self, num_samples: int, group: Group, meter: SpeedMeter, weighs: bool) -> None:
        self._num_samples, self._group = num_samples, group
        self._meter, self._weighs = meter, weighs
        self._total = torch.tensor([num_samples])
        self._work: dist.Work | None = None
        self._weight: float | None = None
        self._marks: list[Any] = []

    def begin(self) -> None:
        """Start to sum the numbers of samples over ranks; collective."""
        if self._work is None and self._group.world_size > 1:
            with self._group.naming_lost_ranks():
                self._work = dist.all_reduce(self._total, group=self._group.control, async_op=True)

    def mark(self, *_: object) -> None:
        """Record the time when the module's forward pass begins or ends; a forward hook."""
        self._marks.append(self._meter.clock.mark())

    def left(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Register hooks on `outputs` that weight gradients and time backward; a forward hook."""
        tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        leaves = [one for one in tensors if one.requires_grad]
        if not leaves:
            problem = "requires outputs with gradients: tensors, or tuples, lists or dicts of them"
            raise InvalidInput("balance", problem)
        # Register `_scaled`, which waits for other ranks, before the meter's hooks: hooks run in
        # this order, so the meter does not measure the wait.
        for leaf in leaves if self._weighs else ():
            leaf.register_hook(self._scaled)
        self._meter.watch(leaves, self._num_samples, self._marks)

    def _scaled(self, gradient: Tensor) -> Tensor | None:
        """Wait for the sum of samples; return the weighted gradient, or None for weight 1."""
        if self._weight is None:
            self.begin()
            if self._work is not None:
                with self._group.naming_lost_ranks():
                    self._work.wait(timedelta(seconds=self._group.deadline_s))
            total = int(self._total)
            self._weight = self._num_samples * self._group.world_size / total if total else 0.0
        if self._weight == 1:
            return None
        # weight 0: without samples, the mean loss may be NaN, and NaN * 0 would still be NaN
        return gradient * self._weight if self._weight else torch.zeros_like(gradient)


@contextmanager
def _statistics_kept(module: nn.Module, num_samples: int) -> Iterator[None]:
    """Keep BatchNorm's running statistics unchanged in a forward pass if `num_samples` is 0."""
    layers = [] if num_samples else [one for one in module.modules() if isinstance(one, _BatchNorm)]
    training = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, before in zip(layers, training, strict=True):
            layer.training = before
