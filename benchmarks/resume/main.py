"""Kill random processes of runs, resume the runs, and compare the final bits.

Each strategy first trains an undisturbed run. In further runs, random processes get SIGKILL at
random moments, and `--resume` continues each run until it ends. All strategies have 50 kills in
all. Kills after the last step, while results are written, do not count towards the 50.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from attempt import Attempt, Ended
from figures import Part, table

_MODULES = Path(__file__).parents[2] / "tests"  # small_recipes train in seconds
STARTING = "while it starts"
BEFORE = "before the first checkpoint"
WRITING = "while one is written"
BETWEEN = "between two"
AFTER = "after the last step"
_MOMENTS = (STARTING, BEFORE, WRITING, BETWEEN, AFTER)
_TRAINED = "--batch-size 24 --epochs 16 --profile-s 0.2 --seed 5"
_AT_A_WRITING, _AT_THE_START = 0.35, 0.1  # shares of kills
_AGAIN = 0.6  # share of resumed runs that are killed again


class Case(NamedTuple):
    """A recipe and its options, kills, checkpoint interval, and the first process's role."""

    words: str
    num_kills: int = 7
    every: str = "10"
    lead: str = "launcher"


CASES = {
    "host": Case("small_recipes:with_dropout --strategy host --workers 2", 8),
    "tree": Case("small_recipes:with_dropout --strategy tree --workers 2"),
    "allreduce": Case("small_recipes:with_dropout --strategy allreduce --workers 3"),
    "allreduce-onebit": Case(
        "small_recipes:with_dropout --strategy allreduce --workers 2 --strategy-option codec=onebit"
    ),
    "subbatch-onebit": Case(
        "small_recipes:classes --strategy subbatch --workers 2 --strategy-option gradients=onebit"
    ),
    "hogbatch": Case(
        "small_recipes:classes --strategy hogbatch --workers cpu:1 "
        "--strategy-option policy=hogbatch",
        lead="coordinator",
    ),
    "wheel": Case(  # workers have no common steps, so the interval is a time
        "small_recipes:plain --strategy wheel --workers 1 --strategy-option lanes=1 "
        "--strategy-option staleness=0 --strategy-option head=head",
        every="0.2s",
        lead="hub",
    ),
}


class Run:
    """A run of a case: the process that trains it, and its output folder."""

    def __init__(self, case: Case, output: Path) -> None:
        self._case, self._output = case, output
        words = f"{case.words} {_TRAINED} --output {output} --checkpoint-every {case.every}"
        self.attempt = self._train(words)

    def _train(self, words: str) -> Attempt:
        command = f"-m paceline train {words}".split()
        return Attempt(command, self._output.parent, self._case.lead, _MODULES)

    def resume(self) -> None:
        """Continue the run with `--resume`."""
        self.attempt = self._train(f"--resume {self.folder} --profile-s 0.2")

    @property
    def folder(self) -> Path | None:
        """The run folder, or None until the run has written its settings."""
        return next((one.parent for one in self._output.glob("*/run.toml")), None)

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints."""
        return [int(one.name[5:]) for one in self._output.glob("*/checkpoints/step-*[0-9]")]

    @property
    def is_writing(self) -> bool:
        """Whether the attempt writes a checkpoint, or has ended while it wrote one."""
        return any(map(self.attempt.has_written, self._output.glob("*/checkpoints/.partial-*")))

    @property
    def has_begun(self) -> bool:
        """Whether the attempt has written the settings, which every start does before training."""
        return any(map(self.attempt.has_written, self._output.glob("*/run.toml")))

    @property
    def moment(self) -> str:
        """The moment of training."""
        if self.folder is None or not self.has_begun:
            return STARTING
        if self.attempt.has_written(self.folder / "model.safetensors"):
            return AFTER
        if self.is_writing:
            return WRITING
        return BETWEEN if self.steps else BEFORE

    @property
    def learnt(self) -> tuple[bytes, list[dict[str, Any]]]:
        """The model's bytes, and its epochs without seconds."""
        assert self.folder is not None
        epochs = json.loads((self.folder / "result.json").read_text())["epochs"]
        without = {"seconds"}
        if self._case.lead == "hub":  # a training loss covers only the epoch since the last start
            without = {*epochs[0]} - {"number", "test_loss"}
        kept = [{key: one[key] for key in one if key not in without} for one in epochs]
        return (self.folder / "model.safetensors").read_bytes(), kept

    def kill(
        self, choice: random.Random, trained_s: float, num_steps: int
    ) -> dict[str, Any] | None:
        """Kill a process at a random moment; return None if the attempt ended first."""
        draw, begun_at = choice.random(), max(self.steps, default=0)
        if draw < _AT_THE_START:
            self.attempt.sleep(choice.uniform(0.0, 6.0))
        else:
            self.attempt.wait_until(lambda: self.has_begun)
            self.attempt.sleep(trained_s * (1 - begun_at / num_steps) * choice.random())
            if draw > 1 - _AT_A_WRITING:
                self.attempt.wait_until(lambda: self.is_writing)
        moment, found = self.moment, self.attempt.draw(choice)
        if found is None or not self.attempt.is_running:
            return None
        with suppress(ProcessLookupError):
            os.kill(found[0], signal.SIGKILL)
        ended = self.attempt.end()
        kill = {"role": found[1], "when": moment, "begun_at": begun_at, "code": ended.code}
        kill |= {"ended_s": ended.ended_s, "left": ended.left, "half_written": self.is_writing}
        return kill | {"traceback": ended.said if "Traceback" in ended.said else ""}


def measure(name: str, quick: bool) -> dict[str, Any]:
    """Kill and resume the runs of a case; return their outcomes and each kill."""
    case = CASES[name]
    num_kills = 1 if quick else case.num_kills
    choice = random.Random(f"{name} {num_kills}")  # noqa: S311 - nothing is kept secret
    kills: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []

    def num_left() -> int:
        return num_kills - len([one for one in kills if one["when"] != AFTER])

    with tempfile.TemporaryDirectory() as folder:
        whole = Run(case, Path(folder) / "undisturbed")
        whole.attempt.wait_until(lambda: whole.folder is not None)
        began_s = time.monotonic()
        ended = whole.attempt.end()
        trained_s = time.monotonic() - began_s
        if ended.code or ended.left or whole.folder is None:
            sys.exit(f"the undisturbed run ended with {ended}")
        while num_left() > 0:
            run = Run(case, Path(folder) / f"run-{len(ends)}")
            num_attempts = 1
            while num_left() > 0:
                kill = run.kill(choice, trained_s, max(whole.steps))
                if kill is None:  # the attempt ended before the kill
                    break
                kills.append(kill)
                print(json.dumps(kill), file=sys.stderr, flush=True)
                if run.folder is not None and kill["code"] == 0:  # it needed the process no longer
                    break
                num_attempts += 1
                if run.steps:
                    run.resume()
                else:
                    if run.folder is not None:  # `--resume` must refuse a run without a checkpoint
                        run.resume()
                        refusal = run.attempt.end()
                        kill["refusal"] = [refusal.code, refusal.said]
                    run = Run(case, Path(folder) / f"run-{len(ends)}-{num_attempts}")
                if choice.random() > _AGAIN:
                    break
            ends.append(_outcome(run, run.attempt.end(), whole) | {"attempts": num_attempts})
            print(json.dumps(ends[-1]), file=sys.stderr, flush=True)
    return {"trained_s": trained_s, "kills": kills, "runs": ends}


def _outcome(run: Run, ended: Ended, whole: Run) -> dict[str, Any]:
    """Return whether a run has ended with the bits of the whole run, and what it left behind."""
    if ended.code or run.folder is None:
        return {"is_equal": False, "said": ended.said}
    partial_ones = [one.name for one in (run.folder / "checkpoints").glob(".*")]
    is_equal, epochs = run.learnt == whole.learnt, len(run.learnt[1])
    return {"is_equal": is_equal, "left": ended.left + partial_ones, "epochs": epochs}


def text(name: str, figures: dict[str, Any]) -> str:
    """Format a case's kills by process and moment, and the outcomes of its runs."""
    kills = figures["kills"]
    runs = [one for one in figures["runs"] if one["attempts"] > 1]  # a kill ended an attempt
    lines = []
    for role in sorted({one["role"] for one in kills}):
        own = [one for one in kills if one["role"] == role]
        by_moment = Counter(one["when"] for one in own)
        slowest = max(one["ended_s"] for one in own)
        lines.append([role, *(str(by_moment[one]) for one in _MOMENTS), f"{slowest:.1f}"])
    num_equal = sum(one["is_equal"] for one in runs)
    left = [what for one in (*kills, *runs) for what in one.get("left", ())]
    verdict = (
        f"{name}: {len(kills)} kills; {num_equal} of {len(runs)} runs that they ended went on "
        f"to the bits of the undisturbed one; left behind: {', '.join(left) or 'nothing'}"
    )
    return table(verdict, ["killed", *_MOMENTS, "all gone after at most, s"], lines)


PARTS = {name: Part(partial(measure, name), partial(text, name)) for name in CASES}
