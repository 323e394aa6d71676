"""Hubs that forget a worker while it measures for them: it measures once more, and takes part."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from local_runs import LocalRuns, Run, check_whole
from processes import DEADLINE_S
from rpc_exchange import free_port

pytestmark = pytest.mark.slow

RECIPE, SILENCE_S = "local_recipes:stopping", 3
OPTIONS = {"local": ("--set", "sync_every=5"), "wheel": ("--set", "lanes=1", "--set", "head=2")}


def started_hub(runs: LocalRuns, strategy: str, port: int) -> Run:
    options = ("--profile-s", "0.2", "--deadline-s", str(SILENCE_S), "--strategy", strategy)
    bind = ("--bind", f"tcp://127.0.0.1:{port}")
    hub = runs.hub(*OPTIONS[strategy], *options, *bind, recipe=RECIPE, workers=1)
    hub.address()
    return hub


@contextmanager
def stopped_before_it_measures(runs: LocalRuns, port: int) -> Iterator[Run]:
    flag = runs.flag("stop")
    worker = runs.worker(f"tcp://127.0.0.1:{port}", 0)
    until_s = time.monotonic() + DEADLINE_S
    while flag.exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    yield worker
    os.kill(worker.started.process.pid, signal.SIGCONT)
    assert "the hub has begun anew; measuring for it once more" in worker.finish().err


@pytest.mark.parametrize("strategy", OPTIONS)
def test_a_worker_measures_again_for_a_hub_that_was_started_again(
    runs: LocalRuns, strategy: str
) -> None:
    port = free_port()
    hub = started_hub(runs, strategy, port)
    with stopped_before_it_measures(runs, port):
        hub.started.process.send_signal(signal.SIGKILL)
        hub.started.finish()
        hub = started_hub(runs, strategy, port)
    check_whole(hub.result(), 4)


def test_a_worker_measures_again_if_it_was_given_up_meanwhile(runs: LocalRuns) -> None:
    port = free_port()
    hub = started_hub(runs, "local", port)
    with stopped_before_it_measures(runs, port):
        time.sleep(SILENCE_S + 2)
    check_whole(hub.result(), 4)
