"""Run strategy tree: gradients to rank 0, their means to all."""

from collections.abc import Sequence

from torch import nn

from paceline.exchange.method import Method
from paceline.exchange.probe import Probe
from paceline.exchange.replica import Replica
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.strategies.tree.config import Tree
from paceline.strategies.tree.exchange import TreeExchange
from paceline.training.loop import Job, Outcome
from paceline.training.loop import train as train_synchronously


def train(job: Job, config: Tree) -> Outcome:
    """Train the job's model on all ranks of its group."""
    return train_synchronously(job, replica(job.model, config, job.group))


def method(config: Tree) -> Method:
    """Return how gradients are exchanged."""
    return Method("tree", TreeExchange)


def replica(module: nn.Module, config: Tree, group: Group) -> Replica:
    """Return the module as one of the group's replicas."""
    found = method(config)
    return Synchronized(module, found, group=group, gradient_as_bucket_view=True)


def exchange(sizes: Sequence[Sequence[int]], config: Tree, group: Group) -> Probe:
    """Return what exchanges float32 gradients of layers of these bytes as `train` does."""
    return Probe(sizes, group.device, lambda module: replica(module, config, group))
