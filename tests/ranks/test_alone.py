"""Steps of one rank alone beside steps of all, on two ranks, of which one is slowed down."""

from functools import partial

import pytest
import torch

from paceline.core.settings import RehearseSettings
from paceline.exchange.alone import compare_with_alone
from paceline.exchange.replicas import start
from paceline.exchange.session import Progress, TrainingSession
from paceline.links.rendezvous import joined
from paceline.strategies import EXCHANGES


def compared(slowdown: str, parts: tuple[int, int]) -> tuple[float, float, bool, bool]:
    """Return the comparison, and whether the model of the run is as before."""
    group, strategy = joined(torch.device("cpu"), 30.0), EXCHANGES["allreduce"]
    settings = RehearseSettings.model_validate(
        {"model": "mlp-64-256-10", "batch_size": sum(parts), "slowdown": slowdown}
    )
    config = strategy.config(workers=2)
    session = TrainingSession(settings, strategy, config, "alone", group, Progress())
    with start(session) as runner:
        before = [one.clone() for one in runner.setup.model.parameters()]
        replicate = partial(strategy.runner().replica, config=config, group=group)
        found = compare_with_alone(runner.setup, group, replicate, parts, lone_rank=0)
        after = runner.setup.model.parameters()
        is_same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return (*found, is_same)


@pytest.mark.parametrize("parts", [(8, 8), (8, 0)])
def test_a_rank_is_faster_without_one_that_holds_it_up(pair, parts):
    """Worker 1 sleeps 500 times as long as its layers compute."""
    for alone_s, together_s, is_alone_faster, is_same in pair(compared, "1,500", parts):
        assert is_alone_faster
        assert alone_s < together_s
        assert is_same


def test_all_ranks_are_faster_than_a_slow_one_alone(pair):
    for _, _, is_alone_faster, is_same in pair(compared, "50,1", (1, 4095)):
        assert not is_alone_faster
        assert is_same
