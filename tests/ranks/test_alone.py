"""Training on one rank alone, compared with training on both when one may be slower."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.settings import RehearseSettings
from paceline.exchange.alone import Comparison, compare_with_alone
from paceline.exchange.balanced import BalancedShares, SpeedMeter
from paceline.exchange.replica import ModelReplica
from paceline.exchange.replicas import ReplicaRunner, start
from paceline.exchange.session import Progress, TrainingSession
from paceline.links.group import Group
from paceline.links.rendezvous import joined
from paceline.strategies import EXCHANGES
from paceline.training.data.sampler import BalancedSampler

STRATEGY = EXCHANGES["allreduce"]


@contextmanager
def rehearsing(**settings: Any) -> Iterator[tuple[ReplicaRunner, Group, Any]]:
    group, config = joined(torch.device("cpu"), 30.0), STRATEGY.config(workers=2)
    known = RehearseSettings.model_validate({"model": "mlp-64-256-10"} | settings)
    with start(TrainingSession(known, STRATEGY, config, "alone", group, Progress())) as runner:
        yield runner, group, config


def pause(samples: torch.Tensor) -> None:
    time.sleep(0.02 * len(samples))


def compared(
    slowdown: str,
    parts: tuple[int, int],
    late_s: Sequence[float],
    predicted_s: Sequence[float] = (),
    disturbed_s: float = 0.0,
) -> tuple[Comparison, int]:
    """Compare one rank alone with each exchange; also return the number of steps with an exchange.

    `late_s`: seconds by which each exchange delays a step; by default one exchange without delay.
    `predicted_s`: predicted step time of each exchange; by default 0. `disturbed_s`: seconds by
    which another program delays the steps of the first turn. With `late_s`, the computation takes
    20 ms per sample.
    """
    steps: list[float] = []
    disturbances = [disturbed_s]
    with rehearsing(slowdown=slowdown, batch_size=sum(parts)) as (runner, group, config):
        before = [one.clone() for one in runner.setup.model.parameters()]

        def late(seconds: float) -> None:
            steps.append(seconds)
            time.sleep(seconds)

        def replicate(module: nn.Module, seconds: float) -> ModelReplica:
            late_s = seconds + (disturbances.pop() if disturbances else 0.0)
            module.register_forward_hook(lambda *_: late(late_s))
            return STRATEGY.runner().replica(module, config=config, group=group)

        if late_s:
            runner.setup.model.register_forward_hook(lambda _, args, __: pause(args[0]))
        exchanges = {str(late): partial(replicate, seconds=late) for late in late_s or (0.0,)}
        predicted = dict.fromkeys(exchanges, 0.0) | dict(zip(exchanges, predicted_s, strict=False))
        found = compare_with_alone(runner.setup, group, exchanges, parts, 0, predicted)
        after = runner.setup.model.parameters()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return found, len(steps)


@pytest.mark.parametrize(
    ("slowdown", "parts", "late_s", "predicted_s", "is_alone_faster", "num_tried"),
    [
        # Worker 1 sleeps 500 times as long as its layers compute.
        ("1,500", (8, 8), (), (), True, 1),
        ("1,500", (8, 0), (), (), True, 1),
        ("50,1", (1, 4095), (), (), False, 1),
        # One rank alone needs 320 ms, the first exchange 370 or 960 ms, the second 160 ms.
        ("1,1", (8, 8), (0.21, 0.0), (0.1, 0.6), False, 2),
        ("1,1", (8, 8), (0.8, 0.0), (0.1, 0.6), True, 1),
        ("1,1", (8, 8), (0.8, 0.0), (0.1, 0.2), False, 2),
    ],
)
def test_a_rank_alone_must_be_faster_than_each_exchange(
    pair, slowdown, parts, late_s, predicted_s, is_alone_faster, num_tried
):
    """If a rank alone is much faster than the first, others are tried by their prediction."""
    for found, _ in pair(compared, slowdown, parts, late_s, predicted_s):
        assert found.is_alone_faster == is_alone_faster == (found.alone_s < found.best_s)
        assert len(found.together_s) == num_tried


@pytest.mark.parametrize(("late_s", "is_close"), [(0.8, False), (0.0, False), (0.16, True)])
def test_only_a_close_comparison_needs_many_steps(pair, late_s, is_close):
    """One rank alone needs 320 ms, both need 160 ms and the delay."""
    for _, num_steps in pair(compared, "1,1", (8, 8), (late_s,), (0.4,)):
        assert (num_steps > 4) == is_close


@pytest.mark.parametrize("predicted_s", [0.16, 0.5])
def test_an_exchange_slower_than_its_prediction_has_a_second_turn(pair, predicted_s):
    """One rank alone needs 320 ms, both need 160 ms, or 380 ms in the first turn."""
    for found, _ in pair(compared, "1,1", (8, 8), (0.0,), (predicted_s,), 0.22):
        assert found.is_alone_faster == (predicted_s > 0.32)


def test_no_exchange_is_tried_that_is_predicted_to_be_hopeless(pair):
    for found, num_steps in pair(compared, "1,1", (8, 8), (0.0,), (1.0,)):
        assert (found.is_alone_faster, found.is_predicted) == (True, True)
        assert (found.together_s, num_steps) == ({"0.0": 1.0}, 0)


class Meter(SpeedMeter):
    def seconds_per_sample(self) -> float | None:
        return 1.0


def shares_after_profile() -> tuple[list[int], list[int]]:
    """Return the shares after a profile, and after steps in which both ranks are equally fast."""
    more = {"balance": "auto", "profile_s": 0.1}
    with rehearsing(slowdown="1,100", batch_size=64, **more) as (runner, group, config):
        runner.profile([(STRATEGY, config)])
        sampler = runner.setup.sampler
        first = list(sampler.shares)
        shares = BalancedShares(sampler, group, Meter(group.device), lambda *_: ())
        for _ in range(8):
            shares.step()
        return first, list(sampler.shares)


def test_training_begins_with_shares_by_the_profile(pair):
    """Rank 1 computes 100 times as long. Later measurements replace the profile."""
    results = pair(shares_after_profile)
    first, later = results[0]
    assert first[0] > 3 * first[1]
    assert later == [32, 32]
    assert results[1] == results[0]


class Prefetching(SpeedMeter):
    """Measures batches that were drawn two calls before; rank 1 is slow."""

    def __init__(self, sampler: BalancedSampler) -> None:
        super().__init__(torch.device("cpu"))
        self.drawn = [sampler.shares[sampler.rank]] * 2
        self.sampler = sampler

    def seconds_per_sample(self) -> float | None:
        self.drawn.append(self.sampler.shares[self.sampler.rank])
        self.num_samples = self.drawn.pop(0)
        return (0.12 / self.num_samples + 0.074) if self.sampler.rank else 0.026


def shares_of_prefetched_batches() -> tuple[tuple[int, ...], tuple[int, ...]]:
    group = joined(torch.device("cpu"), 30.0)
    sampler = BalancedSampler(160, 16, group.rank, 2)
    sampler.update((14, 2))
    meter = Prefetching(sampler)
    shares = BalancedShares(sampler, group, meter, lambda *_: ())
    for _ in range(200):
        shares.step()
    first = sampler.shares
    sampler.update((14, 2), sampler.drawn)  # as a loaded checkpoint does
    meter.drawn = [sampler.shares[group.rank]] * 2
    for _ in range(500):
        shares.step()
    return first, sampler.shares


def test_shares_are_changed_only_by_times_of_the_current_shares(pair):
    # with 14 + 2 samples, rank 0 needs 364 ms; with 13 + 3, rank 1 needs 342 ms
    assert pair(shares_of_prefetched_batches) == [((13, 3), (13, 3))] * 2
