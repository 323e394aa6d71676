"""Test elastic LocalUpdates with torchft: a hundred faults, and speed against torchft's DiLoCo.

A lighthouse and the workers are processes of this machine. In the first part, three workers are
killed, stopped, or lose their connections, each at a failpoint of an exchange; a seeded generator
draws the worker, the failpoint and the kind of fault. Killed workers are restarted at once. In the
second part, two workers train the same small GPT with LocalUpdates and with DiLoCo, in turns.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from figures import shown, spread, table

HERE = Path(__file__).parent
_SEED, _WORKERS, _SYNC_EVERY = 17, 3, 20
_KINDS = {"kill": 40, "short stop": 15, "long stop": 20, "cut": 25}
_DO = {"kill": "SIGKILL", "short stop": "SIGSTOP", "long stop": "SIGSTOP", "cut": "raise"}
_STOPPED_S = {"short stop": (0.2, 1.5), "long stop": (8.0, 10.0)}  # an exchange's deadline is 5 s
_PLACES = ("start", "headers", "mean")
_CALM = 3  # exchanges with all workers before a fault
_POLL_S, _HANGS_S, _ENDS_S = 0.05, 120.0, 120.0
_WAYS = {
    "torchft DiLoCo": ("torchft",),
    "LocalUpdates": ("paceline",),
    "LocalUpdates, dynamic8": ("paceline", "dynamic8"),
    "LocalUpdates, dynamic4": ("paceline", "dynamic4"),
}
_NUM_STEPS, _EVERY, _REPEATS = 1000, 50, 3


class Fault(NamedTuple):
    """A fault of one worker at a failpoint of its next exchange."""

    kind: str
    worker: int
    after: str
    lasts_s: float


def drawn(num_faults: int) -> list[Fault]:
    """Return faults in a random order, on random workers, at random places."""
    chance = random.Random(_SEED)  # noqa: S311
    kinds = [kind for kind, count in _KINDS.items() for _ in range(count)]
    chance.shuffle(kinds)
    if num_faults < len(kinds):
        kinds = [*_KINDS, *kinds][:num_faults]
    found = []
    for kind in kinds:
        worker, after = chance.randrange(_WORKERS), chance.choice(_PLACES)
        lasts_s = chance.uniform(*_STOPPED_S.get(kind, (0.0, 0.0)))
        found.append(Fault(kind, worker, after, lasts_s))
    return found


@contextmanager
def lighthouse(min_replicas: int = 1) -> Iterator[str]:
    """Start a lighthouse; yield its address."""
    os.environ.setdefault("RUST_LOG", "error")
    program = (
        "import signal; from torchft.coordination import LighthouseServer as Server;"
        f"one = Server(bind='127.0.0.1:0', min_replicas={min_replicas}, join_timeout_ms=60000,"
        " quorum_tick_ms=50, heartbeat_timeout_ms=2000); print(one.address(), flush=True);"
        "signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip().rpartition(':')[2]}"
    finally:
        process.kill()
        process.wait()


class Site:
    """A worker, whose process is restarted after it was killed."""

    def __init__(self, number: int, folder: Path, *arguments: str) -> None:
        self.name, self._folder, self._arguments = str(number), folder, arguments
        self.num_started = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.num_started += 1
        kind, *rest = self._arguments
        command = [sys.executable, str(HERE / "elastic_worker.py"), kind, self.name, *rest]
        with (self._folder / f"{self.name}.log").open("ab") as said:
            return subprocess.Popen(command, cwd=self._folder, stdout=said, stderr=said)

    def told(self) -> list[dict[str, Any]]:
        """Return the JSON lines that all processes of this worker have written."""
        return [
            json.loads(line)
            for path in sorted(self._folder.glob(f"{self.name}.*.jsonl"))
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def order(self, fault: Fault) -> None:
        """Order a fault for the worker's next exchange."""
        aside = self._folder / f"{self.name}.aside"
        aside.write_text(json.dumps({"after": fault.after, "do": _DO[fault.kind]}))
        aside.rename(self._folder / f"{self.name}.order")

    def has_read_its_order(self) -> bool:
        """Return whether the worker has read its last order."""
        return not (self._folder / f"{self.name}.order").exists()

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process."""
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self.process.poll() is not None

    def revive(self) -> None:
        """Restart the process if it has ended."""
        if self.has_ended():
            self.process = self._start()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def _awaited(condition: Callable[[], bool], deadline_s: float = _HANGS_S) -> bool:
    """Wait for a condition; return False if it is not true by the deadline."""
    until = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def faults(quick: bool) -> dict[str, Any]:
    """Train with faults; return the number of faults, hangs, exchanges and kept steps."""
    planned = drawn(5 if quick else sum(_KINDS.values()))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name, lighthouse() as address:
        folder = Path(name)
        os.environ["TORCHFT_LIGHTHOUSE"] = address
        sites = [Site(number, folder, "faults", str(_SYNC_EVERY)) for number in range(_WORKERS)]
        try:
            num_hangs = sum(not _struck(sites, fault) for fault in planned)
            num_hangs += not _awaited(lambda: _is_calm(sites))
            (folder / "end").touch()
            num_hangs += sum(not _awaited(site.has_ended, _ENDS_S) for site in sites)
            found = _figures(folder, sites)
        finally:
            for site in sites:
                site.close()
    struck = Counter(fault.kind for fault in planned)
    return {"seconds": time.monotonic() - started, "struck": struck, "hangs": num_hangs, **found}


def _is_calm(sites: list[Site]) -> bool:
    """Return whether all workers were in the last exchanges, and none loaded a peer's state."""
    rows = [[row for row in site.told() if "workers" in row][-_CALM:] for site in sites]
    return all(
        len(own) == _CALM and all(row["workers"] == _WORKERS and not row["taken"] for row in own)
        for own in rows
    )


def _struck(sites: list[Site], fault: Fault) -> bool:
    """Cause a fault once all workers exchange; return False if anything hangs."""
    site = sites[fault.worker]
    if not _awaited(lambda: _is_calm(sites)):
        return False
    count = len(site.told())
    site.order(fault)
    if fault.kind == "kill":
        happened = _awaited(site.has_ended)
        site.revive()
    elif fault.kind == "cut":
        happened = _awaited(site.has_read_its_order)
    else:
        happened = _awaited(site.is_stopped)
        time.sleep(fault.lasts_s)
        site.process.send_signal(signal.SIGCONT)
    return happened and _awaited(lambda: len(site.told()) > count + _CALM)


def _figures(folder: Path, sites: list[Site]) -> dict[str, Any]:
    told = [site.told() for site in sites]
    kept: dict[int, float] = {}
    digests: dict[int, set[str]] = defaultdict(set)
    for row in (row for own in told for row in own):
        if "kept" in row:
            kept[row["number"]] = max(row["kept"], kept.get(row["number"], 0.0))
        if "digest" in row:
            digests[row["number"]].add(row["digest"])
    ends = [row for own in told for row in own if "bits" in row]
    computed = sum(path.stat().st_size for path in folder.glob("*.steps"))
    return {
        "exchanges": len(kept),
        "differing": sum(len(own) > 1 for own in digests.values()),
        "repaired": sum(row.get("repaired", 0) for own in told for row in own),
        "ended": len(ends),
        "last_bits": len({row["bits"] for row in ends}),
        "computed": computed,
        "kept": sum(kept.values()),
        "efficiency": sum(kept.values()) / computed,
        "states_taken": sum(row.get("taken", False) for own in told for row in own),
        "processes": sum(site.num_started for site in sites),
        "loss": ends[0]["loss"] if ends else None,
    }


def beside_torchft(quick: bool) -> dict[str, Any]:
    """Train with DiLoCo and LocalUpdates in turns; return speed, bytes and test losses."""
    num_steps, every = (30, 10) if quick else (_NUM_STEPS, _EVERY)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for seed in range(1 if quick else _REPEATS):
        for name, (by, *codec) in _WAYS.items():
            rows[name].append(_trained(by, str(num_steps), str(every), str(seed), *codec))
    return {
        name: {
            "tokens_per_s": spread([one["tokens_per_s"] for one in own]),
            "nbytes_per_exchange": own[0]["nbytes_per_exchange"],
            "losses": [one["loss"] for one in own],
        }
        for name, own in rows.items()
    }


def _trained(*arguments: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, lighthouse(min_replicas=2) as address:
        folder = Path(name)
        os.environ["TORCHFT_LIGHTHOUSE"] = address
        sites = [Site(number, folder, *arguments) for number in range(2)]
        try:
            for site in sites:
                if site.process.wait(_ENDS_S * 10):
                    sys.exit((folder / f"{site.name}.log").read_text()[-3000:])
            rows = [site.told()[-1] for site in sites]
        finally:
            for site in sites:
                site.close()
    return {
        "tokens_per_s": sum(row["tokens_per_s"] for row in rows),
        "nbytes_per_exchange": rows[0]["nbytes_per_exchange"],
        "loss": rows[0]["loss"],
    }


def text_of_faults(figures: dict[str, Any]) -> str:
    """Return the table of the run with faults."""
    struck = ", ".join(f"{count} {kind}s" for kind, count in figures["struck"].items())
    rows = {
        "faults": f"{sum(figures['struck'].values())}: {struck}",
        "exchanges": f"{figures['exchanges']} of {_SYNC_EVERY} inner steps, "
        f"in {figures['seconds']:,.0f} s",
        "hangs": str(figures["hangs"]),
        "exchanges after which replicas differed": f"{figures['differing']}; "
        f"{figures['repaired']} repaired",
        "workers at the end": f"{figures['ended']}, with {figures['last_bits']} kind of bits",
        "inner steps computed": f"{figures['computed']:,}",
        "inner steps kept": f"{figures['kept']:,.0f} ({figures['efficiency']:.1%})",
        "states taken from a peer": str(figures["states_taken"]),
        "processes of workers": str(figures["processes"]),
        "test loss at the end": f"{figures['loss']:.3f}" if figures["loss"] else "none",
    }
    return table("", ("elastic, faults: three workers", ""), rows.items())


def text_beside(figures: dict[str, Any]) -> str:
    """Return the table that compares DiLoCo with LocalUpdates."""
    lines = [
        (
            name,
            shown(own["tokens_per_s"], digits=0),
            f"{own['nbytes_per_exchange']:,.0f}",
            " ".join(f"{one:.3f}" for one in own["losses"]),
        )
        for name, own in figures.items()
    ]
    head = ("two workers, torchft's quorum", "tokens/s", "bytes sent an exchange", "test loss")
    return table("", head, lines)
