"""How many messages the coordinator handles, and what it costs a worker to ask for work."""

import time
from typing import Any

from cases import RACE_DATA, gaps_s, outcome_of, settings

_TINY = "mlp-64-2-10"  # so that workers ask as often as they can


def measure(quick: bool) -> dict[str, Any]:
    """Return messages a second of the coordinator's CPU time, and a worker's time between batches.

    Each batch is two messages: the worker's question and the coordinator's answer. The network of
    the first figure is next to nothing, its batches are one sample each.
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
    outcome = outcome_of(
        settings(quick, workers="cpu:1", options={"policy": "hogbatch"}, epochs=1, **data)
    )
    between = gaps_s(list(outcome.history))
    return {
        "between_batches_s": sum(between) / len(between),
        "share_of_worker": sum(between) / outcome.trained_s,
    }
