"""A replica whose rank takes a part of each batch that follows its speed."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.core.errors import InvalidInput
from paceline.data.balanced import BalancedSampler
from paceline.exchange.readiness import in_backward
from paceline.exchange.replica import Replica, Statistics
from paceline.exchange.weights import Count, differentiable, num_samples, scale_gradients
from paceline.links.group import Group
from paceline.record.clock import clock_for
from paceline.record.recorder import Recorder
from paceline.tune.balance import Balance

_MOST_PASSES = 256
_NUM_WARM_UP = 2  # passes that say nothing about a rank's speed
Admit = Callable[[Sequence[float], BalancedSampler], Sequence[int]]


class Balanced:
    """Runs a `replica` of `module`; weights gradients by samples, and balances the batches.

    The result is that of one process on the whole batch, if each rank's loss is a mean over its
    samples. With a `sampler` each rank measures the seconds in which it computes, not those in
    which it waits; all agree on new shares every few steps, and tell it. Without `weighs` the
    caller's losses are weighted already. `admit` is told the ranks' speeds when all are known, in
    samples a second, and the sampler; the ranks that it returns get no samples.
    """

    def __init__(
        self,
        replica: Replica,
        module: nn.Module,
        group: Group,
        sampler: BalancedSampler | None = None,
        *,
        weighs: bool = True,
        admit: Admit = lambda speeds, sampler: (),
    ) -> None:
        self._replica, self._module, self._group = replica, module, group
        self._weighs, self._admit = weighs, admit
        self._said: int | None = None
        self._pace = Pace(group.device)
        self._sampler: BalancedSampler | None = None
        self._balance: Balance | None = None
        self._left = 0
        if sampler is not None:
            self.follow(sampler)

    def follow(self, sampler: BalancedSampler) -> None:
        """Tell this sampler the shares from now on. All ranks must call it together.

        InvalidInput if it is not the same sampler on all ranks, or not made for them.
        """
        group = self._group
        if (sampler.rank, sampler.world_size) != (group.rank, group.world_size):
            raise InvalidInput(
                f"sampler: made for rank {sampler.rank} of {sampler.world_size}, but this is rank "
                f"{group.rank} of {group.world_size}"
            )
        own = [sampler.num_samples, sampler.batch_size, sampler.seed, list(sampler.most)]
        if any(row != own for row in group.gather(own)):
            raise InvalidInput(
                "sampler: samples, batch size, seed and most must be the same on all ranks"
            )
        self._sampler = sampler
        self._balance = Balance(sampler.batch_size, sampler.world_size, sampler.most)
        self._left = _NUM_WARM_UP + self._balance.interval

    def _num_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return num_samples(args, kwargs) if self._said is None else self._said

    def samples(self, number: int) -> None:
        """Say how many samples this rank has in the next forward pass."""
        if number < 0:
            raise InvalidInput(f"samples: must be 0 or more, not {number}")
        self._said = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass; InvalidInput if its samples cannot be counted."""
        return self.run(self._replica, args, kwargs)

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a forward pass of the module; InvalidInput if its samples cannot be counted."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if in_backward():
            raise InvalidInput(
                "balance: a checkpoint around the whole model hides what is to be weighted; put "
                "checkpoints inside of it"
            )
        if self._module.training and self._balance is not None:
            self._agree(self._balance)
        own = self._num_samples(args, kwargs)
        self._said = None
        return self._forward(forward, own, args, kwargs)

    def _forward(
        self,
        forward: Callable[..., Any],
        own: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        count = Count(own, self._group)
        if self._weighs and self._module.training:  # in evaluation nobody may come to backward
            count.begin()
        timed = self._pace.begin(own)

        def began(module: nn.Module, inputs: Any) -> None:
            timed.mark()

        def left(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if self._weighs:
                # Waits for the others, and so comes before the clock of backward starts.
                scale_gradients(outputs, count.weight)
            timed.watch(differentiable(outputs))

        def ended(module: nn.Module, inputs: Any, outputs: Any) -> None:
            timed.mark()

        # Not around the replica, which may wait for others before the module's forward pass; and it
        # must look at the outputs after us, who note when backward is over before it waits then.
        handles = [
            self._module.register_forward_pre_hook(began, prepend=True),
            self._module.register_forward_hook(left, prepend=True),
            self._module.register_forward_hook(ended),
        ]
        try:
            with _statistics_kept(self._module, own):
                return forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def _agree(self, balance: Balance) -> None:
        """Bring together what the ranks have measured, if it is time, and change the shares."""
        self._left -= 1
        if self._left >= 0:
            return
        assert self._sampler is not None
        rows = self._group.gather([self._pace.seconds_per_sample(), self._sampler.drawn])
        known_before = None not in balance.samples_per_s
        shares = balance.record([seconds for seconds, _ in rows])
        speeds = [speed for speed in balance.samples_per_s if speed is not None]
        if not known_before and len(speeds) == self._group.world_size:
            for rank in self._admit(speeds, self._sampler):
                shares = balance.exclude(rank)
        if shares != self._sampler.shares:
            epoch, step = max(place for _, place in rows)
            self._sampler.update(shares, (epoch, step))
        self._left = balance.interval - 1

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it gradients accumulate on this rank alone; each pass has a weight of its own."""
        return self._replica.no_sync()

    def record(self, recorder: Recorder | None) -> None:
        """Tell the recorder of all exchanges from now on; None ends that."""
        self._replica.record(recorder)

    def statistics(self) -> Statistics:
        """Return what exchanging has taken, the shares, and what each rank computes a second."""
        return self.shared(self._replica.statistics())

    def shared(self, statistics: Statistics) -> Statistics:
        """Return these statistics with the shares, where batches follow the ranks' speeds."""
        if self._balance is None:
            return statistics
        return replace(
            statistics, shares=self._balance.shares, samples_per_s=self._balance.samples_per_s
        )

    def close(self) -> None:
        """Give back what the exchange holds."""
        self._replica.close()


class _Pass:
    """One forward and backward pass of this rank: its samples and four marks of a clock."""

    def __init__(self, num_samples: int, clock: Any, done: Callable[["_Pass"], None]) -> None:
        self.num_samples = num_samples
        self.marks: list[Any] = []
        self._clock, self._done = clock, done

    def mark(self) -> None:
        """Note this moment: the begin or the end of forward."""
        self.marks.append(self._clock.mark())

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Note when a backward pass reaches these outputs, and when its arithmetic is over."""
        for output in outputs:
            output.register_hook(self._reached)

    def _reached(self, gradient: Tensor) -> None:
        if len(self.marks) == 2:  # the first output, in the first backward pass
            self.mark()
            Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        if len(self.marks) == 3:
            self.mark()
            self._done(self)


class Pace:
    """What this rank takes for a sample, in forward and backward, without waiting for others."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device)
        self._passes = deque[_Pass](maxlen=_MOST_PASSES)
        self._num_warm_up = _NUM_WARM_UP

    def begin(self, num_samples: int) -> _Pass:
        """Return what times a pass over so many samples."""
        return _Pass(num_samples, self._clock, self._add)

    def _add(self, one: _Pass) -> None:
        if self._num_warm_up:
            self._num_warm_up -= 1
        elif one.num_samples:
            self._passes.append(one)

    def seconds_per_sample(self) -> float | None:
        """Return the median since the last call; None if there were no samples."""
        passes = list(self._passes)
        self._passes.clear()
        times = self._clock.seconds([mark for one in passes for mark in one.marks])
        seconds = []
        for number, one in enumerate(passes):
            entered, left, reached, ended = times[4 * number : 4 * number + 4]
            seconds.append((left - entered + ended - reached) / one.num_samples)
        return max(median(seconds), 1e-12) if seconds else None


@contextmanager
def _statistics_kept(module: nn.Module, num_samples: int) -> Iterator[None]:
    """Keep running statistics as they are in a forward pass without samples: they have no mean."""
    layers = [] if num_samples else [one for one in module.modules() if isinstance(one, _BatchNorm)]
    training = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, before in zip(layers, training, strict=True):
            layer.training = before
