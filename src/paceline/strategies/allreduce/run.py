"""Run strategy allreduce: torch's DistributedDataParallel, with a hook that notes its collectives.

It is the baseline that every claim is measured against, and so it is the real one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.strategies.allreduce.config import AllReduce
from paceline.training.loop import Job, Outcome
from paceline.training.loop import train as train_synchronously


def train(job: Job, config: AllReduce) -> Outcome:
    """Train the job's model on all ranks of its group."""
    return train_synchronously(job, wrap(job.model, config, job.group, job.recorder))


def wrap(model: nn.Module, config: AllReduce, group: Group, recorder: Recorder) -> nn.Module:
    """Return the model in DistributedDataParallel; a single worker has nobody to reduce with."""
    if group.world_size == 1:
        return model
    parallel = DistributedDataParallel(
        model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
    )
    parallel.register_comm_hook(recorder, _recorded_all_reduce)
    return parallel


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
