"""Run strategy tree: gradients to rank 0, an update there, parameters to all."""

from collections.abc import Sequence

from torch import nn

from paceline.exchange.probe import Probe
from paceline.exchange.replica import Alone, Replica
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.strategies.tree.config import Tree
from paceline.strategies.tree.exchange import TreeExchange
from paceline.training.loop import Job, Outcome
from paceline.training.loop import train as train_synchronously


def train(job: Job, config: Tree) -> Outcome:
    """Train the job's model on all ranks of its group."""
    return train_synchronously(job, replica(job.model, config, job.group))


def replica(module: nn.Module, config: Tree, group: Group) -> Replica:
    """Return the module as one of the group's replicas."""
    if group.world_size == 1:
        return Alone(module)
    return Synchronized(module, TreeExchange(group), group)


def exchange(sizes: Sequence[Sequence[int]], config: Tree, group: Group) -> Probe:
    """Return what exchanges float32 gradients of layers of these bytes as `train` does."""
    return Probe(sizes, group.device, lambda module: replica(module, config, group))
