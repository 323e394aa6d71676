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

_WORKER = str(Path(__file__).with_name("elastic_worker.py"))
_SEED, _WORKERS, _SYNC_EVERY = 17, 3, 20
_KINDS = {"kill": 40, "short stop": 15, "long stop": 20, "cut": 25}
_DO = {"kill": "SIGKILL", "short stop": "SIGSTOP", "long stop": "SIGSTOP", "cut": "raise"}
_STOPPED_S = {"short stop": (0.2, 1.5), "long stop": (8.0, 10.0)}  # an exchange's deadline is 5 s
_PLACES = ("start", "headers", "mean")
_CALM = 3  # exchanges with all workers before a fault
_HANGS_S = 120.0
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


class Site:
    """A worker, whose process is restarted after it was killed."""

    def __init__(self, number: int, folder: Path, *arguments: str) -> None:
        self.name, self._folder, self._arguments = str(number), folder, arguments
        self.num_started = 0
        self.start()

    def start(self) -> None:
        """Start the worker's process."""
        self.num_started += 1
        kind, *rest = self._arguments
        command = [sys.executable, _WORKER, kind, self.name, *rest]
        with (self._folder / f"{self.name}.log").open("ab") as said:
            self.process = subprocess.Popen(command, cwd=self._folder, stdout=said, stderr=said)

    def told(self) -> list[dict[str, Any]]:
        """Return the JSON lines that all processes of this worker have written."""
        return [
            json.loads(line)
            for path in sorted(self._folder.glob(f"{self.name}.*.jsonl"))
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def suffer(self, fault: Fault) -> bool:
        """Cause a fault in the next exchange, and wait for its end; return False on a hang."""
        order = self._folder / f"{self.name}.order"
        aside = order.with_suffix(".aside")
        aside.write_text(json.dumps({"after": fault.after, "do": _DO[fault.kind]}))
        aside.rename(order)
        if fault.kind == "cut":
            return _awaited(lambda: not order.exists())
        if fault.kind == "kill":
            happened = _awaited(self.has_ended)
            self.start()
            return happened
        status = psutil.Process(self.process.pid).status
        happened = _awaited(lambda: status() == psutil.STATUS_STOPPED)
        time.sleep(fault.lasts_s)
        self.process.send_signal(signal.SIGCONT)
        return happened

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self.process.poll() is not None


def _drawn(quick: bool) -> list[Fault]:
    """Return faults in a random order, on random workers, at random places."""
    chance = random.Random(_SEED)  # noqa: S311
    kinds = list(_KINDS) if quick else list(Counter(_KINDS).elements())
    found = []
    for kind in chance.sample(kinds, len(kinds)):
        lasts_s = chance.uniform(*_STOPPED_S.get(kind, (0.0, 0.0)))
        found.append(Fault(kind, chance.randrange(_WORKERS), chance.choice(_PLACES), lasts_s))
    return found


@contextmanager
def _sites(count: int, *arguments: str) -> Iterator[tuple[Path, list[Site]]]:
    """Start a lighthouse and workers in a temporary folder; kill the workers at the end."""
    os.environ.setdefault("RUST_LOG", "error")  # read by the import
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1 if count == _WORKERS else count,
        join_timeout_ms=60_000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=2000,
    )
    port = server.address().rpartition(":")[2]
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name:
        sites = [Site(number, Path(name), *arguments) for number in range(count)]
        try:
            yield Path(name), sites
        finally:
            for site in sites:
                site.process.kill()
                site.process.wait()
            server.shutdown()


def _awaited(condition: Callable[[], bool]) -> bool:
    """Wait for a condition; return False if it is not true by the deadline."""
    until_s = time.monotonic() + _HANGS_S
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def faults(quick: bool) -> dict[str, Any]:
    """Train with faults; return what happened, and what the workers kept."""
    planned, started = _drawn(quick), time.monotonic()
    with _sites(_WORKERS, "faults", str(_SYNC_EVERY)) as (folder, sites):
        num_hangs = sum(not _survived(sites, fault) for fault in planned)
        num_hangs += not _awaited(lambda: _is_calm(sites))
        (folder / "end").touch()
        num_hangs += sum(not _awaited(site.has_ended) for site in sites)
        computed = sum(path.stat().st_size for path in folder.glob("*.steps"))
        found = _figures([site.told() for site in sites], computed)
    return {
        "seconds": time.monotonic() - started,
        "struck": Counter(fault.kind for fault in planned),
        "hangs": num_hangs,
        **found,
        "processes": sum(site.num_started for site in sites),
    }


def _is_calm(sites: list[Site]) -> bool:
    """Return whether all workers were in the last exchanges, and none loaded a peer's state."""
    rows = [[row for row in site.told() if "workers" in row][-_CALM:] for site in sites]
    return all(
        len(own) == _CALM and all(row["workers"] == _WORKERS and not row["taken"] for row in own)
        for own in rows
    )


def _survived(sites: list[Site], fault: Fault) -> bool:
    """Cause a fault once all workers exchange; return False if anything hangs."""
    site = sites[fault.worker]
    if not _awaited(lambda: _is_calm(sites)):
        return False
    count = len(site.told())
    return site.suffer(fault) and _awaited(lambda: len(site.told()) > count + _CALM)


def _figures(told: list[list[dict[str, Any]]], computed: int) -> dict[str, Any]:
    """Return what the workers' lines and their number of computed steps show."""
    rows = [row for own in told for row in own]
    kept = {
        (row["number"], worker): row["kept"]
        for worker, own in enumerate(told)
        for row in own
        if "kept" in row
    }
    digests: dict[int, set[str]] = defaultdict(set)
    for row in rows:
        if "digest" in row:
            digests[row["number"]].add(row["digest"])
    ends = [row for row in rows if "bits" in row]
    return {
        "exchanges": len({number for number, _ in kept}),
        "differing": sum(len(own) > 1 for own in digests.values()),
        "repaired": sum(row.get("repaired", 0) for row in rows),
        "ended": len(ends),
        "last_bits": len({row["bits"] for row in ends}),
        "computed": computed,
        "kept": sum(kept.values()),
        "efficiency": sum(kept.values()) / computed,
        "states_taken": sum(row.get("taken", False) for row in rows),
        "loss": ends[0]["loss"] if ends else None,
    }


def beside_torchft(quick: bool) -> dict[str, Any]:
    """Train with DiLoCo and LocalUpdates in turns; return speed, bytes and test losses."""
    num_steps, every = (30, 10) if quick else (_NUM_STEPS, _EVERY)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for seed in range(1 if quick else _REPEATS):
        for name, (by, *codec) in _WAYS.items():
            with _sites(2, by, str(num_steps), str(every), str(seed), *codec) as (folder, sites):
                for site in sites:
                    if site.process.wait(10 * _HANGS_S):
                        sys.exit((folder / f"{site.name}.log").read_text()[-3000:])
                rows[name].append(_of_both([site.told()[-1] for site in sites]))
    return {
        name: {
            "tokens_per_s": spread([one["tokens_per_s"] for one in own]),
            "nbytes_per_exchange": own[0]["nbytes_per_exchange"],
            "losses": [one["loss"] for one in own],
        }
        for name, own in rows.items()
    }


def _of_both(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return rows[0] | {"tokens_per_s": sum(row["tokens_per_s"] for row in rows)}


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
