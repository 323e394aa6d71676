"""Run strategy hogbatch with pauses; new worker processes resume from the saved state.

    python resuming.py RECIPE WORKERS,.../WORKERS,.../... PAUSES [SETTING=VALUE ...] -- ...

A run starts with the first workers and pauses after the first number of samples. The next workers
resume from the saved state, and the last ones train to the end. A pause of `e2` is after two
epochs; `+7` only saves after each seven samples, without a pause. Each run prints one line, with
its error if it fails. Workers import the recipes from this file.

A setting `kill`, `nan`, `stop` or `die` makes a file of that name, which triggers a fault: the
worker that gets the last sample of `counted` removes the file, and then kills itself, returns NaN,
or stops itself. `die` kills a worker that saves its optimizer.
"""

import copy
import gc
import hashlib
import json
import logging
import os
import signal
import sys
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import small_recipes
from paceline.checkpoints import json_values
from paceline.core.errors import PacelineError
from paceline.core.settings import TrainSettings
from paceline.exchange.checkpoints import State
from paceline.exchange.session import Progress, TrainingSession
from paceline.links.group import Group
from paceline.strategies.hogbatch import STRATEGY
from paceline.strategies.hogbatch.config import Hogbatch, parse_workers
from paceline.strategies.hogbatch.run import start
from paceline.training.data.dataset import TensorSamples
from paceline.training.recipes.losses import class_loss
from paceline.training.recipes.recipe import Recipe

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 96, 16, 3
NUM_COUNTED = 600
HIT = NUM_COUNTED - 1  # speed trials use the first samples, and never this one
HITS = ("kill", "stop", "nan", "die")


class Centred(nn.Module):
    """Subtracts a running mean; unlike BatchNorm, it accepts a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().float().mean(0), 0.1)
        return inputs - self.mean


def own_data() -> Recipe:
    """Return a recipe whose data set each worker reads in its own process."""

    def model() -> nn.Module:
        made = small_recipes.Network(4, has_norm=False, dropout=0.3)
        made.norm = Centred()
        return made

    train, test = (
        small_recipes.Rows(count, seed, has_classes=True)
        for seed, count in enumerate((NUM_SAMPLES, 32))
    )
    known = {"train": train, "test": test, "schedule": CosineAnnealingLR}
    return replace(small_recipes.classes(), model=model, **known)


def taken(name: str) -> bool:
    """Remove a trigger file; return whether this process removed it."""
    try:
        Path(name).rename(f"{name}.{os.getpid()}")
    except FileNotFoundError:
        return False
    return True


class Counted(nn.Module):
    """Has a row of two scores per sample; the input of a sample is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(NUM_COUNTED, 2))

    def forward(self, numbers: Tensor) -> Tensor:
        rows = numbers[:, 0].long()
        is_hit = self.training and bool((rows == HIT).any())
        for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            if is_hit and taken(name):
                os.kill(os.getpid(), number)
        scores = self.uses[rows]
        return scores * nan if is_hit and taken("nan") else scores


def counted() -> Recipe:
    """Return a recipe that counts how often updates use each sample."""
    numbers = torch.arange(float(NUM_COUNTED))[:, None]
    samples = TensorSamples(numbers, torch.zeros(NUM_COUNTED, dtype=torch.int64))
    return Recipe(model=Counted, train=samples, loss=class_loss)


class Count(Optimizer):
    """Adds one to the rows that have a gradient."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.grad.abs().sum(1).nonzero()[:, 0]
            parameter[rows] += 1

    def state_dict(self) -> dict[str, Any]:
        if taken("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict()


class Silent(Progress):
    """Counts samples, and shows nothing."""

    def __init__(self) -> None:
        self.counted = self.total = 0

    def begin(self, total: int, unit: str) -> None:
        self.total = total

    def advance(self, count: int = 1) -> None:
        self.counted += count


def num_memories() -> int:
    """Count this process's descriptors of shared memory."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link).startswith("/memfd:") for link in links)


class Paused(Exception):
    """Raised to end a run after it was saved."""


class Saver:
    """Saves the run after `when` samples and ends it, or saves it every `+N` samples."""

    def __init__(self, runner: Any, when: str) -> None:
        self.runner, self.every = runner, int(when) if when.startswith("+") else None
        self.next = self.every or int(when)
        self.saved: Any = None
        self.num_saved = 0

    def __call__(self) -> None:
        if self.runner.coordinator.scheduler.num_samples < self.next:
            return
        self.save()
        if self.every is None:
            raise Paused
        self.next = self.runner.coordinator.scheduler.num_samples + self.every

    def save(self) -> None:
        tensors, parts = self.runner.state()
        # Copy tensors and write values as text, as in a checkpoint.
        text = json_values.dumps("values", parts)
        self.saved = {name: one.clone() for name, one in tensors.items()}, text
        self.num_saved += 1


def session(recipe: str, workers: str, changes: dict[str, Any], progress: Silent) -> Any:
    known = {"model": f"resuming:{recipe}", "strategy": "hogbatch", "workers": workers}
    known["optimizer"] = "resuming:Count" if recipe == "counted" else "sgd"
    known |= {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "learning_rate": 0.1, "momentum": 0.0}
    asked = TrainSettings(**known | {"profile_s": 0.02, "keep_all": True} | changes)
    config = {"cpu_batch": (5, 40), "gpu_batch": (5, 16), "policy": "adaptive"}
    own = Hogbatch(workers=len(parse_workers(workers)), **config)
    alone = Group.alone(torch.device("cpu"), asked.deadline_s)
    return TrainingSession(asked, STRATEGY, own, "resuming", alone, progress)


def ran(recipe: str, workers: str, when: str, changes: dict[str, Any], saved: Any) -> Any:
    """Train to the pause, or to the end; return the saved state, or the outcome."""
    progress = Silent()
    with start(session(recipe, workers, changes, progress)) as runner:
        if saved is not None:
            runner.restore(State(saved[0], json_values.loads(saved[1])))
        saver = None
        if when and when[0] != "e":
            saver = runner.coordinator.between = Saver(runner, when)
        runner.measure()
        try:
            for epoch in runner.epochs():
                if when[:1] == "e" and epoch.number + 1 == int(when[1:]):
                    saver = Saver(runner, "0")
                    saver.save()
                    return saver.saved
        except Paused:
            assert saver is not None
            return saver.saved
        finally:
            runner.coordinator.between = None  # break the reference to the runner
        outcome = runner.outcome()
        model = {name: one.clone() for name, one in runner._model.state_dict().items()}
        return found(runner, outcome, model, progress) | {
            "num_saved": saver.num_saved if saver else 0
        }


def found(runner: Any, outcome: Any, model: dict[str, Tensor], progress: Silent) -> dict[str, Any]:
    """Summarise a run; `covered`: the distinct numbers of uses of a sample in an epoch."""
    log = list(runner.coordinator.log)
    covered = [[0] * size for size in runner._sizes]
    for batch in log:
        for place in range(batch.first, batch.first + batch.size):
            covered[batch.epoch][place] += 1
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in model.values()))
    return {
        "bits": digest.hexdigest(),
        "model": {name: one.tolist() for name, one in model.items()},
        "epochs": [[one.number, one.train_loss, one.test_loss] for one in outcome.epochs],
        "covered": sorted({times for epoch in covered for times in epoch}),
        "batches": [[batch.epoch, batch.first, batch.size] for batch in log],
        "by_worker": sorted({batch.worker for batch in log}),
        "workers": [[one.name, one.samples] for one in outcome.workers],
        "updates": outcome.updates.count,
        "lost": outcome.lost,
        "faults": outcome.faults,
        "progress": [progress.counted, progress.total],
    }


def main() -> None:
    os.environ["PACELINE_SIMULATED_GPUS"] = "1"
    logging.basicConfig(format="%(message)s")
    for words in " ".join(sys.argv[1:]).split(" -- "):
        recipe, workers, pauses, *given = words.split()
        changes = dict(one.split("=") for one in given)
        for name in HITS:
            if changes.pop(name, None):
                Path(name).touch()
        before, state, last = num_memories(), None, {}
        for number, own in enumerate(workers.split("/")):
            when = (*pauses.split("/"), "")[number] if pauses != "-" else ""
            try:
                last = ran(recipe, own, when, copy.copy(changes), state)
            except PacelineError as error:
                hit = [int(path.suffix[1:]) for name in HITS for path in Path().glob(f"{name}.*")]
                last = {"error": f"{type(error).__name__}: {error}", "hit": hit}
            state = last if isinstance(last, tuple) else None
        for path in (path for name in HITS for path in Path().glob(f"{name}*")):
            path.unlink()
        del state
        gc.collect()  # the coordinator and the runner refer to each other
        last["left"] = num_memories() - before
        print(json.dumps([words, last]), flush=True)


if __name__ == "__main__":
    main()
