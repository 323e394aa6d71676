"""Unequal batches: gradients weighted by samples, and shares that follow the ranks' speeds.

Each rank's loss is the mean over its own n samples, and the exchange averages W ranks' gradients.
The mean over all N samples is that average if each rank's gradient is first scaled by n W / N. It
is scaled where it enters the module, at its outputs: that costs nothing, reaches each parameter
once, and leaves alone the terms of a loss that no sample takes part in, such as weight decay.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from statistics import median
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
_NUM_WARM_UP = 2  # passes in which caches fill and buckets are made


class SampleCount:
    """The ranks' samples in one forward pass, added up while the pass goes on."""

    def __init__(self, own: int, group: Group) -> None:
        self._own, self._group = own, group
        self._total = torch.tensor([own])
        self._work: dist.Work | None = None
        self._weight: float | None = None

    def begin(self) -> None:
        """Start the all-reduce of the numbers; all ranks must."""
        if self._work is None and self._group.world_size > 1:
            with self._group.naming_lost_ranks():
                self._work = dist.all_reduce(self._total, group=self._group.control, async_op=True)

    def scaled(self, gradient: Tensor) -> Tensor | None:
        """Return the weighted gradient of an output; waits for the other ranks' numbers."""
        if self._weight is None:
            self.begin()
            if self._work is not None:
                with self._group.naming_lost_ranks():
                    self._work.wait(timedelta(seconds=self._group.deadline_s))
            total = int(self._total)
            self._weight = self._own * self._group.world_size / total if total else 0.0
        if self._weight == 1:
            return None
        # The mean loss of no samples may be NaN, which a product with zero would keep.
        return gradient * self._weight if self._weight else torch.zeros_like(gradient)


def _num_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the rows of the first tensor among a module's arguments."""
    first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    if first is None or not first.ndim:
        raise InvalidInput(
            "balance",
            "the module's first tensor has no rows to count samples by",
            hint="say how many there are with model.samples(n) before each forward pass",
        )
    return len(first)


Admit = Callable[[Sequence[float], BalancedSampler], Sequence[int]]


class Balanced:
    """Runs a `replica` of `module`; weights gradients by samples, and balances the batches.

    The result is that of one process on the whole batch, if each rank's loss is a mean over its
    samples. With a `sampler`, each rank measures the seconds in which it computes, not those in
    which it waits; every few steps all agree on new shares and update the sampler. `weighs`: False
    if the caller's losses are weighted already. `admit` gets the ranks' speeds in samples per
    second, once all are known, and the sampler; the ranks that it returns get no samples.
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
        self._said: int | None = None
        self._meter = SpeedMeter(group.device)
        self._shares: FollowingShares | None = None
        if sampler is not None:
            self.follow(sampler)

    def follow(self, sampler: BalancedSampler) -> None:
        """Update this sampler's shares from now on. All ranks must call it together.

        InvalidInput if it is not the same sampler on all ranks, or not made for them.
        """
        self._shares = FollowingShares(sampler, self._group, self._meter, self._admit)

    def samples(self, number: int) -> None:
        """Set the number of this rank's samples in the next forward pass."""
        if number < 0:
            raise InvalidInput("samples", "must be 0 or more", got=number)
        self._said = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        return self.run(self._replica, args, kwargs)

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a forward pass of the module; InvalidInput if its samples cannot be counted."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if in_backward():
            raise InvalidInput(
                "balance",
                "a checkpoint around the whole model hides what is to be weighted",
                hint="put checkpoints inside of it",
            )
        if self._module.training and self._shares is not None:
            self._shares.step()
        own = _num_samples(args, kwargs) if self._said is None else self._said
        self._said = None
        one = _Pass(SampleCount(own, self._group), own, self._meter, weighs=self._weighs)
        # In evaluation there may be no backward pass, which is where ranks wait for the sum.
        if self._weighs and self._module.training:
            one.count.begin()
        # On the module and not around the replica, which may wait for other ranks before the
        # module's forward pass. Ours come first (prepend): at the end of backward our callback must
        # record the time before the replica's waits for the exchange.
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

    def shared(self, statistics: Statistics) -> Statistics:
        """Return these statistics with the shares, where batches follow the ranks' speeds."""
        if self._shares is None:
            return statistics
        balance = self._shares.balance
        return replace(statistics, shares=balance.shares, samples_per_s=balance.samples_per_s)


class FollowingShares:
    """A sampler's shares that follow the ranks' speeds: every few steps all agree on new ones.

    All ranks make it together. InvalidInput if it is not the same sampler on all ranks, or not made
    for them.
    """

    def __init__(
        self, sampler: BalancedSampler, group: Group, meter: "SpeedMeter", admit: Admit
    ) -> None:
        if (sampler.rank, sampler.world_size) != (group.rank, group.world_size):
            raise InvalidInput(
                "sampler",
                f"made for rank {sampler.rank} of {sampler.world_size}, but this is rank "
                f"{group.rank} of {group.world_size}",
            )
        own = [sampler.num_samples, sampler.batch_size, sampler.seed, list(sampler.most)]
        if any(row != own for row in group.gather(own)):
            raise InvalidInput(
                "sampler", "samples, batch size, seed and most must be the same on all ranks"
            )
        self._sampler, self._group, self._meter, self._admit = sampler, group, meter, admit
        self.balance = Balance(sampler.batch_size, sampler.world_size, sampler.most)
        self._left = _NUM_WARM_UP + self.balance.interval

    def step(self) -> None:
        """Count a step, before which all ranks may agree on new shares."""
        self._left -= 1
        if self._left >= 0:
            return
        sampler, balance = self._sampler, self.balance
        rows = self._group.gather([self._meter.seconds_per_sample(), sampler.drawn])
        known_before = None not in balance.samples_per_s
        # All ranks record the same rows, and so compute the same shares.
        shares = balance.record([seconds for seconds, _ in rows])
        speeds = [speed for speed in balance.samples_per_s if speed is not None]
        if not known_before and len(speeds) == self._group.world_size:
            for rank in self._admit(speeds, sampler):
                shares = balance.exclude(rank)
        if shares != sampler.shares:
            epoch, step = max(place for _, place in rows)
            sampler.update(shares, (epoch, step))
        self._left = balance.interval - 1


class SpeedMeter:
    """This rank's seconds per sample in forward and backward, without waiting for others."""

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_for(device)
        self._passes = deque[tuple[int, list[Any]]](maxlen=_MOST_PASSES)  # samples, four marks
        self._num_warm_up = _NUM_WARM_UP

    def watch(self, outputs: Sequence[Tensor], num_samples: int, marks: list[Any]) -> None:
        """Record when a backward pass reaches these outputs, and when its computation ends."""

        def reached(gradient: Tensor) -> None:
            if len(marks) == 2:  # the first output, in the first backward pass
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
        """Return the median since the last call; None if there were no samples."""
        passes = list(self._passes)
        self._passes.clear()
        # At once: the clock of a GPU waits for the device.
        times = self.clock.seconds([mark for _, marks in passes for mark in marks])
        seconds = []
        for number, (num_samples, _) in enumerate(passes):
            entered, left, reached, ended = times[4 * number : 4 * number + 4]
            seconds.append((left - entered + ended - reached) / num_samples)
        # Never zero: shares are in proportion to its inverse.
        return max(median(seconds), 1e-12) if seconds else None


@dataclass(frozen=True)
class _Pass:
    """One forward pass of a module: its marks in time, and hooks that weight its gradients."""

    count: SampleCount
    num_samples: int
    meter: SpeedMeter
    weighs: bool
    marks: list[Any] = field(default_factory=list)

    def mark(self, *_: object) -> None:
        """Mark that the pass enters or leaves the module."""
        self.marks.append(self.meter.clock.mark())

    def left(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Weight the gradients of the outputs, and measure the backward pass from there."""
        tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        leaves = [one for one in tensors if one.requires_grad]
        if not leaves:
            raise InvalidInput(
                "balance",
                "the module's outputs hold no tensor with a gradient to be weighted",
                hint="return tensors, or tuples, lists and dictionaries of them",
            )
        # Scaling waits for the others, and so comes before the clock of backward starts.
        for leaf in leaves if self.weighs else ():
            leaf.register_hook(self.count.scaled)
        self.meter.watch(leaves, self.num_samples, self.marks)


@contextmanager
def _statistics_kept(module: nn.Module, num_samples: int) -> Iterator[None]:
    """Leave running statistics alone in a forward pass without samples, which have no mean."""
    layers = [] if num_samples else [one for one in module.modules() if isinstance(one, _BatchNorm)]
    training = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, before in zip(layers, training, strict=True):
            layer.training = before
