"""Train a recipe of closures over data in memory, in a program that has used PyTorch before.

The argument is the name of a function below. Each function prints JSON objects, one per line.
"""

import os
import signal

os.environ.pop("OMP_NUM_THREADS", None)  # users rarely set it; libraries read it when loaded

import gc
import json
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline.training.data import ShardedBatches

NUM_SAMPLES, WIDTH, HIDDEN, BATCH = 256, 2**16, 4, 16  # 64 MiB of samples
SEED, RATE = 3, 1e-3

torch.set_num_threads(2)
weights = torch.randn(500, 500, requires_grad=True)
(weights @ weights).sin().sum().backward()  # starts threads that a fork would lack

rows = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
labels = (rows[:, :9].sum(1) > 0).float()
folder = Path.cwd()


class Samples:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"values": rows[index], "label": labels[index]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def forward(self, values: Tensor, label: Tensor) -> Tensor:
        return self.layers(values)[:, 0]


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, batch["label"])


recipe = paceline.Recipe(
    model=Model,
    train=Samples(),
    loss=loss,
    test=Samples(),
    score=lambda outputs, batch: ((outputs > 0) == (batch["label"] > 0)).float().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, RATE, momentum=0.5),
)


narrow = [(row[:32], label) for row, label in zip(rows, labels.long(), strict=True)]
pairs = paceline.Recipe(
    model=lambda: nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2)),
    train=narrow,
    test=narrow,
    loss=nn.functional.cross_entropy,
    score=lambda outputs, targets: (outputs.argmax(1) == targets).float().mean(),
)


def alone() -> dict[str, Tensor]:
    """Train an epoch with plain PyTorch in one process; return the parameters."""
    torch.manual_seed(SEED)
    trained = Model()
    optimizer = torch.optim.SGD(trained.parameters(), RATE, momentum=0.5)
    batches = ShardedBatches(NUM_SAMPLES, BATCH, 0, 1, SEED)
    batches.set_epoch(0)
    for numbers in batches:
        optimizer.zero_grad()
        outputs = trained(rows[list(numbers)], labels[list(numbers)])
        nn.functional.binary_cross_entropy_with_logits(outputs, labels[list(numbers)]).backward()
        optimizer.step()
    return trained.state_dict()


def trained(recipe: paceline.Recipe = recipe, **settings: Any) -> paceline.Run:
    common = {"batch_size": BATCH, "epochs": 1, "profile_s": 0.1, "seed": SEED}
    return paceline.train(recipe, **common | settings)


def say(found: Any) -> None:
    os.write(1, f"{json.dumps(found)}\n".encode())  # one write, because ranks share the pipe


def tell(run: paceline.Run) -> None:
    saved, expected = load_file(run.folder / "model.safetensors"), alone()
    say(
        {
            "strategy": run.result.strategy,
            "folder": str(run.folder),
            "apart": max(float((saved[name] - expected[name]).abs().max()) for name in expected),
            "score": run.result.score,
            "epochs": [asdict(one) for one in run.result.epochs],
            "faults": run.result.faults,
            "workers": len(run.result.peak_memory_bytes),
            "threads": threading.active_count(),
        }
    )


def all_strategies() -> None:
    tell(trained(strategy="allreduce"))
    tell(trained(strategy="host"))
    tell(trained(strategy="tree"))
    tell(trained(workers=1))


def led() -> None:
    """Train twice with each strategy that this process leads; check its random state."""
    numbers = torch.get_rng_state()
    kinds: dict[str, dict[str, Any]] = {
        "hogbatch": {"workers": "cpu:1,cpu:1", "keep_all": True},
        "wheel": {"workers": 2, "options": {"head": "2"}},
        "subbatch": {"workers": 2},
    }
    for strategy, settings in kinds.items():
        for _ in range(2):
            run = trained(pairs, strategy=strategy, epochs=2, **settings)
            losses = [one.train_loss for one in run.result.epochs]
            kept = torch.equal(numbers, torch.get_rng_state())
            found = {"strategy": strategy, "losses": losses, "numbers": kept}
            say(found | {"lost": run.result.lost})


def as_a_rank() -> None:
    gc.disable()  # shows objects that a run leaves in reference cycles
    for strategy in ("host", "allreduce"):
        tell(trained(strategy=strategy))
    try:
        trained(strategy="hogbatch", workers="cpu:1")
    except paceline.InvalidInput as error:
        threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        say({"refused": error.field, "left": [name for name in threads if "gloo" in name]})


def resumes() -> None:
    """Compare three epochs of one run with one epoch and two more after resuming."""
    whole = trained(epochs=3)
    half = trained(epochs=1, checkpoint_every="4")
    rest = paceline.train(recipe, resume=half.folder, epochs=3)
    ends = [load_file(run.folder / "model.safetensors") for run in (whole, rest)]
    alike = [torch.equal(ends[0][name], ends[1][name]) for name in ends[0]]
    say({"alike": all(alike), "folders": [str(half.folder), str(rest.folder)]})


def restarts() -> None:
    """Kill a worker once, before the first checkpoint."""
    has_died = folder / "has-died"

    def deadly(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled() and not has_died.exists():
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(outputs, batch)

    run = trained(replace(recipe, loss=deadly), max_restarts=2)
    copied = run.report("mine.html").read_bytes()
    found = {"is_copied": copied == (run.folder / "report.html").read_bytes()}
    found["files"] = sorted(path.name for path in run.folder.iterdir())
    say(found | {"lost": run.result.lost})
    tell(run)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
