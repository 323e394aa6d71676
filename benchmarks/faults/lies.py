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
from pathlib import Path
from typing import Any

from attempt import Attempt, Ended, peak_nbytes
from paceline.rpc.keys import generate_keys
from paceline.rpc.limits import CREDIT_MESSAGES, QUEUED_PIECES

_LIAR = Path(__file__).with_name("liar.py")
_SEED, _EPOCHS, _HONEST_EPOCHS = 1, 100, 10
_NUM_WORKERS, _NUM_LIARS = 5, 3
_MESSAGE_NBYTES = 4 << 20  # largest message of the model below
_RECORD_TIMES = 30  # memory to check a record, per byte of its text; the hub checks one at a time
_SLACK_NBYTES = 32 << 20  # variation of peak memory between runs
_HUB = (
    "-m paceline hub small:Small --data digits --learning-rate 0.02 --batch-size 48 "
    "--strategy-option lanes=1 --strategy-option head=fc1 --timeout 2 --profile-s 0.05 --wait 300 "
    "--checkpoint-every 1s --listen tcp://127.0.0.1:0 --keys keys --output runs"
)
_WORKER = "-m paceline worker --keys keys --device cpu --threads 1 --timeout 30"
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


def run(seed: int, *, lies: bool, epochs: int = _EPOCHS) -> dict[str, Any]:
    """Train with five workers, three of which lie if `lies`; return the outcome.

    `faults` of the outcome are sentences; there are none if the run passed.
    """
    # Rotate the liars over all numbers: the first worker's buffers become the model's buffers.
    liars = sorted({(seed + i) % _NUM_WORKERS for i in range(_NUM_LIARS)}) if lies else []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, began_s = Path(name), time.monotonic()

        def started(words: str, role: str) -> Attempt:
            attempt = Attempt(words.split(), folder, role, folder)
            stack.callback(attempt.kill)
            return attempt

        (folder / "small.py").write_text(_MODEL)
        generate_keys(folder / "keys")
        sizes = f"--strategy-option seed={seed} --epochs {epochs} --workers {_NUM_WORKERS}"
        hub = started(f"{_HUB} {sizes}", "hub")
        if (port := hub.port()) is None:
            raise RuntimeError(hub.end().said)
        address = f"tcp://127.0.0.1:{port}"
        honest = [
            started(f"{_WORKER} --connect {address} --worker-ids {number}", "worker")
            for number in range(_NUM_WORKERS)
            if number not in liars
        ]
        numbers = " ".join(map(str, liars))
        liar = started(f"{_LIAR} {address} {seed} {numbers}", "worker") if liars else None
        peak = 0
        while hub.is_running:
            peak = max(peak, peak_nbytes(hub.process.pid))
            time.sleep(0.1)
        seconds = time.monotonic() - began_s
        faults, loss = _faults(folder, epochs, [one.end() for one in (hub, *honest)])
        if liar and not liar.is_running:
            faults.append("the liars ended by themselves")
        log = folder / "lies.jsonl"
        told = [json.loads(line)["rule"] for line in log.read_text().splitlines()] if liars else []
    figures = {"peak_nbytes": peak, "seconds": seconds, "train_loss": loss}
    return {"strategy": "wheel", "seed": seed, "lies": Counter(told), "faults": faults, **figures}


def _faults(folder: Path, epochs: int, ends: list[Ended]) -> tuple[list[str], float | None]:
    """Return the faults of the hub and the honest workers, and the last training loss."""
    faults = [
        f"a process ended with {one.code}: {one.said[-2000:]}"
        for one in ends
        if one.code or "Traceback" in one.said
    ]
    found = list(folder.glob("runs/*/result.json"))
    if not found:
        return [*faults, "there is no result"], None
    known: list[dict[str, Any]] = json.loads(found[0].read_text())["epochs"]
    if len(known) != epochs:
        faults.append(f"{len(known)} epochs of {epochs}")
    return faults, known[-1]["train_loss"]


def measure(count: int) -> dict[str, Any]:
    """Run until liars have sent `count` lies; return the runs' outcomes and the bound.

    The bound of the hub's memory: an honest run's peak, and the memory of lies. Each liar can fill
    its unanswered requests and its queues. The hub also checks one record.
    """
    honest = run(_SEED, lies=False, epochs=_HONEST_EPOCHS)["peak_nbytes"]
    held = (CREDIT_MESSAGES + 1) * _MESSAGE_NBYTES + 2 * QUEUED_PIECES * (256 << 10)
    bound = honest + _NUM_LIARS * held + _RECORD_TIMES * _MESSAGE_NBYTES + _SLACK_NBYTES
    told: Counter[str] = Counter()
    rows = []
    while told.total() < count:
        found = run(_SEED + len(rows), lies=True)
        if found["peak_nbytes"] > bound:
            found["faults"].append(f"memory of {found['peak_nbytes']:,} bytes")
        told += found["lies"]
        rows.append(found | {"lies": found["lies"].total()})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    known = {"bounds_nbytes": {"wheel": bound}, "honest_nbytes": {"wheel": honest}}
    return {"lies": dict(told), "runs": rows, **known}
