"""Run strategy tree."""

from torch import nn

from paceline.exchange.compressed import Compression
from paceline.exchange.replica import Chunking, Method, ModelReplica
from paceline.exchange.replicas import start as start
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.strategies.tree.config import Tree
from paceline.strategies.tree.exchange import TreeExchange


def method(
    config: Tree, compression: Compression | None = None, chunk: Chunking | None = None
) -> Method:
    """Return the exchange, without codec and chunks."""
    return Method("tree", TreeExchange, takes_codec=False)


def replica(module: nn.Module, config: Tree, group: Group) -> ModelReplica:
    """Wrap the module as a replica of the group."""
    return Synchronized(module, method(config), group=group, gradient_as_bucket_view=True)
