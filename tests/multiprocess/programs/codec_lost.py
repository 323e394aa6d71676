"""Ranks that exchange encoded gradients, one of which is killed or stopped: how the others end.

Argument: a JSON list of [codec, signal]. One process imports torch and forks the ranks of all
runs, which leave as processes of users do: through the end of the program.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 - which optimizers import when they are first used
from codec_bounds import loss_of, momentum, network
from torch import Tensor

from paceline import DataParallel
from paceline.strategies import EXCHANGES

SIZE, VICTIM, STEP = 3, 1, 5
DEADLINE_S = 5.0
PATIENCE_S = 60.0  # after which a rank that has not ended is a fault of ours


class Run:
    """The ranks of a run, which has begun."""

    def __init__(self, codec: str, name: str) -> None:
        self._codec, self._signal = codec, signal.Signals[name]
        self._folder = Path(tempfile.mkdtemp())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._begun = time.monotonic()
        self.pids = [self._fork(rank, port) for rank in range(SIZE)]
        self._ended: dict[int, tuple[int, float]] = {}

    def _fork(self, rank: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        place = {"RANK": rank, "WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": SIZE, "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {name: str(value) for name, value in place.items()}
        warnings.simplefilter("ignore")
        try:
            self._train(rank)
        except Exception as error:
            (self._folder / f"{rank}").write_text(f"{type(error).__name__}: {error}")
            sys.exit(3)
        sys.exit(0)

    def _train(self, rank: int) -> None:
        module = network()
        parallel = DataParallel(
            module, exchange="allreduce", codec=self._codec, deadline_s=DEADLINE_S
        )
        optimizer = momentum(parallel)
        step = 0

        def strike(gradient: Tensor) -> None:
            if rank == VICTIM and step == STEP:
                (self._folder / "struck").write_text(str(time.monotonic()))
                os.kill(os.getpid(), self._signal)

        module[4].weight.register_hook(strike)
        for step in range(1000):
            optimizer.zero_grad()
            loss_of(parallel, rank, step).backward()
            optimizer.step()

    def look(self) -> bool:
        """Note who has ended; return whether all but the victim have, or patience has."""
        for rank, pid in enumerate(self.pids):
            ended, status = (0, 0) if rank in self._ended else os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        others = set(range(SIZE)) - {VICTIM}
        return others <= set(self._ended) or time.monotonic() > self._begun + PATIENCE_S

    def end(self) -> dict[str, Any]:
        """Return how each rank but the victim has ended, and how long after it was struck."""
        for rank in set(range(SIZE)) - set(self._ended):
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
        struck_at = float((self._folder / "struck").read_text())
        found = {}
        for rank in sorted(set(range(SIZE)) - {VICTIM}):
            code, at = self._ended.get(rank, (None, float("inf")))
            said = self._folder / f"{rank}"
            error = said.read_text() if said.exists() else None
            found[rank] = {"code": code, "error": error, "after_s": at - struck_at}
        return found


def main() -> None:
    for strategy in EXCHANGES.values():
        import_module(strategy.run)
    runs = [Run(*one) for one in json.loads(sys.argv[1])]
    running = list(runs)
    while running:
        running = [run for run in running if not run.look()]
        time.sleep(0.02)
    for run in runs:
        print(json.dumps(run.end()), flush=True)


if __name__ == "__main__":
    main()
