"""Run workers that have valid keys and train, but falsify some of their messages.

    liar.py ADDRESS SEED WORKER...

Each lie appends a line of JSON to lies.jsonl: its rule and its topic. A worker that the hub
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

from paceline.core.errors import InvalidInput, WorkerLost
from paceline.rpc.client import Client, ReplyFuture
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.frames import Message
from paceline.rpc.keys import load_worker_keys
from paceline.strategies.wheel.worker import take_part

_RUN, _DEADLINE_S, _STALL_S = "paceline", 5.0, 30.0  # the stall exceeds the hub's deadline
_SHARE = 0.25  # share of messages that are lies
_SHARE_OF_PROBES = 0.01  # lower, because a worker sends 200 probes before it trains
_NUM_LIES = 1000  # drawn before a worker connects, and used cyclically
_STALL_SHARE = 0.004  # share of messages that a worker delays


class LyingClient:
    """A worker's connection that replaces some messages by lies."""

    def __init__(self, client: Client, random: Random, told: Iterator[Lie], log: TextIO) -> None:
        self._client, self._random, self._told, self._log = client, random, told, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def request(self, message: Message) -> ReplyFuture:
        """Send the message, a lie instead, or a lie and then the message."""
        random = self._random
        share = _SHARE_OF_PROBES if message.topic == "probe" else _SHARE
        if random.random() < _STALL_SHARE * share / _SHARE:
            self._say("stall", message.topic)
            time.sleep(_STALL_S)
        rule, change = next(self._told)
        lie = change(message) if random.random() < share else None
        if lie is None:
            return self._client.request(message)
        self._say(rule, message.topic)
        told = self._client.request(lie)
        return self._client.request(message) if random.random() < 0.1 else told

    def _say(self, rule: str, topic: str) -> None:
        self._log.write(json.dumps({"rule": rule, "topic": topic}) + "\n")
        self._log.flush()


def _sessions(address: str, worker: int) -> Iterator[Client]:
    """Yield new connections endlessly; close each before the next one opens."""
    keys = load_worker_keys(Path("keys"))
    while True:
        try:
            client = Client(address, _RUN, worker, keys=keys, deadline_s=_DEADLINE_S)
        except (WorkerLost, InvalidInput):  # a busy hub may also answer too late
            time.sleep(0.2)
            continue
        with closing(client):
            yield client


def _lie(address: str, seed: int, worker: int, log: TextIO) -> None:
    """Run one lying worker endlessly."""
    random = Random(f"{seed} {worker}")  # noqa: S311 - no secret
    place = {"connect": address, "run_name": _RUN, "deadline_s": _DEADLINE_S, "workers": (worker,)}
    settings = WorkerProcessSettings(**place, device="cpu", threads=1)
    told = cycle(lies(seed + worker, _NUM_LIES))
    for client in _sessions(address, worker):
        # Lies can raise any error here. An error ends only this session; the next one follows.
        with suppress(Exception):
            take_part(settings, {worker: LyingClient(client, random, told, log)})


if __name__ == "__main__":
    with Path("lies.jsonl").open("a") as log:
        for number in sys.argv[3:]:
            arguments = sys.argv[1], int(sys.argv[2]), int(number), log
            threading.Thread(target=_lie, args=arguments).start()
        threading.Event().wait()
