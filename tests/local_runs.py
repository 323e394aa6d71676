"""Runs of strategy local as processes: their hub, their workers, and what they say."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import Finished, Started

RECIPES = Path(__file__).parent / "whole" / "programs" / "local_recipes.py"
NUM_SAMPLES, BATCH_SIZE = 480, 24
RECIPE = "local_recipes:steady"
QUICK = ("--batch-size", str(BATCH_SIZE), "--profile-s", "0", "--checkpoint-every", "never")


@dataclass
class Run:
    """A command that is watched while it runs: all that it has said so far is in `seen`."""

    started: Started
    seen: list[str] = field(default_factory=list)

    def until(self, what: str) -> str:
        """Return the next line of standard error that contains it."""
        for line in iter(self.started.process.stderr.readline, ""):
            self.seen.append(line)
            if what in line:
                return line
        raise AssertionError(f"{what!r} was not said: {''.join(self.seen)}")

    def finish(self, code: int = 0) -> Finished:
        """Wait for its end, and return it with all that it has said."""
        done = self.started.finish()
        done.err = "".join(self.seen) + done.err
        assert done.code == code, done.err
        assert "Traceback" not in done.err, done.err
        return done

    def result(self) -> dict:
        """Wait for its end, and return its result, which --json has it print."""
        found: dict = json.loads(self.finish().out)
        return found

    def address(self) -> str:
        """Return where a hub listens."""
        found = re.search(r"tcp://[0-9.:]+", self.until("listening on"))
        assert found is not None
        return found[0]


@dataclass
class LocalRuns:
    """The command line in a folder with the recipes."""

    start: Callable[..., Started]
    folder: Path

    def __post_init__(self) -> None:
        shutil.copy(RECIPES, self.folder)

    def paceline(self, *arguments: str) -> Run:
        return Run(self.start("-m", "paceline", *arguments))

    def slow(self) -> Path:
        """Slow all workers down, until the file is gone."""
        path = self.folder / "slow"
        path.touch()
        return path

    def train(self, *options: str, **sizes: Any) -> Run:
        """Start a run whose workers the hub starts."""
        return self._run("train", *options, **sizes)

    def hub(self, *options: str, **sizes: Any) -> Run:
        """Start a hub that waits for its workers."""
        return self._run("hub", "--bind", "tcp://127.0.0.1:0", *options, **sizes)

    def _run(
        self, command: str, *options: str, recipe: str = RECIPE, workers: int = 2, epochs: int = 4
    ) -> Run:
        sizes = ("--workers", str(workers), "--epochs", str(epochs))
        return self.paceline(
            *(command, recipe, "--strategy", "local", *QUICK, *sizes, *options, "--json")
        )

    def worker(self, address: str, number: int, *options: str) -> Run:
        """Start a worker of a hub."""
        own = ("--as", str(number), "--threads", "1", "--device", "cpu")
        return self.paceline("worker", "--connect", address, *own, *options)

    def model(self, result: dict, output: str = "runs") -> bytes:
        """Return the bytes of what a run has learnt."""
        return (self.folder / output / result["id"] / "model.safetensors").read_bytes()


def check_whole(result: dict, epochs: int) -> None:
    """Check that a run was trained to its end."""
    assert [one["number"] for one in result["epochs"]] == list(range(epochs))
