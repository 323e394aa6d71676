"""Torch's own reducer, as a replica sees it: what is hooked into it, and what it has sent."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_comm_hook

from paceline.exchange.agreement import Named
from paceline.exchange.compressed import Compression
from paceline.exchange.hook import HookState, exchange_bucket
from paceline.exchange.readiness import Readiness
from paceline.exchange.replica import Statistics
from paceline.links.group import Group
from paceline.record.recorder import Recorder


class TorchAllReduce:
    """Counts what DistributedDataParallel's reducer exchanges, and has it encoded or recorded.

    `on_exchanged` is called after each exchange; that takes a hook for each parameter.
    """

    name = "allreduce"

    def __init__(
        self,
        parameters: Sequence[Named],
        compression: Compression | None,
        join: Callable[[], Group],
        on_exchanged: Callable[[], None] | None = None,
    ) -> None:
        self._recorder: Recorder | None = None
        self._compression, self._join = compression, join
        self._nbytes = sum(one.parameter.nbytes for one in parameters)
        self._on_exchanged = on_exchanged
        self._num_steps = 0
        self._hook: HookState | None = None
        self._readiness: Readiness | None = None
        if on_exchanged is not None:
            named = [(one.name, one.parameter) for one in parameters]
            self._readiness = Readiness(named, self, sparse=range(len(named)))
            self._readiness.expect([None] * len(named))

    def register(self, reducer: Any, recorder: Recorder | None) -> None:
        """Register with the reducer what encodes or records its buckets, if there is something."""
        self._recorder = recorder
        if self._compression is not None:
            _register_comm_hook(reducer, self, _exchange_bucket)
        elif recorder is not None:
            _register_comm_hook(reducer, (recorder, self._join()), _recorded_all_reduce)

    def open(self) -> None:
        """Make what encodes, on all ranks together; without, the first bucket does it."""
        if self._compression is not None:
            self.hook_state()

    def hook_state(self) -> HookState:
        """Return what encodes buckets. InvalidInput if ranks have different codecs."""
        if self._hook is None:
            assert self._compression is not None
            group = self._join()
            ranks = group.global_ranks
            self._hook = HookState(self._compression, ranks, group.device, group.deadline_s)
        self._hook.recorder = self._recorder
        return self._hook

    @property
    def pending(self) -> bool:
        """Whether a forward pass still waits for its backward pass, where that is watched."""
        return self._readiness is not None and self._readiness.pending

    def forwarded(self, outputs: Sequence[Tensor], synchronize: bool) -> None:
        """Note a forward pass that can be differentiated."""
        self._num_steps += synchronize
        if self._readiness is not None:
            self._readiness.forwarded(outputs, synchronize)

    def unwatch(self) -> None:
        """Tell nobody of exchanges any more."""
        if self._readiness is not None:
            self._readiness.close()
            self._readiness = None

    def statistics(self) -> Statistics:
        """Return what is known from outside: a ring sends 2 (n - 1) / n of the bytes."""
        if self._hook is not None:
            sent, hook = self._hook.bytes_sent, self._hook
            return Statistics(
                self.name,
                self._num_steps,
                sent,
                sent,
                None,
                None,
                codec=hook.why,
                num_nonfinite=hook.num_nonfinite,
                num_skipped=hook.num_skipped,
            )
        n = self._join().world_size
        total = self._nbytes * 2 * (n - 1) // n * self._num_steps
        return Statistics(self.name, self._num_steps, total, total, None, None)

    def close(self) -> None:
        """End what encodes, and the hooks of ours."""
        self.unwatch()
        if self._hook is not None:
            self._hook.close()

    # What Readiness tells.

    def approaching(self) -> None:
        """Torch's reducer sees to the backward pass."""

    def began(self) -> None:
        """Torch's reducer sees to the backward pass."""

    def ready(self, chunk: int) -> None:
        """There are no chunks of ours."""

    def ended(self, missing: Sequence[int]) -> None:
        """Note that gradients were exchanged, or will be before this backward pass returns."""
        assert self._on_exchanged is not None
        self._on_exchanged()


def _exchange_bucket(
    exchange: TorchAllReduce,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # exported, but not declared
) -> torch.futures.Future[Tensor]:
    """Begin to average a bucket through the codec."""
    return exchange_bucket(exchange.hook_state(), bucket)


def _recorded_all_reduce(
    recorded: tuple[Recorder, Group],
    bucket: dist.GradBucket,  # type: ignore[name-defined] # exported, but not declared
) -> torch.futures.Future[Tensor]:
    """Average the bucket as DistributedDataParallel does without a hook."""
    recorder, group = recorded
    exchange = recorder.join_exchange(str(bucket.index()))
    gradients = bucket.buffer().div_(group.world_size)
    work = dist.all_reduce(gradients, group=group.process_group, async_op=True)
    assert work is not None

    def done(future: torch.futures.Future[Any]) -> Tensor:
        recorder.leave_exchange(exchange)
        tensor: Tensor = future.value()[0]
        return tensor

    reduced: torch.futures.Future[Tensor] = work.get_future().then(done)
    return reduced
