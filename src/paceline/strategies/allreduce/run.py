"""Run strategy allreduce: torch's DistributedDataParallel, with a hook that notes its collectives.

It is the baseline that every claim is measured against, and so it is the real one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import InvalidInput
from paceline.exchange.agreement import check_frozen, check_same
from paceline.exchange.compressed import Compression
from paceline.exchange.hook import HookState, exchange_bucket
from paceline.exchange.probe import Probe
from paceline.exchange.replica import Alone, Replica, Statistics
from paceline.links.group import Group
from paceline.models.layers import layers_of
from paceline.record.recorder import Recorder
from paceline.strategies.allreduce.config import AllReduce
from paceline.training.loop import Job, Outcome
from paceline.training.loop import train as train_synchronously

_UNUSED_MARK = "parameters that were not used in producing loss"


def train(job: Job, config: AllReduce) -> Outcome:
    """Train the job's model on all ranks of its group.

    InvalidInput if a trainable parameter gets no gradient, which DistributedDataParallel refuses.
    """
    return train_synchronously(job, replica(job.model, config, job.group))


def replica(
    module: nn.Module, config: AllReduce, group: Group, *, compression: Compression | None = None
) -> Replica:
    """Return the module as one of the group's replicas; `compression` goes before the config's."""
    if group.world_size == 1:
        return Alone(module)
    if compression is None and config.codec is not None:
        compression = Compression(config.codec)
    return _Distributed(module, config, group, compression)


def exchange(sizes: Sequence[Sequence[int]], config: AllReduce, group: Group) -> Probe:
    """Return what exchanges float32 gradients of layers of these bytes as `train` does."""
    return Probe(sizes, group.device, lambda module: replica(module, config, group))


class _Distributed:
    """A module in DistributedDataParallel."""

    def __init__(
        self,
        module: nn.Module,
        config: AllReduce,
        group: Group,
        compression: Compression | None,
    ) -> None:
        self._module, self._config, self._group = module, config, group
        named = [(one.name, name, p) for one in layers_of(module) for name, p in one.parameters]
        check_same(module, named, group)
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._num_forward = 0
        self._parallel: DistributedDataParallel | None = None
        self._hook = _hook_state(compression, group) if compression else None
        self._wrap(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass; InvalidInput if it cannot go on."""
        assert self._parallel is not None
        check_frozen(self._module, self._frozen)
        try:
            outputs = self._parallel(*args, **kwargs)
        except RuntimeError as error:
            if _UNUSED_MARK not in str(error):
                raise
            raise InvalidInput(
                "model: some trainable parameters get no gradient, or the last backward pass "
                "failed; use them, or freeze them with requires_grad_(False)"
            ) from error
        self._num_forward += self._parallel.training and torch.is_grad_enabled()
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it gradients accumulate on this rank alone."""
        assert self._parallel is not None
        return self._parallel.no_sync()

    def record(self, recorder: Recorder | None) -> None:
        """Wrap the module anew: a hook notes the collectives, and is only there to be recorded.

        It costs a pass over the gradients, which are then divided apart from the copy into their
        bucket.
        """
        self._wrap(recorder)

    def statistics(self) -> Statistics:
        """Return what is known from outside: a ring sends 2 (n - 1) / n of the bytes."""
        if self._hook is not None:
            sent, hook = self._hook.bytes_sent, self._hook
            return Statistics(
                "allreduce",
                self._num_forward,
                sent,
                sent,
                None,
                None,
                codec=hook.why,
                num_nonfinite=hook.num_nonfinite,
                num_skipped=hook.num_skipped,
            )
        n = self._group.world_size
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        nbytes = sum(parameter.nbytes for parameter in parameters) * 2 * (n - 1) // n
        total = nbytes * self._num_forward
        return Statistics("allreduce", self._num_forward, total, total, None, None)

    def close(self) -> None:
        """Let the reducer go, and its hooks with it."""
        self._parallel = None
        if self._hook is not None:
            self._hook.close()

    def _wrap(self, recorder: Recorder | None) -> None:
        self._parallel = None  # two reducers must not listen to the same gradients
        on_gpu = self._group.device.type == "cuda"
        self._parallel = DistributedDataParallel(
            self._module,
            device_ids=[self._group.device] if on_gpu else None,
            bucket_cap_mb=self._config.bucket_mb,
            gradient_as_bucket_view=self._config.gradient_as_bucket_view,
        )
        if self._hook is not None:
            self._hook.recorder = recorder
            self._parallel.register_comm_hook(self._hook, exchange_bucket)
        elif recorder is not None:
            self._parallel.register_comm_hook(recorder, _recorded_all_reduce)


def _hook_state(compression: Compression, group: Group) -> HookState:
    return HookState(compression, range(group.world_size), group.device, group.deadline_s)


def _recorded_all_reduce(
    recorder: Recorder,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # exported, but not declared
) -> torch.futures.Future[Tensor]:
    """Average the bucket as DistributedDataParallel does without a hook."""
    exchange = recorder.join_exchange(str(bucket.index()))
    gradients = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None

    def done(future: torch.futures.Future[Any]) -> Tensor:
        recorder.leave_exchange(exchange)
        tensor: Tensor = future.value()[0]
        return tensor

    reduced: torch.futures.Future[Tensor] = work.get_future().then(done)
    return reduced
