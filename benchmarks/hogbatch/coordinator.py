"""How many messages the coordinator handles, and what it costs a worker to ask for work."""

import time
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from cases import RACE_DATA, gaps_s, outcome_of, settings

from figures import spread
from paceline.models import find
from paceline.settings import UnevenSettings
from paceline.strategies.hogbatch.optimizers import optimizer_of
from paceline.strategies.hogbatch.replica import CpuReplica, Samples, tensors_of
from paceline.uneven import build

_TINY = "mlp-64-2-10"  # so that workers ask as often as they can
_REPEATS = 5


def measure(quick: bool) -> dict[str, Any]:
    """Return messages a second of the coordinator's CPU time, and a worker's time between batches.

    Each batch is two messages, the worker's question and the coordinator's answer; questions may
    travel together. The network of the first figure is next to nothing, its batches are one sample.
    """
    return _messages(quick) | _between(quick)


def _messages(quick: bool) -> dict[str, Any]:
    began: list[float] = []
    asking = settings(
        quick,
        model=_TINY,
        data="digits",
        workers="cpu:1,cpu:1",
        options={"policy": "hogwild"},
        epochs=2 if quick else 30,
    )
    outcome = outcome_of(
        asking, lambda epoch: False, begun=lambda _: began.append(time.thread_time())
    )
    cpu_s = time.thread_time() - began[0]  # tests between epochs included
    messages = 2 * len(outcome.history)
    return {
        "messages": messages,
        "messages_per_cpu_s": messages / cpu_s,
        "messages_per_s": messages / outcome.trained_s,
    }


def _between(quick: bool) -> dict[str, Any]:
    data = {} if quick else {"data": RACE_DATA}
    wanted = settings(quick, workers="cpu:1", options={"policy": "hogbatch"}, epochs=1, **data)
    between, took = [], []
    for _ in range(2 if quick else _REPEATS):
        outcome = outcome_of(wanted)
        between.append(mean(gaps_s(list(outcome.history))))
        took.append(outcome.trained_s / len(outcome.history))
    unasked = [_unasked_s(wanted, 50 if quick else 300) for _ in between]
    asking_s = median(between) - median(unasked)
    return {
        "between_batches_s": spread(between),
        "unasked_s": spread(unasked),
        "share_of_worker": median(between) / median(took),
        "share_of_asking": asking_s / median(took),
    }


def _unasked_s(wanted: UnevenSettings, num_batches: int) -> float:
    """Return what lies between batches that a replica trains on one after the other, unasked."""
    run, size = build(wanted), wanted.batch_size
    samples = Samples(*run.data.train.__getitems__(range(len(run.data.train))))
    learning = run.learning
    replica = CpuReplica(
        lambda: find(learning.model).build(learning.num_classes),
        tensors_of(run.model),
        optimizer_of(learning.optimizer, learning.learning_rate, learning.momentum),
        samples,
        worker=0,
    )
    order = torch.randperm(len(samples.inputs))
    done = [
        replica.train(rows, 1.0, None)
        for rows in order.repeat(-(-num_batches * size // len(order))).split(size)[:num_batches]
    ]
    gaps = [after.started_ns - before.ended_ns for before, after in pairwise(done)]
    return mean(gaps) * 1e-9
