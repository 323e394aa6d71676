"""Kill random processes of runs, resume the runs, and compare the final bits.

Each strategy first trains an undisturbed run. In further runs, random processes get SIGKILL at
random moments, and `--resume` continues each run until it ends. All strategies have 50 kills in
all. Kills after the last step, while results are written, do not count towards the 50.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from attempt import Attempt, Ended
from figures import Part, table

HERE = Path(__file__).parent
STARTING = "while it starts"
BEFORE = "before the first checkpoint"
WRITING = "while one is written"
BETWEEN = "between two"
AFTER = "after the last step"
_MOMENTS = (STARTING, BEFORE, WRITING, BETWEEN, AFTER)
_TRAINED = ("--batch-size", "24", "--epochs", "16", "--profile-s", "0.2", "--seed", "5")
_AT_A_WRITING, _AT_THE_START = 0.35, 0.1  # shares of kills
_AGAIN = 0.6  # share of resumed runs that are killed again


class Case(NamedTuple):
    """A recipe, its options, kills and checkpoint interval, and the role of its first process."""

    recipe: str
    options: str
    num_kills: int
    every: str = "10"
    lead: str = "launcher"


CASES = {
    "host": Case("with_dropout", "--strategy host --workers 2", 8),
    "tree": Case("with_dropout", "--strategy tree --workers 2", 7),
    "allreduce": Case("with_dropout", "--strategy allreduce --workers 3", 7),
    "allreduce-onebit": Case(
        "with_dropout", "--strategy allreduce --workers 2 --strategy-option codec=onebit", 7
    ),
    "subbatch-onebit": Case(
        "classes", "--strategy subbatch --workers 2 --strategy-option gradients=onebit", 7
    ),
    "hogbatch": Case(
        "classes",
        "--strategy hogbatch --workers cpu:1 --strategy-option policy=hogbatch",
        7,
        lead="coordinator",
    ),
    "wheel": Case(  # workers have no common steps, so the interval is a time
        "plain",
        "--strategy wheel --workers 1 --strategy-option lanes=1 "
        "--strategy-option staleness=0 --strategy-option head=head",
        7,
        every="0.2s",
        lead="hub",
    ),
}


Learnt = tuple[bytes, list[dict[str, Any]]]  # a model's bytes, and its epochs without seconds


@dataclass
class Runs:
    """The runs of a case in one folder; `trained_s`: seconds of the undisturbed run."""

    case: Case
    folder: Path
    choice: random.Random
    expected: Learnt | None = None
    trained_s: float = 0.0
    num_steps: int = 0
    kills: list[dict[str, Any]] = field(default_factory=list)
    num_begun: int = 0

    def begin(self) -> tuple[Attempt, Path]:
        """Start a run; return it and its output folder, where it will create the run folder."""
        self.num_begun += 1
        output = self.folder / f"run-{self.num_begun}"
        case = self.case
        asked = ("-m", "paceline", "train", f"small:{case.recipe}", *case.options.split())
        where = ("--output", str(output), "--checkpoint-every", case.every)
        return Attempt((*asked, *_TRAINED, *where), self.folder, case.lead, HERE), output

    def resume(self, run: Path) -> Attempt:
        """Continue a run with `--resume`."""
        asked = ("-m", "paceline", "train", "--resume", str(run), "--profile-s", "0.2")
        return Attempt(asked, self.folder, self.case.lead, HERE)

    def undisturbed(self) -> None:
        """Train without kills; record the expected result and the seconds."""
        attempt, output = self.begin()
        attempt.wait_until(lambda: _run_in(output) is not None)
        began_s = time.monotonic()
        ended = attempt.end()
        self.trained_s = time.monotonic() - began_s
        run = _run_in(output)
        if ended.code or ended.left or run is None:
            sys.exit(f"the undisturbed run ended with {ended}")
        self.expected, self.num_steps = self.learnt(run), max(_steps(run))

    def killed_and_resumed(self, num_kills: int) -> dict[str, Any]:
        """Kill and resume a run until it ends, at most `num_kills` times; return the outcome."""
        attempt, output = self.begin()
        num_attempts = 1
        while num_kills:
            ended = self._kill(attempt, output)
            num_kills -= ended is not None and self.kills[-1]["when"] != AFTER
            if ended is None:  # the attempt ended before the kill
                break
            run = _run_in(output)
            if run is not None and ended.code == 0:  # the run no longer needed the killed process
                break
            num_attempts += 1
            if run is None or not _steps(run):
                if run is not None:  # `--resume` must refuse a run without a checkpoint
                    refusal = self.resume(run).end()
                    self.kills[-1]["refusal"] = [refusal.code, refusal.said]
                attempt, output = self.begin()
            else:
                attempt = self.resume(run)
            if self.choice.random() > _AGAIN:
                break
        ended = attempt.end()
        run = _run_in(output)
        if ended.code or run is None:
            return {"is_equal": False, "attempts": num_attempts, "said": ended.said}
        partial = [one.name for one in (run / "checkpoints").glob(".*")]
        found = self.learnt(run)
        known = {"is_equal": found == self.expected, "attempts": num_attempts}
        return known | {"left": ended.left + partial, "epochs": len(found[1])}

    def _kill(self, attempt: Attempt, output: Path) -> Ended | None:
        """Kill a process at a random moment; return None if the attempt ended first."""
        draw = self.choice.random()
        run = _run_in(output)
        begun_at = 0 if run is None else max(_steps(run))
        if draw < _AT_THE_START:
            attempt.sleep(self.choice.uniform(0.0, 6.0))
        else:
            attempt.wait_until(lambda: _has_begun(attempt, output))
            left_s = self.trained_s * (1 - begun_at / self.num_steps)
            attempt.sleep(left_s * self.choice.random())
            if draw > 1 - _AT_A_WRITING:
                attempt.wait_until(lambda: _is_writing(attempt, output))
        when = _when(attempt, output)
        role = attempt.kill_one(self.choice) if attempt.is_running else None
        ended = attempt.end()
        if role is None:
            return None
        kill = {"role": role, "when": when, "begun_at": begun_at, "code": ended.code}
        kill |= {"ended_s": ended.ended_s, "left": ended.left}
        kill["half_written"] = _is_writing(attempt, output)
        kill["traceback"] = ended.said if "Traceback" in ended.said else ""
        self.kills.append(kill)
        print(json.dumps(kill), file=sys.stderr, flush=True)
        return ended

    def learnt(self, run: Path) -> Learnt:
        """Read a run's model and epochs."""
        epochs = json.loads((run / "result.json").read_text())["epochs"]
        without = {"seconds"}
        if self.case.lead == "hub":  # a training loss covers only the epoch since the last start
            without = {*epochs[0]} - {"number", "test_loss"}
        kept = [{key: one for key, one in epoch.items() if key not in without} for epoch in epochs]
        return (run / "model.safetensors").read_bytes(), kept


def measure(name: str, quick: bool) -> dict[str, Any]:
    """Kill and resume the runs of a case; return their outcomes and each kill."""
    case = CASES[name]
    num_kills = 1 if quick else case.num_kills
    with tempfile.TemporaryDirectory() as folder:
        choice = random.Random(f"{name} {num_kills}")  # noqa: S311 - nothing is kept secret
        runs = Runs(case, Path(folder), choice)
        runs.undisturbed()
        ends = []
        while (left := num_kills - sum(one["when"] != AFTER for one in runs.kills)) > 0:
            ends.append(runs.killed_and_resumed(left))
            print(json.dumps(ends[-1]), file=sys.stderr, flush=True)
    return {"trained_s": runs.trained_s, "kills": runs.kills, "runs": ends}


def _run_in(output: Path) -> Path | None:
    """Return the run folder in `output`, or None until the run has written its settings."""
    return next((one.parent for one in output.glob("*/run.toml")), None)


def _steps(run: Path) -> list[int]:
    return [int(one.name[5:]) for one in (run / "checkpoints").glob("step-*[0-9]")]


def _has_begun(attempt: Attempt, output: Path) -> bool:
    """Whether the attempt has written the settings, which every start does before training."""
    return any(map(attempt.has_written, output.glob("*/run.toml")))


def _is_writing(attempt: Attempt, output: Path) -> bool:
    return any(map(attempt.has_written, output.glob("*/checkpoints/.partial-*")))


def _when(attempt: Attempt, output: Path) -> str:
    run = _run_in(output)
    if run is None or not _has_begun(attempt, output):
        return STARTING
    if attempt.has_written(run / "model.safetensors"):
        return AFTER
    if _is_writing(attempt, output):
        return WRITING
    return BETWEEN if _steps(run) else BEFORE


def text(name: str, figures: dict[str, Any]) -> str:
    """Format a case's kills by process and moment, and the outcomes of its runs."""
    kills = figures["kills"]
    runs = [one for one in figures["runs"] if one["attempts"] > 1]  # a kill ended an attempt
    head = ["killed", *_MOMENTS, "all gone after at most, s"]
    lines = []
    for role in sorted({one["role"] for one in kills}):
        own = [one for one in kills if one["role"] == role]
        by_moment = Counter(one["when"] for one in own)
        slowest = max(one["ended_s"] for one in own)
        counts = [str(by_moment[moment]) for moment in _MOMENTS]
        lines.append([role, *counts, f"{slowest:.1f}"])
    num_equal = sum(one["is_equal"] for one in runs)
    left = [what for one in (*kills, *runs) for what in one.get("left", ())]
    verdict = (
        f"{name}: {len(kills)} kills; {num_equal} of {len(runs)} runs that they ended went on "
        f"to the bits of the undisturbed one; left behind: {', '.join(left) or 'nothing'}"
    )
    return table(verdict, head, lines)


PARTS = {name: Part(partial(measure, name), partial(text, name)) for name in CASES}
