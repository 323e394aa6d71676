"""Run strategy hogbatch with pauses; new worker processes resume from the saved state.

    python resuming.py RECIPE WORKERS,.../WORKERS,.../... PAUSES [SETTING=VALUE ...] -- ...

A run starts with the first workers and pauses after the first number of samples. The next workers
resume from the saved state, and the last ones train to the end. A pause of `e2` is after two
epochs; `+7` only saves after each seven samples, without a pause. Each run prints one line, with
its error if it fails. Workers import the recipes from this file. A setting `kill`, `stop`, `nan` or
`die` makes a file of that name, which triggers a fault in one worker: see counted.py. `die` kills a
worker that saves its optimizer.
"""

import copy
import gc
import hashlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from counted import Silent, count, num_memories, prepare, session_of, taken
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import Dataset

from paceline.core.errors import PacelineError

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 96, 16, 3
HITS = ("kill", "stop", "nan", "die")


class Rows(Dataset):
    """Samples that are computed when they are read."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self.seed, self.num_samples = seed, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(self.seed + index)
        inputs = torch.randn(6, generator=source)
        return {"inputs": inputs, "target": (inputs.sum() > 0).long()}


class Centred(nn.Module):
    """Subtracts a running mean; unlike BatchNorm, it accepts a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().float().mean(0), 0.1)
        return inputs - self.mean


class Net(nn.Module):
    """Has a buffer that training changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 12), Centred(), nn.Dropout(0.3), nn.Tanh(), nn.Linear(12, 2)
        )

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.layers(inputs)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(outputs, batch["target"])


def own_data() -> Any:
    """Return a recipe whose data set each worker reads in its own process."""
    from paceline.training.recipes.recipe import Recipe

    data = {"train": Rows(0, NUM_SAMPLES), "test": Rows(1000, 32)}
    return Recipe(model=Net, loss=loss, schedule=CosineAnnealingLR, **data)


def of_shared_data(model: Any, **more: Any) -> Any:
    """Return a recipe with samples in shared memory."""
    from paceline.training.data.dataset import TensorSamples
    from paceline.training.recipes.losses import class_loss
    from paceline.training.recipes.recipe import Recipe

    rows = [Rows(0, NUM_SAMPLES)[index] for index in range(NUM_SAMPLES)]
    samples = TensorSamples(*(torch.stack([one[key] for one in rows]) for key in rows[0]))
    return Recipe(model=model, train=samples, test=samples, loss=class_loss, **more)


def shared_data() -> Any:
    from paceline.training.recipes.losses import accuracy

    return of_shared_data(lambda: Net().layers, score=accuracy, num_classes=2)


def stopping() -> Any:
    """Return a recipe with a learning rate of zero from the second epoch."""
    return of_shared_data(lambda: nn.Linear(6, 2), schedule=stops)


def stops(optimizer: Optimizer, num_steps: int) -> LambdaLR:
    assert num_steps == EPOCHS * NUM_SAMPLES // BATCH_SIZE
    return LambdaLR(optimizer, lambda step: float(step < num_steps // EPOCHS))


class Count(Optimizer):
    """Adds one to the rows that have a gradient."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        count(self.param_groups[0]["params"])

    def state_dict(self) -> dict[str, Any]:
        if taken("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict()


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
        from paceline.checkpoints import json_values

        tensors, parts = self.runner.state()
        # Copy tensors and write values as text, as in a checkpoint.
        text = json_values.dumps("values", parts)
        self.saved = {name: one.clone() for name, one in tensors.items()}, text
        self.num_saved += 1


def session(recipe: str, workers: str, changes: dict[str, Any], progress: Silent) -> Any:
    known = {"model": f"resuming:{recipe}", "optimizer": "sgd"}
    if recipe == "counted":
        known = {"model": "counted:recipe", "optimizer": "resuming:Count"}
    config = {"cpu_batch": (5, 40), "gpu_batch": (5, 16), "policy": "adaptive"}
    config |= {name: value for name, value in changes.items() if name in config}
    changes = {name: value for name, value in changes.items() if name not in config}
    more = {"batch_size": BATCH_SIZE, "epochs": EPOCHS}
    return session_of(workers, progress, config, **more | known | changes)


def ran(recipe: str, workers: str, when: str, changes: dict[str, Any], saved: Any) -> Any:
    """Train to the pause, or to the end; return the saved state, or the outcome."""
    from paceline.checkpoints import json_values
    from paceline.exchange.checkpoints import State
    from paceline.strategies.hogbatch.run import start

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
    prepare(__file__)
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
