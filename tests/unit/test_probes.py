"""Probes of an exchange end when all ranks have its result."""

import torch
from torch import nn

from paceline.exchange.replica import Probe
from paceline.exchange.replicas import prober
from paceline.links.group import Group
from paceline.strategies import EXCHANGES


class Seen(nn.Module):
    """A replica that notes when its exchange is over, as a rank sees it."""

    def __init__(self, module: nn.Module, seen: list[str]) -> None:
        super().__init__()
        self.module, self.seen = module, seen

    def forward(self, scalar: torch.Tensor) -> torch.Tensor:
        self.seen.append("exchanged")
        return self.module(scalar)

    def close(self) -> None:
        self.seen.append("closed")


def test_a_probe_of_ranks_that_end_apart_waits_for_all_of_them() -> None:
    """The root of a tree took half as long as the others, whose bytes were still on their way."""
    seen: list[str] = []
    probe = Probe(
        [[8], [16]],
        torch.device("cpu"),
        lambda module: Seen(module, seen),
        barrier=lambda: seen.append("all have it"),
    )
    probe()
    probe()
    probe.close()
    assert seen == ["exchanged", "all have it"] * 2 + ["closed"]


def test_only_the_tree_has_ranks_that_end_apart() -> None:
    group = Group.alone(torch.device("cpu"), 1.0)
    waits = {
        name: prober(one, one.config(workers=2), group).make.keywords["barrier"] is not None
        for name, one in EXCHANGES.items()
    }
    assert waits == {"allreduce": False, "host": False, "tree": True}
