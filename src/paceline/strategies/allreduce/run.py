"""Run strategy allreduce: torch's DistributedDataParallel, with a hook that notes its collectives.

It is the baseline that every claim is measured against, and so it is the real one.
"""

from collections.abc import Sequence

from torch import nn

from paceline.exchange.compressed import Compression
from paceline.exchange.method import Method
from paceline.exchange.probe import Probe
from paceline.exchange.replica import Replica
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.strategies.allreduce.config import AllReduce
from paceline.training.loop import Job, Outcome
from paceline.training.loop import train as train_synchronously


def train(job: Job, config: AllReduce) -> Outcome:
    """Train the job's model on all ranks of its group.

    Raises RuntimeError if a trainable parameter gets no gradient: DistributedDataParallel's own.
    """
    return train_synchronously(job, replica(job.model, config, job.group))


def method(config: AllReduce, compression: Compression | None = None) -> Method:
    """Return how gradients are exchanged; `compression` goes before the config's."""
    if compression is None and config.codec is not None:
        compression = Compression(config.codec)
    return Method("allreduce", compression=compression)


def replica(module: nn.Module, config: AllReduce, group: Group) -> Replica:
    """Return the module as one of the group's replicas."""
    return Synchronized(
        module,
        method(config),
        group=group,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
    )


def exchange(sizes: Sequence[Sequence[int]], config: AllReduce, group: Group) -> Probe:
    """Return what exchanges float32 gradients of layers of these bytes as `train` does."""
    return Probe(sizes, group.device, lambda module: replica(module, config, group))
