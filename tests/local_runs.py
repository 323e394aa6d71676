"""Runs of strategy local as processes: their hub, their workers, and what they say."""

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from launched import PROGRAMS
from processes import DEADLINE_S, Finished, Started

sys.path.append(str(PROGRAMS))
NUM_SAMPLES, BATCH_SIZE = 480, 24
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
RECIPE = "local_recipes:steady"
QUICK = ("--batch-size", str(BATCH_SIZE), "--profile-s", "0", "--checkpoint-every", "never")
WORKER_MODULE = "paceline.strategies.local.worker"


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

    def worker(self, number: int) -> int:
        """Return the process of a worker that the hub has started itself."""
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            for pid, command in self.started.members().items():
                if WORKER_MODULE in command and f'"workers":[{number}]' in command:
                    return pid
            time.sleep(0.05)
        raise AssertionError(f"no process of worker {number}: {self.started.members()}")

    def address(self) -> str:
        """Return where a hub listens."""
        found = re.search(r"listening on (tcp://\S+);", self.until("listening on"))
        assert found is not None
        return found[1]


@dataclass
class LocalRuns:
    """The command line in a folder with the recipes."""

    start: Callable[..., Started]
    folder: Path

    def __post_init__(self) -> None:
        shutil.copy(PROGRAMS / "local_recipes.py", self.folder)

    def flag(self, name: str) -> Path:
        """Set a flag that recipes look for."""
        path = self.folder / name
        path.touch()
        return path

    def train(self, *options: str, recipe: str = RECIPE, workers: int = 2, epochs: int = 4) -> Run:
        """Start a run whose workers the hub starts."""
        sizes = ("--workers", str(workers), *_length(epochs, options))
        command = ("train", recipe, "--strategy", "local", *QUICK, *sizes)
        return Run(self.start("-m", "paceline", *command, *options, "--json"))

    def hub(self, *options: str, recipe: str = RECIPE, workers: int = 2, epochs: int = 4) -> Run:
        """Start a hub that waits for its workers; "--bind" is among the options, or any port."""
        bind = () if "--bind" in options else ("--bind", "tcp://127.0.0.1:0")
        sizes = ("--workers", str(workers), "--epochs", str(epochs))
        command = ("hub", recipe, "--strategy", "local", *QUICK, *sizes, *bind)
        return Run(self.start("-m", "paceline", *command, *options, "--json"))

    def worker(
        self,
        address: str,
        number: int,
        *options: str,
        program: tuple[str, ...] = ("-m", "paceline"),
        folder: Path | None = None,
    ) -> Run:
        """Start a worker of a hub."""
        own = ("--as", str(number), "--threads", "1", "--device", "cpu")
        command = (*program, "worker", "--connect", address, *own, *options)
        return Run(self.start(*command, folder=folder or self.folder))

    def model(self, result: dict, output: str = "runs") -> bytes:
        """Return the bytes of what a run has learnt."""
        return (self.folder / output / result["id"] / "model.safetensors").read_bytes()


def _length(epochs: int, options: tuple[str, ...]) -> tuple[str, ...]:
    return () if "--steps" in options else ("--epochs", str(epochs))


def first_loss() -> float:
    """Return the loss on the test samples before training: what a worker that begins anew has."""
    import local_recipes

    torch.manual_seed(0)
    model = local_recipes.Net().eval()
    inputs, targets = local_recipes.data(60, seed=1).tensors
    with torch.no_grad():
        return float((model(inputs) - targets).square().mean())


def check_whole(result: dict, epochs: int) -> None:
    """Check that a run was trained to its end."""
    assert [one["number"] for one in result["epochs"]] == list(range(epochs))
