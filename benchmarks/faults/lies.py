"""Train with two honest workers and three liars; check that every run ends with a result.

hub --- two honest workers
    --- three liars, which train but falsify messages by the rules of `grammar`
"""

import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attempt import Attempt, Ended, peak_nbytes
from paceline.rpc.keys import generate_keys
from paceline.rpc.limits import CREDIT_MESSAGES, QUEUED_PIECES

HERE = Path(__file__).parent
_EPOCHS, _HONEST_EPOCHS = 100, 10
_DEADLINE_S, _STALL_S = 2.0, 30.0
_NUM_WORKERS, _NUM_LIARS = 5, 3
_MESSAGE_NBYTES = 4 << 20  # largest message of the model below
_RECORD_TIMES = 30  # memory to check a record, per byte of its text; the hub checks one at a time
_SLACK_NBYTES = 32 << 20  # variation of peak memory between runs
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
class Run:
    """Outcome of a run; `faults` are sentences, and empty if the run passed."""

    seed: int
    lies: Counter[str]
    faults: list[str]
    peak_nbytes: int
    seconds: float
    train_loss: float | None


def run(seed: int, *, lies: bool, epochs: int = _EPOCHS) -> Run:
    """Train with five workers, three of which lie if `lies`; return the outcome."""
    # Rotate the liars over all numbers: the first worker's buffers become the model's buffers.
    liars = sorted({(seed + i) % _NUM_WORKERS for i in range(_NUM_LIARS)}) if lies else []
    honest = [number for number in range(_NUM_WORKERS) if number not in liars]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, began_s = Path(name), time.monotonic()
        (folder / "small.py").write_text(_MODEL)
        generate_keys(folder / "keys")
        hub = Attempt(_hub(seed, epochs), folder, "hub", folder)
        stack.callback(hub.kill)
        if (port := hub.port()) is None:
            raise RuntimeError(hub.end().said)
        words = [_worker(port, number) for number in honest]
        words += [_liars(port, liars, seed)] if liars else []
        others = [Attempt(one, folder, "worker", folder) for one in words]
        for one in others:
            stack.callback(one.kill)
        peak = 0
        while hub.is_running:
            peak = max(peak, peak_nbytes(hub.process.pid))
            time.sleep(0.1)
        ended, seconds = hub.end(), time.monotonic() - began_s
        ends = [one.end() for one in others[: len(honest)]]
        faults, loss = _faults(folder, epochs, ended, ends)
        faults += ["the liars ended by themselves" for one in others if not one.is_running][
            len(honest) :
        ]
        log = folder / "lies.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
    told = Counter(json.loads(line)["rule"] for line in lines)
    return Run(seed, told, faults, peak, seconds, loss)


def _hub(seed: int, epochs: int) -> list[str]:
    strategy = "--strategy-option lanes=1 --strategy-option head=fc1"
    settings = f"{strategy} --strategy-option seed={seed} --epochs {epochs} --batch-size 48"
    times = f"--timeout {_DEADLINE_S} --profile-s 0.05 --wait 300 --checkpoint-every 1s"
    place = f"--workers {_NUM_WORKERS} --listen tcp://127.0.0.1:0 --keys keys --output runs"
    words = f"-m paceline hub small:Small --data digits --learning-rate 0.02 {settings} {times}"
    return f"{words} {place}".split()


def _worker(port: int, number: int) -> list[str]:
    place = f"--connect tcp://127.0.0.1:{port} --keys keys --worker-ids {number}"
    return f"-m paceline worker {place} --device cpu --threads 1 --timeout 30".split()


def _liars(port: int, workers: list[int], seed: int) -> list[str]:
    task = {"address": f"tcp://127.0.0.1:{port}", "workers": workers, "seed": seed}
    return [str(HERE / "liar.py"), json.dumps(task | {"stall_s": _STALL_S})]


def _faults(
    folder: Path, epochs: int, hub: Ended, honest: list[Ended]
) -> tuple[list[str], float | None]:
    """Return the faults of the hub and the honest workers, and the last training loss."""
    faults = [
        f"a process ended with {one.code}: {one.said[-2000:]}"
        for one in (hub, *honest)
        if one.code or "Traceback" in one.said
    ]
    found = list(folder.glob("runs/*/result.json"))
    if not found:
        return [*faults, "there is no result"], None
    known: list[dict[str, Any]] = json.loads(found[0].read_text())["epochs"]
    if len(known) != epochs:
        faults.append(f"{len(known)} epochs of {epochs}")
    return faults, known[-1]["train_loss"]


def bound_nbytes(honest_nbytes: int) -> int:
    """Return the bound of the hub's memory: an honest run's peak, and the memory of lies.

    Each liar can fill its unanswered requests and its queues. The hub also checks one record.
    """
    queues = 2 * QUEUED_PIECES * (256 << 10)
    held = (CREDIT_MESSAGES + 1) * _MESSAGE_NBYTES + queues
    return honest_nbytes + _NUM_LIARS * held + _RECORD_TIMES * _MESSAGE_NBYTES + _SLACK_NBYTES


def measure(count: int, seed: int) -> dict[str, Any]:
    """Run until liars have sent `count` lies; return the runs' outcomes and the bound."""
    honest = run(seed, lies=False, epochs=_HONEST_EPOCHS)
    bound = bound_nbytes(honest.peak_nbytes)
    told: Counter[str] = Counter()
    rows = []
    while told.total() < count:
        found = run(seed + len(rows), lies=True)
        if found.peak_nbytes > bound:
            found.faults.append(f"memory of {found.peak_nbytes:,} bytes")
        told += found.lies
        rows.append({**asdict(found), "strategy": "wheel", "lies": found.lies.total()})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    known = {"bounds_nbytes": {"wheel": bound}, "honest_nbytes": {"wheel": honest.peak_nbytes}}
    return {"lies": dict(told), "runs": rows, **known}
