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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from attempt import Attempt, Ended
from paceline.rpc.keys import generate_keys
from proxy import Proxy

_HERE = Path(__file__).parent
_MODULES = _HERE.parent / "resume"  # its recipes train in seconds
_DEADLINE_S = 4.0
_COMMAND = ("-m", "paceline")
_TRAINED = (
    *("--batch-size", "24", "--profile-s", "0.2", "--timeout", str(_DEADLINE_S)),
    *("--checkpoint-every", "1s"),
)


class Case(NamedTuple):
    """A recipe, its options and number of epochs, and the role of its first process."""

    recipe: str
    options: str
    epochs: int
    lead: str = "launcher"


_LAUNCHED = {
    "allreduce": Case("with_dropout", "--strategy allreduce --workers 2", 100),
    "host": Case("with_dropout", "--strategy host --workers 3", 100),
    "tree": Case("with_dropout", "--strategy tree --workers 2", 100),
    "subbatch": Case("classes", "--strategy subbatch --workers 2", 60),
    "hogbatch": Case(
        "classes",
        "--strategy hogbatch --workers cpu:1 --strategy-option policy=hogbatch",
        60,
        "coordinator",
    ),
    "wheel": Case("plain", "--strategy wheel --workers 2 --strategy-option lanes=1", 40, "hub"),
    "local": Case("plain", "--strategy local --workers 2 --strategy-option sync_every=5", 100),
}
_SERVED = {
    "wheel, hub apart": Case("plain", "--strategy wheel --strategy-option lanes=1", 60, "hub"),
}
_OWN_LOOP = "a user's loop"
_NAMES = (*_LAUNCHED, *_SERVED, _OWN_LOOP)
_OWN_STEPS, _OWN_RANKS, _SERVED_WORKERS = 4000, 2, 2
_OWN_ENDS_S = 240.0  # if torchrun is killed, its ranks train to their last step
_KINDS = {  # with their relative frequencies
    "KILL": 5,
    "TERM": 4,
    "INT": 4,
    "TERM to all": 1,
    "INT to all": 2,
    "STOP, CONT": 3,
}
_PROXY_KINDS = {"cut": 5, "hold": 4}
_STOPPED_S = (0.2, 3 * _DEADLINE_S)
_LATEST_S = 14.0  # latest moment of the first fault; runs are about this long
_ENDS_S = 240.0  # a run that takes seconds on an idle machine counts as hanging after this,
_SAVED_S = 60.0  # unless it wrote to its folder this recently: checkpoints are due every second
_AT_ONCE, _MOST_S = 2, 7200.0  # trials at a time, and the limit of all
_CODES = {"INT": 130, "TERM": 143}


class Trial:
    """The commands of one run: the first writes the result, the others are its workers.

    `proxies` connect the workers to their hub; `stack` closes them.
    """

    def __init__(self, stack: ExitStack, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.output = folder / "runs"
        self.proxies: list[Proxy] = []
        self.workers: list[Attempt] = []
        if name in _LAUNCHED:
            self.first = self._launched(_LAUNCHED[name])
        elif name in _SERVED:
            self.first = self._served(_SERVED[name])
            stack.callback(self._close_proxies)
        else:
            self.first = self._own_loop()

    @property
    def attempts(self) -> list[Attempt]:
        """The first command, then its workers."""
        return [self.first, *self.workers]

    def join(self) -> None:
        """Start the workers of a separate hub, each behind a proxy, once the hub listens."""
        if self.name not in _SERVED or (port := self.first.port()) is None:
            return
        for number in range(_SERVED_WORKERS):
            self.proxies.append(Proxy(port))
            arguments = (
                *(*_COMMAND, "worker", "--connect", f"tcp://127.0.0.1:{self.proxies[-1].port}"),
                *("--worker-ids", str(number), "--keys", "keys", "--device", "cpu"),
                *("--threads", "1", "--timeout", str(_DEADLINE_S)),
            )
            self.workers.append(Attempt(arguments, self.folder, f"worker {number}", _MODULES))

    def _launched(self, case: Case) -> Attempt:
        return Attempt((*_COMMAND, "train", *self._asked(case)), self.folder, case.lead, _MODULES)

    def _served(self, case: Case) -> Attempt:
        generate_keys(self.folder / "keys")
        arguments = (
            *(*_COMMAND, "hub", *self._asked(case), "--workers", str(_SERVED_WORKERS)),
            *("--listen", "tcp://127.0.0.1:0", "--keys", "keys", "--wait", "20"),
        )
        return Attempt(arguments, self.folder, case.lead, _MODULES)

    def _own_loop(self) -> Attempt:
        arguments = (
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_OWN_RANKS)),
            *(str(_HERE / "own_loop.py"), str(_OWN_STEPS), str(_DEADLINE_S)),
        )
        return Attempt(arguments, self.folder, "torchrun", _MODULES, _OWN_ENDS_S)

    def _asked(self, case: Case) -> tuple[str, ...]:
        recipe, options = f"small:{case.recipe}", case.options.split()
        epochs = ("--epochs", str(case.epochs), "--output", str(self.output))
        return (recipe, *options, *_TRAINED, *epochs)

    def _close_proxies(self) -> None:
        for proxy in self.proxies:
            proxy.close()


@dataclass
class Fault:
    """A fault: its kind, the role of its victim, its time and its duration."""

    kind: str
    role: str
    at_s: float
    for_s: float = 0.0


@dataclass
class Judged:
    """A trial: its faults, how it ended, and violations as sentences (`wrong`)."""

    case: str
    seed: int
    faults: list[Fault] = field(default_factory=list)
    code: int = 0
    outcome: str = ""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def measure(num_faults: int, seed: int) -> dict[str, Any]:
    """Run two trials at a time, up to `num_faults` faults or two hours; return all trials."""
    judged, numbers = list[Judged](), count(seed)
    until_s = time.monotonic() + _MOST_S

    def go_on() -> None:
        while sum(len(one.faults) for one in judged) < num_faults and time.monotonic() < until_s:
            number = next(numbers)
            judged.append(tried(_NAMES[number % len(_NAMES)], number))
            print(json.dumps(asdict(judged[-1])), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for done in [pool.submit(go_on) for _ in range(_AT_ONCE)]:
            done.result()
    return {"seed": seed, "trials": [asdict(one) for one in judged]}


def tried(name: str, seed: int) -> Judged:
    """Run a case, inject faults, and judge its end."""
    choice = random.Random(f"{name} {seed}")  # noqa: S311 - no secret
    judged = Judged(name, seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trial = Trial(stack, name, Path(folder))
        began_s = time.monotonic()
        joining = threading.Thread(target=trial.join)
        joining.start()
        pause_s = choice.uniform(0.0, _LATEST_S)
        for _ in range(choice.choice((1, 1, 2, 3))):
            _sleep(trial, pause_s)
            if not trial.first.is_running:
                break
            if (fault := _happen(trial, choice, began_s)) is not None:
                judged.faults.append(fault)
            pause_s = choice.uniform(0.0, 4.0)
        ends = _ends(trial, joining)
        judged.seconds = time.monotonic() - began_s
        _judge(judged, trial, ends)
    return judged


def _happen(trial: Trial, choice: random.Random, began_s: float) -> Fault | None:
    """Inject one fault; return None if its victim has already ended."""
    at_s = time.monotonic() - began_s
    kinds = _KINDS | (_PROXY_KINDS if trial.proxies else {})
    kind = choice.choices(list(kinds), list(kinds.values()))[0]
    for_s = choice.uniform(*_STOPPED_S)
    if kind in _PROXY_KINDS:
        proxy = choice.choice(trial.proxies)
        if kind == "cut":
            proxy.cut()
        else:
            proxy.hold()
            threading.Timer(for_s, proxy.go_on).start()
        return Fault(kind, "connection", at_s, for_s if kind == "hold" else 0.0)
    attempt = choice.choice(trial.attempts)
    found = attempt.draw(choice)
    if found is None:
        return None
    pid, role = found
    signals = {"STOP, CONT": signal.SIGSTOP, "KILL": signal.SIGKILL}
    number = signals.get(kind) or (signal.SIGINT if "INT" in kind else signal.SIGTERM)
    with suppress(ProcessLookupError):
        if kind.endswith("to all"):
            os.killpg(attempt.process.pid, number)
            return Fault(kind, attempt.lead, at_s)
        os.kill(pid, number)
        if kind == "STOP, CONT":
            threading.Timer(for_s, _continue, (pid,)).start()
        return Fault(kind, role, at_s, for_s if kind == "STOP, CONT" else 0.0)
    return None


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _sleep(trial: Trial, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while trial.first.is_running and time.monotonic() < until_s:
        time.sleep(0.01)


def _ends(trial: Trial, joining: threading.Thread) -> list[Ended | None]:
    """Wait for all commands to end; kill commands that hang, and return None for each."""
    joining.join()
    until_s = time.monotonic() + _ENDS_S
    while any(one.is_running for one in trial.attempts):
        if time.monotonic() > until_s and not _goes_on(trial):
            break
        time.sleep(0.05)
    hang = {id(one) for one in trial.attempts if one.is_running}
    for one in trial.attempts:
        if id(one) in hang:
            one.process.kill()
    ends = [one.end() for one in trial.attempts]
    return [None if id(one) in hang else end for one, end in zip(trial.attempts, ends, strict=True)]


def _goes_on(trial: Trial) -> bool:
    """Whether the run wrote to its folder in the last `_SAVED_S` seconds."""
    saved = [path.stat().st_mtime for path in trial.output.glob("*/*")]
    return time.time() - max(saved, default=0.0) < _SAVED_S


def _judge(judged: Judged, trial: Trial, ends: list[Ended | None]) -> None:
    """Record in `judged` how the trial ended, and the violations."""
    for attempt, end in zip(trial.attempts, ends, strict=True):
        if end is None:
            judged.wrong.append(f"the {attempt.lead} hangs")
            continue
        judged.wrong += [f"left of the {attempt.lead}: {one}" for one in end.left]
        judged.wrong += _misspoken(judged, attempt.lead, end)
    first = ends[0]
    judged.code = -1 if first is None else first.code
    judged.wrong += _halves(trial.output)
    is_whole = trial.name == _OWN_LOOP or any(trial.output.glob("*/result.json"))
    if judged.code == 0 and not is_whole:
        judged.wrong.append("exit code 0, and no result")
    recovered = judged.code == 0
    judged.outcome = "failed" if judged.wrong else "recovered" if recovered else "ended in order"


def _misspoken(judged: Judged, lead: str, end: Ended) -> list[str]:
    """Return the violations in a command's exit code and stderr."""
    if lead == "torchrun":  # a user's loop ends as any Python program does
        return []
    wrong = []
    if "Traceback" in end.said or "Fatal Python error" in end.said:
        wrong.append(f"a traceback of the {lead}: {end.said[-1500:]}")
    lines = [one for one in end.said.splitlines() if one.startswith("paceline: ")]
    # Other ranks may also print why they stop, if they notice the fault before they are ended.
    others = [one for one in lines if not re.match(r"paceline: worker \d+ stops: ", one)]
    if end.code > 0 and (not lines or len(others) > 1):
        wrong.append(f"{len(lines)} lines say why the {lead} ended with {end.code}: {lines[:3]}")
    told = [one for one in judged.faults if one.role == lead and one.kind[:4] != "STOP"]
    asked = {_CODES[kind] for one in told for kind in _CODES if kind in one.kind}
    killed = any(one.kind == "KILL" and one.role == lead for one in judged.faults)
    if end.code < 0 and not killed:
        wrong.append(f"the {lead} ended by signal {-end.code}")
    if asked and end.code not in {0, *asked} and not killed and len(judged.faults) == 1:
        wrong.append(f"the {lead} ended with {end.code} and not with {sorted(asked)}")
    return wrong


def _halves(output: Path) -> list[str]:
    """Return a violation for each incomplete JSON file in the runs' folders."""
    wrong = []
    for path in output.glob("*/*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            wrong.append(f"{path.name} is not whole")
    return wrong


def counts(trials: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Count the faults and the outcomes of trials by case."""
    found: dict[str, Counter[str]] = {}
    for one in trials:
        own = found.setdefault(one["case"], Counter())
        own["faults"] += len(one["faults"])
        own[one["outcome"]] += 1
    return found
