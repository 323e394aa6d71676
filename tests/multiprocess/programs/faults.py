"""Ranks of a user's own program, one of which is killed or stopped; print what the others say.

One process imports torch and forks the ranks of every scenario, several scenarios at a time: most
of their time they wait. The ranks find the environment of torchrun, and nobody looks after them.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import when they are first used: once is enough
from graphs import Net
from torch import Tensor

from paceline import DataParallel
from paceline.strategies import EXCHANGES
from ranks import batch, bits, device

AT_ONCE = 3
PATIENCE_S = 30.0  # after which a rank that has not ended is a fault of ours
LONG = 2000  # steps: more than a scenario lasts


class Victim(Net):
    """A net that harms its own process in the given phase of a step."""

    def __init__(self, strike: Any) -> None:
        super().__init__()
        self.strike = strike
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        self.strike("construction")
        return super().named_buffers(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        self.strike("forward")
        self.seen += x.detach().sum(0)
        x = torch.tanh(self.b(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: self.strike("backward"))
        return self.c(x)


class Rank:
    """What a rank does, and what it writes about that into `folder`."""

    def __init__(self, scenario: dict[str, Any], rank: int, folder: Path) -> None:
        self.scenario, self.rank, self.folder = scenario, rank, folder
        self.step = -1

    def strike(self, phase: str) -> None:
        one = self.scenario
        if (self.rank, phase, self.step) != (one["victim"], one["phase"], one["step"]):
            return
        (self.folder / "struck").write_text(str(time.monotonic()))
        if one["signal"] == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.Signals[one["signal"]])
        self.step = 10**6 if one["phase"] == "construction" else self.step

    def train(self) -> str:
        torch.manual_seed(self.rank)
        options = {"exchange": self.scenario["exchange"], "chunk": 1, "deadline_s": 3.0}
        with torch.device(device()):
            module = Victim(self.strike)
        parallel = DataParallel(module, **options)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
        (self.folder / f"ready{self.rank}").touch()
        for step in range(self.scenario.get("steps", LONG)):
            self.step = step
            optimizer.zero_grad()
            parallel(batch(self.rank, self.step)).square().mean().backward()
            self.strike("optimizer")
            optimizer.step()
            time.sleep(0.001)
        return bits(module)

    def run(self) -> None:
        warnings.simplefilter("ignore")
        try:
            outcome = {"bits": self.train()}
        except BaseException as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        outcome["time"] = time.monotonic()
        (self.folder / f"outcome{self.rank}").write_text(json.dumps(outcome))


class Scenario:
    """The processes of a scenario, which has begun."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.scenario = scenario
        self.folder = Path(tempfile.mkdtemp())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.until = time.monotonic() + PATIENCE_S
        self.at: float | None = None
        self.interrupted = False
        size = scenario.get("size", 2)
        self.pids = [self._fork(rank, size, port) for rank in range(size)]
        self.running = set(self.pids)

    def _fork(self, rank: int, size: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        place |= {"PACELINE_SIMULATED_GPUS": size if self.scenario.get("on_gpu") else 0}
        os.environ |= {name: str(value) for name, value in place.items()}
        try:
            Rank(self.scenario, rank, self.folder).run()
        finally:
            os._exit(1)

    def look(self) -> bool:
        """Do what is due from outside; return whether all is over."""
        for pid in list(self.running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.running.discard(pid)
        victim = self.pids[self.scenario["victim"]]
        struck = self.folder / "struck"
        if struck.exists():
            self._after(victim, time.monotonic() - float(struck.read_text() or "inf"))
        elif self.scenario["phase"] == "outside":
            self._from_outside(victim, struck)
        spared = set() if "resumed_s" in self.scenario else {victim}
        return self.running <= spared or time.monotonic() > self.until

    def _from_outside(self, victim: int, struck: Path) -> None:
        ready = all((self.folder / f"ready{rank}").exists() for rank in range(len(self.pids)))
        if ready and self.at is None:
            self.at = time.monotonic() + self.scenario["step"]
        if self.at is not None and time.monotonic() >= self.at:
            struck.write_text(str(time.monotonic()))
            with suppress(ProcessLookupError):  # ended by itself: what the others say will show it
                os.kill(victim, signal.Signals[self.scenario["signal"]])

    def _after(self, victim: int, seconds: float) -> None:
        if seconds > self.scenario.get("resumed_s", float("inf")) and victim in self.running:
            os.kill(victim, signal.SIGCONT)
        if seconds > self.scenario.get("interrupted_s", float("inf")) and not self.interrupted:
            self.interrupted = True
            for pid in self.running - {victim}:
                os.kill(pid, signal.SIGINT)

    def end(self) -> dict[str, Any]:
        """Return what came of it: of each rank but a lost one, what it said, and how much later."""
        left = [self.pids.index(pid) for pid in self.running]
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        struck = self.folder / "struck"
        at = float(struck.read_text()) if struck.exists() else float("nan")
        outcomes: dict[int, Any] = {}
        for rank in range(len(self.pids)):
            path = self.folder / f"outcome{rank}"
            if path.exists():
                outcomes[rank] = json.loads(path.read_text())
                outcomes[rank]["after_s"] = outcomes[rank].pop("time") - at
        return {"pids": self.pids, "left": left, "outcomes": outcomes, "struck": struck.exists()}


def main() -> None:
    for strategy in EXCHANGES.values():
        import_module(strategy.run)
    scenarios = json.loads(sys.argv[1])
    waiting, running = dict(enumerate(scenarios)), {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number = min(waiting)
            running[number] = Scenario(waiting.pop(number))
        for number in [number for number, scenario in running.items() if scenario.look()]:
            print(json.dumps([number, running.pop(number).end()]), flush=True)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
