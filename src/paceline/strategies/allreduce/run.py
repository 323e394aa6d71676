"""Run strategy allreduce: torch's DistributedDataParallel, with a hook that notes its collectives.

It is the baseline that every claim is measured against, and so it is the real one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import InvalidInput
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.strategies.allreduce.config import AllReduce
from paceline.training.loop import Job, Outcome
from paceline.training.loop import train as train_synchronously

_UNUSED_MARK = "parameters that were not used in producing loss"


def train(job: Job, config: AllReduce) -> Outcome:
    """Train the job's model on all ranks of its group.

    InvalidInput if a trainable parameter gets no gradient, which DistributedDataParallel refuses.
    """
    try:
        return train_synchronously(
            job, lambda recorder: wrap(job.model, config, job.group, recorder)
        )
    except RuntimeError as error:
        if _UNUSED_MARK not in str(error):
            raise
        raise InvalidInput(
            "model: some trainable parameters get no gradient; use them, or freeze them with "
            "requires_grad_(False)"
        ) from error


def wrap(model: nn.Module, config: AllReduce, group: Group, recorder: Recorder | None) -> nn.Module:
    """Return the model in DistributedDataParallel; a single worker has nobody to reduce with.

    With a recorder, a hook notes the collectives. It costs a pass over the gradients, which are
    then divided apart from the copy into their bucket.
    """
    if group.world_size == 1:
        return model
    parallel = DistributedDataParallel(
        model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
    )
    if recorder is not None:
        parallel.register_comm_hook(recorder, _recorded_all_reduce)
    return parallel


class _Ready(torch.autograd.Function):
    """A gradient that is ready at once: all that its backward pass takes is the exchange."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class _Gradient(nn.Module):
    """A module of one parameter that computes nothing."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(nbytes // 4, device=device))
        self.gradient = torch.zeros_like(self.parameter)

    def forward(self) -> Tensor:
        result: Tensor = _Ready.apply(self.parameter, self.gradient)  # type: ignore[no-untyped-call]
        return result


def exchange(nbytes: int, config: AllReduce, group: Group) -> Callable[[], None]:
    """Return a function that exchanges float32 gradients of that size as `train` does."""
    module = _Gradient(nbytes, group.device)
    parallel = wrap(module, config, group, None)

    def once() -> None:
        parallel().backward()
        module.zero_grad()

    return once


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
