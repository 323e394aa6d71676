"""Runs of strategy hogbatch on a model that counts how often each sample was used in an update.

    python uneven.py CASE/POLICY/WORKERS/EPOCHS...

Each run prints a line. Workers import this file for its network and its optimizer. A file in the
current folder says what happens in the middle of a run: `kill`, `nan` and `stop` hold the sample
whose worker is hit, once.
"""

import gc
import json
import os
import signal
import sys
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NUM_SAMPLES = 600
HIT = NUM_SAMPLES - 1  # no trial has it: trials take the first samples
BATCH_SIZE = 32
STOPPED_S = 3.0  # after which a worker that does not answer is given up


class Counted(nn.Module):
    """A row of two scores for each sample, which is its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(NUM_SAMPLES, 2))

    def forward(self, numbers: Tensor) -> Tensor:
        rows = numbers[:, 0].long()
        is_hit = self.training and bool((rows == HIT).any())
        if is_hit and _taken("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if is_hit and _taken("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        scores = self.uses[rows]
        return scores * nan if is_hit and _taken("nan") else scores


def _taken(name: str) -> bool:
    """Whether this process is the one that takes the file away."""
    try:
        Path(name).rename(f"{name}.{os.getpid()}")
    except FileNotFoundError:
        return False
    return True


class Count:
    """Adds one to the rows that have a gradient, and touches no other.

    Not one of torch's, whose first takes each worker a second and a half to import a compiler.
    """

    def __init__(self, parameters, lr: float) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.grad.abs().sum(1).nonzero()[:, 0]
            parameter[rows] += 1

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


@dataclass
class Watcher:
    """Progress of a run; in case `join` a worker joins when the first has made some updates."""

    case: str
    coordinator: Any = None
    has_joined: bool = False

    def begin(self, total: int, unit: str) -> None:
        """Show nothing."""

    def advance(self, count: int = 1) -> None:
        from paceline.strategies.hogbatch.config import WorkerSpec

        if (
            self.case == "join"
            and not self.has_joined
            and self.coordinator.processes.workers[0].updates > 3
        ):
            self.has_joined = True
            self.coordinator.processes.start(WorkerSpec("cpu"))

    def epoch(self, epoch: Any, score: str) -> None:
        """Show nothing."""

    def status(self, text: str) -> None:
        """Show nothing."""


def ran(case: str, policy: str, workers: str, epochs: int) -> dict:
    """Train, and return what came of it."""
    from paceline.core.errors import PacelineError
    from paceline.strategies.hogbatch.run import runner_of

    if case in ("kill", "nan", "stop"):
        Path(case).touch()
    watcher, model = Watcher(case), Counted()
    session = session_of(case, policy, workers, epochs, watcher)
    try:
        with runner_of(session, _recipe(), model) as runner:
            watcher.coordinator = runner.coordinator
            runner.measure()
            for _ in runner.epochs():
                made = {batch.worker for batch in runner.coordinator.log}
                if case == "join" and len(made) > 1:
                    break
            outcome = runner.outcome()
    except PacelineError as error:
        hit = [int(path.suffix[1:]) for path in Path().glob(f"{case}.*")]
        return {"error": f"{type(error).__name__}: {error}", "hit": hit}
    log = list(watcher.coordinator.log)
    return {
        "uses": model.uses[:, 0].tolist(),
        "epochs": len(outcome.epochs),
        "lost": outcome.lost,
        "faults": outcome.faults,
        "workers": sorted({batch.worker for batch in log}),
        "samples": sum(batch.size for batch in log),
        "num_peaks": len(outcome.peak_memory_bytes),
    }


def _num_memories() -> int:
    """How many descriptors of shared memory this process has."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link).startswith("/memfd:") for link in links)


def session_of(case: str, policy: str, workers: str, epochs: int, progress: Watcher) -> Any:
    from paceline.core.settings import TrainSettings
    from paceline.exchange.session import TrainingSession
    from paceline.links.group import Group
    from paceline.strategies.hogbatch import STRATEGY
    from paceline.strategies.hogbatch.config import Hogbatch, parse_workers

    settings = TrainSettings(
        model="uneven:Counted",
        strategy="hogbatch",
        workers=workers,
        optimizer="uneven:Count",
        learning_rate=0.1,
        momentum=0.0,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        deadline_s=STOPPED_S if case == "stop" else 30.0,
        profile_s=0.02,
        force=True,
    )
    config = Hogbatch(workers=len(parse_workers(workers)), policy=policy)
    alone = Group.alone(torch.device("cpu"), settings.deadline_s)
    return TrainingSession(settings, STRATEGY, config, "counted", alone, progress)


def _recipe():
    from paceline.data.dataset import TensorSamples
    from paceline.recipes.classification import accuracy, class_loss
    from paceline.recipes.recipe import Recipe

    numbers = torch.arange(float(NUM_SAMPLES))[:, None]
    classes = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    samples = TensorSamples(numbers, classes)
    return Recipe(
        model=Counted, train=samples, test=samples, loss=class_loss, score=accuracy, num_classes=2
    )


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["PACELINE_SIMULATED_GPUS"] = "1"
    for asked in sys.argv[1:]:
        case, policy, workers, epochs = asked.split("/")
        before = _num_memories()
        found = ran(case, policy, workers, int(epochs))
        gc.collect()  # coordinator and watcher refer to each other
        found["left"] = _num_memories() - before
        print(json.dumps([asked, found]), flush=True)


if __name__ == "__main__":
    main()
