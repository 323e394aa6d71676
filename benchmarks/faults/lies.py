"""Runs with honest workers and some that lie: they end with a result every time.

hub --- two honest workers
    --- three liars, which do a worker's work, and change what they say, by `grammar`
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.rpc.keys import generate_keys
from paceline.rpc.limits import CREDIT_MESSAGES, QUEUED_PIECES

HERE = Path(__file__).parent
STRATEGIES = ("wheel",)
_EPOCHS = {"wheel": 100}
_DEADLINE_S, _STALL_S, _ENDS_S = 2.0, 30.0, 600.0
_NUM_WORKERS, _NUM_LIARS = 5, 3
_MESSAGE_NBYTES = {"wheel": 4 << 20}  # the largest of the model below
_RECORD_TIMES = 30  # as much memory as its text takes a record while it is checked, one at a time
_SLACK_NBYTES = 32 << 20  # what a process differs by from run to run
_MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.fc1 = nn.Linear(54, 48)
        self.inner = nn.BatchNorm1d(48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, images):
        maps = F.max_pool2d(self.norm(torch.relu(self.conv(images))), 2)
        return self.fc2(torch.relu(self.inner(self.fc1(maps.flatten(1)))))
"""


@dataclass
class Watched:
    """A process whose words are kept, and its peak memory."""

    process: subprocess.Popen[str]
    err: list[str] = field(default_factory=list)
    out: list[str] = field(default_factory=list)
    peak_nbytes: int = 0
    threads: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def start(cls, command: list[str], folder: Path, environment: dict[str, str]) -> "Watched":
        """Start a command, and read what it says."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        found = cls(subprocess.Popen(command, cwd=folder, env=environment, **pipes))  # type: ignore[call-overload]
        for stream, kept in ((found.process.stderr, found.err), (found.process.stdout, found.out)):
            thread = threading.Thread(target=_keep, args=(stream, kept))
            thread.start()
            found.threads.append(thread)
        return found

    def finish(self, until_s: float) -> int | None:
        """Wait for its end, and measure its memory; None if it has not ended by then."""
        status = Path(f"/proc/{self.process.pid}/status")
        while self.process.poll() is None and time.monotonic() < until_s:
            peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
            self.peak_nbytes = max(self.peak_nbytes, 1024 * int(peak[1]) if peak else 0)
            time.sleep(0.1)
        return self.process.poll()

    def address(self) -> str:
        """Return where a hub listens."""
        until_s = time.monotonic() + _ENDS_S
        while time.monotonic() < until_s and self.process.poll() is None:
            if found := re.search(r"listening on (tcp://\S+);", "".join(self.err)):
                return found[1]
            time.sleep(0.05)
        raise RuntimeError("".join(self.err))

    def kill(self) -> None:
        """End the process at once."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join()


def _keep(stream: IO[str], kept: list[str]) -> None:
    with stream:
        kept.extend(stream)


@dataclass
class Run:
    """What came of a run: its faults are sentences, none if all is well."""

    strategy: str
    seed: int
    lies: Counter[str]
    faults: list[str]
    peak_nbytes: int
    seconds: float
    loss: float | None
    refused: int


def run(strategy: str, seed: int, *, lies: bool, epochs: int | None = None) -> Run:
    """Train with honest workers, and others that lie, or not."""
    with tempfile.TemporaryDirectory() as name:
        return _Trial(Path(name), strategy, seed, lies, epochs or _EPOCHS[strategy]).carry_out()


class _Trial:
    def __init__(self, folder: Path, strategy: str, seed: int, lies: bool, epochs: int) -> None:
        (folder / "small.py").write_text(_MODEL)
        generate_keys(folder / "keys")
        self._folder, self._strategy, self._seed = folder, strategy, seed
        self._epochs = epochs
        # Each number lies in its turn: the first worker's buffers are everybody's.
        liars = {(seed + i) % _NUM_WORKERS for i in range(_NUM_LIARS)} if lies else set()
        self._liars = sorted(liars)
        self._honest = [one for one in range(_NUM_WORKERS) if one not in liars]
        self._log = folder / "lies.jsonl"
        self._environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def _start(self, *words: str) -> Watched:
        command = [sys.executable, *words]
        return Watched.start(command, self._folder, self._environment)

    def _hub(self) -> Watched:
        of_strategy = {
            "wheel": ("--set", "lanes=1", "--set", "head=fc1"),
        }
        return self._start(
            *("-m", "paceline", "hub", "small:Small", "--strategy", self._strategy),
            *("--workers", str(_NUM_WORKERS), "--bind", "tcp://127.0.0.1:0", "--keys", "keys"),
            *("--data", "digits", "--batch-size", "48", "--epochs", str(self._epochs)),
            *("--deadline-s", str(_DEADLINE_S), "--profile-s", "0.05", "--wait-s", "300", "--json"),
            *("--seed", str(self._seed), "--checkpoint-every", "1s", "--learning-rate", "0.02"),
            *of_strategy[self._strategy],
        )

    def _worker(self, address: str, number: int) -> Watched:
        return self._start(
            *("-m", "paceline", "worker", "--connect", address, "--keys", "keys"),
            *("--as", str(number), "--device", "cpu", "--threads", "1", "--deadline-s", "30"),
        )

    def _liar_at(self, address: str) -> Watched:
        task = {
            "address": address,
            "strategy": self._strategy,
            "workers": self._liars,
            "seed": self._seed,
            "log": str(self._log),
            "keys": "keys",
            "run": "paceline",
            "deadline_s": 5.0,
            "stall_s": _STALL_S,
        }
        return self._start(str(HERE / "liar.py"), json.dumps(task))

    def carry_out(self) -> Run:
        """Run it to its end, and say what is wrong with that."""
        began_s = time.monotonic()
        hub = self._hub()
        others: list[Watched] = []
        try:
            address = hub.address()
            honest = self._honest
            others += [self._worker(address, number) for number in honest]
            if self._liars:
                others.append(self._liar_at(address))
            code = hub.finish(time.monotonic() + _ENDS_S)
            seconds = time.monotonic() - began_s
            codes = [one.finish(time.monotonic() + _ENDS_S) for one in others[: len(honest)]]
            ended = [one for one in others[len(honest) :] if one.process.poll() is not None]
        finally:
            for one in (hub, *others):
                one.kill()
        faults, loss = self._faults(hub, code, codes, others[: len(honest)])
        faults += [f"the liars ended by themselves: {''.join(one.err[-3:])}" for one in ended]
        log = self._log.read_text().splitlines() if self._log.exists() else []
        told = Counter(json.loads(line)["rule"] for line in log)
        refused = sum("is refused" in line for line in hub.err)
        known = self._strategy, self._seed, told, faults, hub.peak_nbytes, seconds
        return Run(*known, loss, refused)

    def _faults(
        self, hub: Watched, code: int | None, codes: list[int | None], honest: list[Watched]
    ) -> tuple[list[str], float | None]:
        faults, loss = [], None
        if code != 0:
            faults.append(f"the hub's exit code is {code}: {''.join(hub.err[-4:])}")
        else:
            result: dict[str, Any] = json.loads("".join(hub.out))
            loss = result["epochs"][-1]["train_loss"]
            if len(result["epochs"]) != self._epochs:
                faults.append(f"{len(result['epochs'])} epochs of {self._epochs}")
        for number, (own, one) in enumerate(zip(codes, honest, strict=True)):
            if own != 0:
                faults.append(f"honest worker {number} ended with {own}: {''.join(one.err[-3:])}")
        for one in (hub, *honest):
            said = "".join(one.err)
            if "Traceback" in said:
                faults.append(f"a traceback: {said[-2000:]}")
        return faults, loss


def bound_nbytes(strategy: str, honest_nbytes: int) -> int:
    """Return the memory that a hub may take: that of an honest run, and what liars may hold.

    Of each its unanswered requests and its queues; and the record that is being checked.
    """
    queues = 2 * QUEUED_PIECES * (256 << 10)
    message = _MESSAGE_NBYTES[strategy]
    held = (CREDIT_MESSAGES + 1) * message + queues
    return honest_nbytes + _NUM_LIARS * held + _RECORD_TIMES * message + _SLACK_NBYTES


def measure(count: int, seed: int) -> dict[str, Any]:
    """Run until so many lies were told; return what came of the runs."""
    honest = {one: run(one, seed, lies=False, epochs=10) for one in STRATEGIES}
    bounds = {one: bound_nbytes(one, found.peak_nbytes) for one, found in honest.items()}
    told: Counter[str] = Counter()
    rows = []
    while told.total() < count:
        for strategy in STRATEGIES:
            found = run(strategy, seed, lies=True)
            if found.peak_nbytes > bounds[strategy]:
                found.faults.append(f"memory of {found.peak_nbytes:,} bytes")
            told += found.lies
            rows.append(found)
            print(
                f"{strategy}, seed {seed}: {found.lies.total()} lies, {found.seconds:.0f} s, "
                f"loss {found.loss}, {found.peak_nbytes / 2**20:.0f} MiB; {found.faults or 'well'}",
                file=sys.stderr,
                flush=True,
            )
            seed += 1
    return {
        "lies": dict(told),
        "runs": [
            {
                "strategy": one.strategy,
                "seed": one.seed,
                "lies": one.lies.total(),
                "faults": one.faults,
                "peak_nbytes": one.peak_nbytes,
                "seconds": one.seconds,
                "train_loss": one.loss,
            }
            for one in rows
        ],
        "bounds_nbytes": bounds,
        "honest_nbytes": {one: found.peak_nbytes for one, found in honest.items()},
    }
