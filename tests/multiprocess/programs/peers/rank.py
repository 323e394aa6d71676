"""One rank of a pair that runs programs, one after another: see pairs.py.

Each runs first with the reference and then with each exchange that is to be tried, in a process
group of its own: what one leaves behind harms no other. A rank that gets stuck says where it is,
and ends.
"""

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparison import differences, unexpected
from torch.distributed.rendezvous import rendezvous

from trial import PROGRAMS, Trial, observe

Outcome = dict[str, Any]


class Rank:
    """One rank of the pair."""

    def __init__(self, folder: Path) -> None:
        self._store, self._rank, self._size = next(
            rendezvous("env://", timeout=timedelta(seconds=300))
        )
        self._folder = folder
        self._stuck = (folder / f"stuck{self._rank}.txt").open("w")

    def work(self, orders: list[tuple[str, str, list[str]]]) -> None:
        for name, reference, exchanges in orders:
            import_module(name.partition(".")[0])
            expected, outcome = self._one(name, reference)
            outcome["failures"] += unexpected(PROGRAMS[name], expected)
            self._say(name, reference, outcome)
            exact = self._exact(name, exchanges)
            for exchange in exchanges:
                beside = exact if exchange in PROGRAMS[name].exact_by else expected
                self._say(name, exchange, self._compared(name, exchange, beside))
        self._store.set(f"end/{self._rank}", "")
        for other in range(self._size):
            self._store.wait([f"end/{other}"])

    def _exact(self, name: str, exchanges: list[str]) -> list[Any]:
        """What one process comes to, if any exchange is to be compared with that."""
        if not set(exchanges) & set(PROGRAMS[name].exact_by):
            return []
        expected, outcome = self._one(name, "alone")
        self._say(name, "alone", outcome)
        return expected

    def _compared(self, name: str, exchange: str, expected: list[Any]) -> Outcome:
        ours, outcome = self._one(name, exchange)
        if not outcome["failures"]:
            outcome["failures"] = differences(PROGRAMS[name], exchange, expected, ours)
            outcome["traceback"] = _traceback(ours) if outcome["failures"] else ""
        return outcome

    def _one(self, name: str, kind: str) -> tuple[list[Any], Outcome]:
        """Run a program once; return what was seen and what went wrong with the program itself."""
        key = f"{name}/{kind}"
        if self._rank == 0:
            self._write({"begins": [name, kind]})
        faulthandler.dump_traceback_later(PROGRAMS[name].deadline_s, exit=True, file=self._stuck)
        begun = time.monotonic()
        self._join(key, PROGRAMS[name].wait_s)
        failures, seen = [], []
        try:
            trial = Trial(self._rank, self._size, kind, PROGRAMS[name].wait_s)
            seen = observe(PROGRAMS[name], trial)
        except AssertionError:
            failures.append(f"the program's own check: {traceback.format_exc(limit=-2)}")
        self._leave()
        faulthandler.cancel_dump_traceback_later()
        return seen, {"failures": failures, "traceback": "", "s": time.monotonic() - begun}

    def _join(self, key: str, wait_s: float) -> None:
        torch.set_default_dtype(torch.float64)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(key, self._store),
            rank=self._rank,
            world_size=self._size,
            timeout=timedelta(seconds=wait_s),
        )

    def _leave(self) -> None:
        # A callback in one of gloo's threads must not be the last to let go of the group: it
        # would wait for itself.
        self._last_group = dist.group.WORLD
        gc.collect()  # models go, and their threads with them
        gc.freeze()  # what is left need not be looked at again
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_default_dtype(torch.float32)

    def _say(self, name: str, kind: str, outcome: Outcome) -> None:
        """Gather what came of a program; all ranks begin the next one together."""
        key = f"said/{name}/{kind}"
        self._store.set(f"{key}/{self._rank}", json.dumps(outcome))
        rows = [json.loads(self._store.get(f"{key}/{other}")) for other in range(self._size)]
        if self._rank == 0:
            self._write({"ended": [name, kind], "ranks": rows})

    def _write(self, line: dict[str, Any]) -> None:
        with (self._folder / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _traceback(seen: list[Any]) -> str:
    """Where the program's last error came from, without torch's own frames."""
    if not (seen and isinstance(seen[-1], Exception)):
        return ""
    frames = traceback.extract_tb(seen[-1].__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    return "; ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in own[-6:])


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    Rank(folder).work(json.loads((folder / "orders.json").read_text()))
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still wait for a rank in a program that failed


if __name__ == "__main__":
    main()
