"""Disturb runs at random moments: send signals to processes, cut or hold back connections.

Each trial is a run of one case with one to three faults. The run must recover (exit code 0 and a
result) or end in order (another exit code, and one line with the reason), and leave nothing behind.
"""

import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from attempt import Attempt, Ended
from paceline.rpc.keys import generate_keys
from rpc_exchange import Proxy

_HERE = Path(__file__).parent
_MODULES = _HERE.parents[1] / "tests"  # small_recipes train in seconds
_SEED = 1
_DEADLINE_S, _STEPS = 4.0, 4000
_TRAINED = "--batch-size 24 --profile-s 0.2 --timeout 4 --checkpoint-every 1s --output runs"
_OWN_LOOP = "a user's loop"
_OWN_ENDS_S = 240.0  # if torchrun is killed, its ranks train to their last step


class Case(NamedTuple):
    """A command of paceline, the role of its first process, and its number of separate workers."""

    words: str
    lead: str = "launcher"
    num_workers: int = 0


_CASES = {
    "allreduce": Case(
        "train small_recipes:with_dropout --strategy allreduce --workers 2 --epochs 100"
    ),
    "host": Case("train small_recipes:with_dropout --strategy host --workers 3 --epochs 100"),
    "tree": Case("train small_recipes:with_dropout --strategy tree --workers 2 --epochs 100"),
    "subbatch": Case("train small_recipes:classes --strategy subbatch --workers 2 --epochs 60"),
    "hogbatch": Case(
        "train small_recipes:classes --strategy hogbatch --workers cpu:1 --epochs 60 "
        "--strategy-option policy=hogbatch",
        "coordinator",
    ),
    "wheel": Case(
        "train small_recipes:plain --strategy wheel --workers 2 --epochs 40 "
        "--strategy-option lanes=1",
        "hub",
    ),
    "local": Case(
        "train small_recipes:plain --strategy local --workers 2 --epochs 100 "
        "--strategy-option sync_every=5"
    ),
    "wheel, hub apart": Case(
        "hub small_recipes:plain --workers 2 --strategy-option lanes=1 --epochs 60 "
        "--listen tcp://127.0.0.1:0 --keys keys --wait 20",
        "hub",
        num_workers=2,
    ),
    _OWN_LOOP: Case("", "torchrun"),
}
_KINDS = {  # with their relative frequencies
    "KILL": 5,
    "TERM": 4,
    "INT": 4,
    "TERM to all": 1,
    "INT to all": 2,
    "STOP, CONT": 3,
}
_PROXY_KINDS = {"cut": 5, "hold": 4}
_SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}
_CODES = {"INT": 130, "TERM": 143}
_STOPPED_S = (0.2, 3 * _DEADLINE_S)
_LATEST_S = 14.0  # latest moment of the first fault; runs are about this long
_ENDS_S = 240.0  # a run that takes seconds on an idle machine counts as hanging after this,
_SAVED_S = 60.0  # unless it wrote to its folder this recently: checkpoints are due every second
_AT_ONCE, _MOST_S = 2, 7200.0  # trials at a time, and the limit of all
Fault = dict[str, Any]


class Trial:
    """The commands of one run: the first writes the result, the others are its workers.

    `proxies` connect separate workers to their hub; `stack` closes them.
    """

    def __init__(self, stack: ExitStack, name: str, folder: Path) -> None:
        self.case, self.folder, self._stack = _CASES[name], folder, stack
        self.proxies: list[Proxy] = []
        self.workers: list[Attempt] = []
        if name == _OWN_LOOP:
            program = f"{_HERE / 'own_loop.py'} {_STEPS} {_DEADLINE_S}"
            words = f"-m torch.distributed.run --standalone --nproc-per-node 2 {program}"
        else:
            words = f"-m paceline {self.case.words} {_TRAINED}"
        if self.case.num_workers:
            generate_keys(folder / "keys")
        gone_s = {"gone_s": _OWN_ENDS_S} if name == _OWN_LOOP else {}
        self.first = Attempt(words.split(), folder, self.case.lead, _MODULES, **gone_s)

    @property
    def attempts(self) -> list[Attempt]:
        """The first command, then its workers."""
        return [self.first, *self.workers]

    def join(self) -> None:
        """Start the workers of a separate hub, each behind a proxy, once the hub listens."""
        port = self.first.port() if self.case.num_workers else None
        for number in range(self.case.num_workers if port else 0):
            self.proxies.append(proxy := Proxy(port))
            self._stack.callback(proxy.close)
            words = (
                f"-m paceline worker --connect tcp://127.0.0.1:{proxy.port} --keys keys "
                f"--worker-ids {number} --device cpu --threads 1 --timeout {_DEADLINE_S}"
            )
            self.workers.append(Attempt(words.split(), self.folder, f"worker {number}", _MODULES))

    def goes_on(self) -> bool:
        """Return whether the run wrote to its folder in the last `_SAVED_S` seconds."""
        saved = [path.stat().st_mtime for path in self.folder.glob("runs/*/*")]
        return time.time() - max(saved, default=0.0) < _SAVED_S


def measure(num_faults: int) -> dict[str, Any]:
    """Run two trials at a time, up to `num_faults` faults or two hours; return all trials."""
    judged, numbers, names = list[dict[str, Any]](), count(_SEED), list(_CASES)
    until_s = time.monotonic() + _MOST_S

    def go_on() -> None:
        while sum(len(one["faults"]) for one in judged) < num_faults:
            if time.monotonic() > until_s:
                break
            number = next(numbers)
            judged.append(_tried(names[number % len(names)], number))
            print(json.dumps(judged[-1]), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for done in [pool.submit(go_on) for _ in range(_AT_ONCE)]:
            done.result()
    return {"seed": _SEED, "trials": judged}


def _tried(name: str, seed: int) -> dict[str, Any]:
    """Run a case, inject faults, and judge its end."""
    choice = random.Random(f"{name} {seed}")  # noqa: S311 - no secret
    faults: list[Fault] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trial, began_s = Trial(stack, name, Path(folder)), time.monotonic()
        joining = threading.Thread(target=trial.join)
        joining.start()
        pause_s = choice.uniform(0.0, _LATEST_S)
        for _ in range(choice.choice((1, 1, 2, 3))):
            if not trial.first.sleep(pause_s):
                break
            at_s = time.monotonic() - began_s
            if (fault := _happen(trial, choice)) is not None:
                faults.append(fault | {"at_s": at_s})
            pause_s = choice.uniform(0.0, 4.0)
        ends = _ends(trial, joining)
        seconds = time.monotonic() - began_s
        wrong = list(_violations(trial, faults, ends))
        code = -1 if ends[0] is None else ends[0].code
        if code == 0 and name != _OWN_LOOP and not any(Path(folder).glob("runs/*/result.json")):
            wrong.append("exit code 0, and no result")
    outcome = "failed" if wrong else "ended in order" if code else "recovered"
    about = {"case": name, "seed": seed, "faults": faults, "code": code, "outcome": outcome}
    return {**about, "seconds": seconds, "wrong": wrong}


def _happen(trial: Trial, choice: random.Random) -> Fault | None:
    """Inject one fault; return None if its victim has already ended."""
    kinds = _KINDS | (_PROXY_KINDS if trial.proxies else {})
    kind = choice.choices(list(kinds), list(kinds.values()))[0]
    for_s = choice.uniform(*_STOPPED_S)
    if kind in _PROXY_KINDS:
        proxy = choice.choice(trial.proxies)
        if kind == "cut":
            proxy.cut()
            return {"kind": kind, "role": "connection", "for_s": 0.0}
        proxy.stop()
        threading.Timer(for_s, proxy.go_on).start()
        return {"kind": kind, "role": "connection", "for_s": for_s}
    attempt = choice.choice(trial.attempts)
    if (found := attempt.draw(choice)) is None:
        return None
    pid, role = found
    with suppress(ProcessLookupError):
        if kind.endswith("to all"):
            os.killpg(attempt.process.pid, _SIGNALS[kind.split()[0]])
            return {"kind": kind, "role": attempt.lead, "for_s": 0.0}
        if kind == "STOP, CONT":
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(for_s, _continue, (pid,)).start()
            return {"kind": kind, "role": role, "for_s": for_s}
        os.kill(pid, _SIGNALS[kind])
        return {"kind": kind, "role": role, "for_s": 0.0}
    return None


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _ends(trial: Trial, joining: threading.Thread) -> list[Ended | None]:
    """Wait for all commands to end; kill commands that hang, and return None for each."""
    joining.join()
    until_s = time.monotonic() + _ENDS_S
    while any(one.is_running for one in trial.attempts):
        if time.monotonic() > until_s and not trial.goes_on():
            break
        time.sleep(0.05)
    hang = [one.is_running for one in trial.attempts]
    for one, hangs in zip(trial.attempts, hang, strict=True):
        if hangs:
            one.process.kill()
    ends = [one.end() for one in trial.attempts]
    return [None if hangs else end for hangs, end in zip(hang, ends, strict=True)]


def _violations(trial: Trial, faults: list[Fault], ends: list[Ended | None]) -> Iterator[str]:
    """Yield a sentence for each hang, leftover, unclear end, and incomplete file."""
    for attempt, end in zip(trial.attempts, ends, strict=True):
        if end is None:
            yield f"the {attempt.lead} hangs"
            continue
        yield from (f"left of the {attempt.lead}: {one}" for one in end.left)
        if attempt.lead != "torchrun":  # a user's loop ends as any Python program does
            yield from _misspoken(attempt.lead, faults, end)
    for path in trial.folder.glob("runs/*/*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            yield f"{path.name} is not whole"


def _misspoken(lead: str, faults: list[Fault], end: Ended) -> Iterator[str]:
    """Yield the violations in a command's stderr and exit code."""
    if "Traceback" in end.said or "Fatal Python error" in end.said:
        yield f"a traceback of the {lead}: {end.said[-1500:]}"
    lines = [one for one in end.said.splitlines() if one.startswith("paceline: ")]
    # Other ranks may also print why they stop, if they notice the fault before they are ended.
    others = [one for one in lines if not re.match(r"paceline: worker \d+ stops: ", one)]
    if end.code > 0 and (not lines or len(others) > 1):
        yield f"{len(lines)} lines give the reason why the {lead} ended: {lines[:3]}"
    kinds = [one["kind"].split()[0] for one in faults if one["role"] == lead]
    if end.code < 0 and "KILL" not in kinds:
        yield f"the {lead} ended by signal {-end.code}"
    if len(faults) == len(kinds) == 1 and end.code not in (0, _CODES.get(kinds[0], end.code)):
        yield f"the {lead} ended with {end.code} after {kinds[0]}"
