"""Run strategy allreduce: torch's DistributedDataParallel, with a hook that records exchanges."""

from torch import nn

from paceline.exchange.compressed import Compression
from paceline.exchange.replica import Chunking, Method, ModelReplica
from paceline.exchange.replicas import start as start
from paceline.exchange.synchronized import Synchronized
from paceline.links.devices import device_of
from paceline.links.group import Group
from paceline.strategies.allreduce.config import AllReduce


def method(
    config: AllReduce, compression: Compression | None = None, chunk: Chunking | None = None
) -> Method:
    """Return the exchange method; `compression` replaces `config.codec`, `chunk` is ignored."""
    if compression is None and config.codec is not None:
        compression = Compression(config.codec)
    return Method("allreduce", compression=compression)


def replica(module: nn.Module, config: AllReduce, group: Group) -> ModelReplica:
    """Wrap the module, so that its gradients are averaged over the group."""
    return Synchronized(
        module,
        method(config),
        group=group,
        device_ids=[group.device] if device_of(group.device).is_asynchronous else None,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
    )
