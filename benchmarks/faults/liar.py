"""Run workers that have valid keys and train, but falsify some of their messages.

    liar.py '{"address": ..., "workers": [0, 2], "seed": 3, "stall_s": 30}'

Each lie appends a line of JSON to lies.jsonl: its rule, topic and time. A worker that the hub
refuses, excludes or does not answer connects again, until the process is killed.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, TextIO

from grammar import Lie, lies
from pydantic import BaseModel

from paceline.core.errors import InvalidInput, WorkerLost
from paceline.rpc.client import Client, ReplyFuture
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.frames import Message
from paceline.rpc.keys import load_worker_keys
from paceline.strategies.wheel.worker import take_part

_RUN, _DEADLINE_S, _LOG = "paceline", 5.0, Path("lies.jsonl")
_SHARE = 0.25  # share of messages that are lies
_SHARE_OF_PROBES = 0.01  # lower, because a worker sends 200 probes before it trains
_NUM_LIES = 1000  # drawn before a worker connects, and used cyclically
_STALL_SHARE = 0.004  # share of messages that a worker delays by `stall_s`


class Task(BaseModel):
    """Settings of the lying workers; `stall_s` exceeds the hub's deadline."""

    address: str
    workers: tuple[int, ...]
    seed: int
    stall_s: float


class LyingClient:
    """A worker's connection that replaces some messages by lies."""

    def __init__(
        self, client: Client, random: Random, told: Iterator[Lie], task: Task, log: TextIO
    ) -> None:
        self._client, self._random, self._told = client, random, told
        self._task, self._log = task, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def request(self, message: Message) -> ReplyFuture:
        """Send the message, a lie instead, or a lie and then the message."""
        random = self._random
        share = _SHARE_OF_PROBES if message.topic == "probe" else _SHARE
        if random.random() < _STALL_SHARE * share / _SHARE:
            self._say("stall", message.topic)
            time.sleep(self._task.stall_s)
        if random.random() >= share:
            return self._client.request(message)
        rule, change = next(self._told)
        lie = change(message)
        if lie is None:
            return self._client.request(message)
        self._say(rule, message.topic)
        if random.random() < 0.1:  # send the true message, too
            self._client.request(lie)
            return self._client.request(message)
        return self._client.request(lie)

    def _say(self, rule: str, topic: str) -> None:
        self._log.write(json.dumps({"rule": rule, "topic": topic, "at_s": time.time()}) + "\n")
        self._log.flush()


def _sessions(task: Task, worker: int) -> Iterator[Client]:
    """Yield new connections endlessly; close each before the next one opens."""
    keys = load_worker_keys(Path("keys"))
    while True:
        try:
            client = Client(task.address, _RUN, worker, keys=keys, deadline_s=_DEADLINE_S)
        except (WorkerLost, InvalidInput):  # a busy hub may also answer too late
            time.sleep(0.2)
            continue
        with closing(client):
            yield client


def _lie(task: Task, worker: int, log: TextIO) -> None:
    """Run one lying worker endlessly."""
    random = Random(f"{task.seed} {worker}")  # noqa: S311 - no secret
    settings = WorkerProcessSettings(
        connect=task.address,
        run_name=_RUN,
        deadline_s=_DEADLINE_S,
        workers=(worker,),
        device="cpu",
        threads=1,
    )
    told = cycle(lies(task.seed + worker, _NUM_LIES))
    for client in _sessions(task, worker):
        lying = LyingClient(client, random, told, task, log)
        # Lies can raise any error here. An error ends only this session; the next one follows.
        with suppress(Exception):
            take_part(settings, {worker: lying})


def main() -> None:
    """Run each lying worker in a thread."""
    task = Task.model_validate_json(sys.argv[1])
    with _LOG.open("a") as log:
        liars = [threading.Thread(target=_lie, args=(task, one, log)) for one in task.workers]
        for liar in liars:
            liar.start()
        for liar in liars:
            liar.join()


if __name__ == "__main__":
    main()
