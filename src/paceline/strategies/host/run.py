"""Run strategy host: ranks exchange gradients through shared memory."""

from functools import partial

from torch import nn

from paceline.core.chunks import ChunkTuner
from paceline.exchange.compressed import Compression
from paceline.exchange.replica import Chunking, Method, ModelReplica
from paceline.exchange.replicas import start as start
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.strategies.host.config import HostReduce
from paceline.strategies.host.exchange import HostExchange


def method(
    config: HostReduce, compression: Compression | None = None, chunk: Chunking | None = None
) -> Method:
    """Return the exchange method; `compression` and `chunk` replace the settings in `config`."""
    if compression is None and config.codec is not None:
        compression = Compression(config.codec)
    make = partial(HostExchange, compression=compression)
    return Method("host", make, config.first_chunk if chunk is None else chunk)


def replica(
    module: nn.Module, config: HostReduce, group: Group, *, tuner: ChunkTuner | None = None
) -> ModelReplica:
    """Wrap the module, so that its gradients are averaged over the group.

    `tuner`: searches the chunk size during training; by default, chunks keep the configured size.
    """
    found = method(config, chunk=None if tuner is None else lambda num_layers: tuner)
    return Synchronized(module, found, group=group, gradient_as_bucket_view=True)
