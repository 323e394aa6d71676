"""Measure the coordinator's message rate, and a worker's cost of asking for work."""

import time
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from cases import gaps_s, race_data, runner_of, settings, trained

from figures import spread
from paceline.core.machine import DeviceKind
from paceline.core.settings import TrainSettings
from paceline.exchange.setup import learning_of, optimizer_by
from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.replica import CpuReplica, tensors_of
from paceline.training.recipes.named import recipe_of

_TINY = "mlp-64-2-10"  # tiny, so that workers ask for work at the highest rate
_REPEATS = 5


def measure(quick: bool) -> dict[str, Any]:
    """Return messages per CPU second of the coordinator, and the pause between a worker's batches.

    Each batch has two messages, the worker's request and the coordinator's answer; one transfer may
    contain several requests. The message rate is of a tiny network and batches of one sample.
    """
    return _messages(quick) | _between(quick)


def _messages(quick: bool) -> dict[str, Any]:
    asking = settings(
        quick,
        model=_TINY,
        data="digits",
        workers="cpu:1,cpu:1",
        options={"policy": "hogwild"},
        epochs=2 if quick else 30,
    )
    with runner_of(asking) as runner:
        began_s = time.thread_time()
        for _ in runner.epochs():
            pass
        cpu_s = time.thread_time() - began_s  # includes the tests between epochs
        messages = 2 * len(runner.coordinator.log)
        return {
            "messages": messages,
            "messages_per_cpu_s": messages / cpu_s,
            "messages_per_s": messages / runner.coordinator.trained_s,
        }


def _between(quick: bool) -> dict[str, Any]:
    data = {} if quick else {"data": race_data(quick)}
    wanted = settings(quick, workers="cpu:1", options={"policy": "hogbatch"}, epochs=1, **data)
    between, took = [], []
    for _ in range(2 if quick else _REPEATS):
        with runner_of(wanted) as runner:
            trained(runner)
            log, trained_s = runner.coordinator.log, runner.coordinator.trained_s
        between.append(mean(gaps_s(list(log))))
        took.append(trained_s / len(log))
    unasked = [_unasked_s(wanted, 50 if quick else 300) for _ in between]
    asking_s = median(between) - median(unasked)
    return {
        "between_batches_s": spread(between),
        "unasked_s": spread(unasked),
        "share_of_worker": median(between) / median(took),
        "share_of_asking": asking_s / median(took),
    }


def _unasked_s(wanted: TrainSettings, num_batches: int) -> float:
    """Return the mean pause, in seconds, between a replica's batches without a coordinator."""
    recipe, size = recipe_of(wanted.model, wanted.data, wanted.seed), wanted.batch_size
    learnt = optimizer_by(recipe, wanted), learning_of(recipe, wanted)
    replica = CpuReplica(
        recipe, tensors_of(recipe.model()), *learnt, worker=0, spec=WorkerSpec(DeviceKind.CPU)
    )
    order = torch.randperm(len(recipe.samples))
    done = [
        replica.train(rows, 1.0, None)
        for rows in order.repeat(-(-num_batches * size // len(order))).split(size)[:num_batches]
    ]
    gaps = [after.started_ns - before.ended_ns for before, after in pairwise(done)]
    return mean(gaps) * 1e-9
