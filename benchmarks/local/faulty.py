"""Three workers of strategy local with a hundred faults, one every three rounds.

    python benchmarks/local/faulty.py [faults] ["faults, streaming"] [--quick]

A hub and three workers, each behind a proxy, are processes of this machine. Workers are killed,
stopped or cut off; which of them when, and how, is drawn with a seed. One that is killed is started
again at once, as a supervisor would. Efficiency is inner steps kept over inner steps computed: each
of the run's is kept once, and the recipe counts what processes compute. With --quick six faults
show that everything works; the figures mean nothing, and are not written.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = "1"

from counted import NUM_SAMPLES, num_computed  # noqa: E402

import parts  # noqa: E402
from proxy import Proxy  # noqa: E402

_SEED, _WORKERS, _EVERY = 13, 3, 100
_ROUNDS_BETWEEN, _ROUNDS_AFTER = 3, 5
_BATCH_SIZE = NUM_SAMPLES // _EVERY  # a round is an epoch
_WORKER_DEADLINE_S = 5.0
_KINDS = {"kill": 40, "short stop": 15, "long stop": 15, "cut": 20, "partition": 10}
_STOPPED_S = {"short stop": (0.2, 1.5), "long stop": (8.0, 10.0), "partition": (8.0, 10.0)}
_OPTIONS = {"faults": (), "faults, streaming": ("fragments=2", "delay=10", "mixing=0.5")}
_POLL_S = 0.05
_HANGS_S = 300.0  # without a round
_ENDS_S = 120.0  # for the last lines


@dataclass
class Log:
    """What the hub has said: the test loss after each round, and all lines."""

    lines: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    said_s: float = field(default_factory=time.monotonic)

    def follow(self, stream: IO[str]) -> None:
        """Read to the end of a stream."""
        for line in stream:
            self.lines.append(line)
            if found := re.match(r"epoch .*test loss ([\d.]+)", line):
                self.losses.append(float(found[1]))
                self.said_s = time.monotonic()


class Worker:
    """A worker's process behind its proxy, started again whenever it has been killed."""

    def __init__(self, number: int, port: int, folder: Path) -> None:
        self._number, self._folder = number, folder
        self.proxy = Proxy(port)
        self.num_started = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.num_started += 1
        own = ["--as", str(self._number), "--threads", "1", "--device", "cpu"]
        known = ["--connect", f"tcp://127.0.0.1:{self.proxy.port}"]
        command = [sys.executable, "-m", "paceline", "worker", *known, *own, "--deadline-s", "600"]
        with (self._folder / f"worker-{self._number}.txt").open("ab") as said:
            return subprocess.Popen(command, cwd=self._folder, stdout=said, stderr=said)

    def poll(self) -> None:
        """Start it again if it was killed."""
        if self.process.poll() == -signal.SIGKILL:
            self.process = self._start()

    def close(self) -> None:
        """End it, and its proxy."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.proxy.close()

    def strike(self, kind: str) -> Callable[[], None]:
        """Let a fault happen; return what ends it."""
        process = self.process
        if kind == "kill":
            process.kill()
            process.wait()
        elif kind == "cut":
            self.proxy.cut()
        elif kind == "partition":
            self.proxy.hold()
            return self.proxy.go_on
        else:
            process.send_signal(signal.SIGSTOP)
            return lambda: process.send_signal(signal.SIGCONT)
        return lambda: None


@dataclass(frozen=True)
class Fault:
    """A fault in a window of three rounds: a share of it, after which it strikes."""

    kind: str
    worker: int
    share: float
    lasts_s: float


def drawn(num_faults: int) -> list[Fault]:
    """Return faults in a random order, at random moments, on random workers."""
    chance = random.Random(_SEED)  # noqa: S311
    kinds = [kind for kind, count in _KINDS.items() for _ in range(count)]
    chance.shuffle(kinds)
    if num_faults < len(kinds):
        kinds = list(_KINDS) + kinds[: num_faults - len(_KINDS)]
    return [
        Fault(
            kind,
            chance.randrange(_WORKERS),
            chance.random(),
            chance.uniform(*_STOPPED_S.get(kind, (0.0, 0.0))),
        )
        for kind in kinds
    ]


def measure(options: Sequence[str], quick: bool) -> dict[str, Any]:
    """Return what became of a run with faults."""
    faults = drawn(6 if quick else sum(_KINDS.values()))
    num_steps = _EVERY * (_ROUNDS_BETWEEN * len(faults) + _ROUNDS_AFTER)
    with tempfile.TemporaryDirectory() as folder:
        return _run(Path(folder), faults, num_steps, options)


def _run(
    folder: Path, faults: list[Fault], num_steps: int, options: Sequence[str]
) -> dict[str, Any]:
    os.environ["PYTHONPATH"] = str(HERE)
    asked = ["--strategy", "local", "--workers", str(_WORKERS), "--profile-s", "0", "--json"]
    asked += [f"--batch-size={_BATCH_SIZE}", f"--steps={num_steps}", "--checkpoint-every=never"]
    own = [f"sync_every={_EVERY}", "codec=dynamic8", *options]
    asked += [word for option in own for word in ("--set", option)]
    asked += ["--deadline-s", str(_WORKER_DEADLINE_S), "--bind", "tcp://127.0.0.1:0"]
    command = [sys.executable, "-m", "paceline", "hub", "counted:recipe", *asked]
    pipe = subprocess.PIPE
    hub = subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)
    assert hub.stderr is not None
    assert hub.stdout is not None
    port = _port(hub.stderr)
    log, begun_s = Log(), time.monotonic()
    reading = threading.Thread(target=log.follow, args=(hub.stderr,), daemon=True)
    reading.start()
    workers = [Worker(number, port, folder) for number in range(_WORKERS)]
    try:
        num_struck = _strike(hub, log, workers, faults)
        result = json.loads(hub.stdout.read())
        reading.join(_ENDS_S)
        figures = _figures(folder, log, workers, result, num_steps)
        struck = Counter(fault.kind for fault in faults[:num_struck])
        seconds = time.monotonic() - begun_s
        return {"seconds": seconds, "struck": struck, **figures}
    except Exception:
        sys.stderr.write("".join(log.lines[-50:]))
        raise
    finally:
        for worker in workers:
            worker.close()
        hub.kill()
        hub.wait()


def _port(stream: IO[str]) -> int:
    for line in stream:
        if found := re.search(r"listening on tcp://127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise RuntimeError("the hub has ended")


def _strike(
    hub: subprocess.Popen[str], log: Log, workers: list[Worker], faults: list[Fault]
) -> int:
    """Let faults happen, each in its window of rounds, until the hub ends; return how many."""
    ends: list[tuple[float, Callable[[], None]]] = []
    num_struck, strikes_s = 0, 0.0
    opened_s, window_s = time.monotonic(), 0.0
    while hub.poll() is None:
        time.sleep(_POLL_S)
        now_s = time.monotonic()
        if now_s - log.said_s > _HANGS_S:
            raise RuntimeError(f"no round for {_HANGS_S:g} s after {num_struck} faults")
        for one in [one for one in ends if one[0] <= now_s]:
            one[1]()
            ends.remove(one)
        for worker in workers:
            worker.poll()
        num_rounds = len(log.losses)
        if num_struck == len(faults) or num_rounds < max(1, num_struck * _ROUNDS_BETWEEN):
            continue
        fault = faults[num_struck]
        if not strikes_s:  # this window has just begun: it takes about as long as the last one
            window_s = min(now_s - opened_s, 60.0) if num_struck else 5.0
            opened_s, strikes_s = now_s, now_s + 0.9 * fault.share * window_s
        if now_s >= strikes_s:
            ends.append((now_s + fault.lasts_s, workers[fault.worker].strike(fault.kind)))
            num_struck, strikes_s = num_struck + 1, 0.0
    return num_struck


def _figures(
    folder: Path, log: Log, workers: list[Worker], result: dict[str, Any], num_steps: int
) -> dict[str, Any]:
    """Return what was computed and what was kept, and what the hub says of its workers."""
    computed, kept = num_computed(folder), num_steps * _WORKERS
    reasons = Counter(re.sub(r"worker \d+ | for \d+ s", "", one) for one in result["lost"])
    later = log.losses[len(log.losses) // 10 :]
    return {
        "steps": num_steps,
        "rounds": len(log.losses),
        "computed": computed,
        "kept": kept,
        "efficiency": kept / computed,
        "processes": sum(worker.num_started for worker in workers),
        "lost": reasons,
        "corrupt": sum("other bits" in line for line in log.lines),
        "epochs": len(result["epochs"]),
        "first_loss": log.losses[0],
        "largest_later_loss": max(later),
        "last_loss": result["epochs"][-1]["test_loss"],
    }


def text(part: str, figures: dict[str, Any]) -> str:
    """Return the table of a run."""
    struck = ", ".join(f"{count} {kind}s" for kind, count in figures["struck"].items())
    rows = {
        "faults": f"{sum(figures['struck'].values())}: {struck}",
        "rounds": f"{figures['rounds']} of {_EVERY} inner steps, in {figures['seconds']:,.0f} s",
        "inner steps computed": f"{figures['computed']:,}",
        "inner steps kept": f"{figures['kept']:,}",
        "efficiency": f"{figures['efficiency']:.1%}",
        "left out": "; ".join(f"{count}x {why}" for why, count in figures["lost"].items()),
        "processes of workers": str(figures["processes"]),
        "replicas with other bits": str(figures["corrupt"]),
        "test loss": f"{figures['first_loss']:.3f} after the first round, at most "
        f"{figures['largest_later_loss']:.3f} after a tenth, {figures['last_loss']:.3f} at the end",
    }
    lines = [f"| {part}: three workers | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])


if __name__ == "__main__":
    every_part = {name: partial(measure, options) for name, options in _OPTIONS.items()}
    parts.run(HERE, every_part, text)
