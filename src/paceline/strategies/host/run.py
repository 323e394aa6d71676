"""Run strategy host: every rank sends its gradients through shared memory and updates itself."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from paceline.exchange.compressed import Compression
from paceline.exchange.method import Method
from paceline.exchange.probe import Probe
from paceline.exchange.replica import Replica
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.strategies.host.config import Host
from paceline.strategies.host.exchange import HostExchange
from paceline.training.loop import Job, Outcome
from paceline.training.loop import train as train_synchronously
from paceline.tune.chunk import ChunkTuner


def train(job: Job, config: Host) -> Outcome:
    """Train the job's model on all ranks of its group."""
    return train_synchronously(job, replica(job.model, config, job.group))


def method(
    config: Host,
    compression: Compression | None = None,
    tuner: Callable[[int], ChunkTuner] | None = None,
) -> Method:
    """Return how gradients are exchanged; `compression` goes before the config's.

    `tuner` makes what looks for a better chunk, for a number of layers.
    """
    if compression is None and config.codec is not None:
        compression = Compression(config.codec)
    make = partial(_exchange, compression)
    return Method("host", make, config.chunk if tuner is None else tuner)


def _exchange(compression: Compression | None, group: Group, as_views: bool) -> HostExchange:
    return HostExchange(group, compression, as_views)


def replica(
    module: nn.Module, config: Host, group: Group, *, tuner: ChunkTuner | None = None
) -> Replica:
    """Return the module as one of the group's replicas; a tuner looks for a better chunk."""
    found = method(config, tuner=None if tuner is None else lambda num_layers: tuner)
    return Synchronized(module, found, group=group, gradient_as_bucket_view=True)


def exchange(sizes: Sequence[Sequence[int]], config: Host, group: Group) -> Probe:
    """Return what exchanges float32 gradients of layers of these bytes as `train` does."""
    return Probe(sizes, group.device, lambda module: replica(module, config, group))
