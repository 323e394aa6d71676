"""Run strategy host: every rank sends its gradients through shared memory and updates itself."""

from collections.abc import Sequence

from torch import nn

from paceline.exchange.compressed import Compression
from paceline.exchange.probe import Probe
from paceline.exchange.replica import Alone, Replica
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


def replica(
    module: nn.Module,
    config: Host,
    group: Group,
    *,
    compression: Compression | None = None,
    tuner: ChunkTuner | None = None,
) -> Replica:
    """Return the module as one of the group's replicas.

    `compression` goes before the config's; a tuner looks for a better chunk.
    """
    if group.world_size == 1:
        return Alone(module)
    if compression is None and config.codec is not None:
        compression = Compression(config.codec)
    exchange = HostExchange(group, group.deadline_s, compression)
    return Synchronized(module, exchange, group, config.chunk if tuner is None else tuner)


def exchange(sizes: Sequence[Sequence[int]], config: Host, group: Group) -> Probe:
    """Return what exchanges float32 gradients of layers of these bytes as `train` does."""
    return Probe(sizes, group.device, lambda module: replica(module, config, group))
