"""Runs of strategy hogbatch on a model that counts how often each sample was used in an update.

    python uneven.py CASE POLICY WORKERS EPOCHS

Workers import this file for its network and its optimizer. Two files in the current folder say
what happens in the middle: `kill` and `nan` hold the sample whose worker is hit, once.
"""

import json
import os
import signal
import sys
from functools import partial
from math import nan
from pathlib import Path

import torch
from torch import Tensor, nn

NUM_SAMPLES = 600
HIT = NUM_SAMPLES - 1  # no trial has it: trials take the first samples


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


class Count(torch.optim.Optimizer):
    """Adds one to the rows that have a gradient, and touches no other."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.grad.abs().sum(1).nonzero()[:, 0]
            parameter[rows] += 1


def report_of(train, model) -> None:
    """Train, and print what came of it."""
    from paceline.core.errors import PacelineError

    try:
        outcome = train()
    except PacelineError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    print(
        json.dumps(
            {
                "uses": model.uses[:, 0].tolist(),
                "epochs": len(outcome.epochs),
                "lost": outcome.lost,
                "faults": outcome.faults,
                "workers": sorted({batch.worker for batch in outcome.history}),
                "samples": sum(batch.size for batch in outcome.history),
                "peaks": list(outcome.peaks),
            }
        )
    )


def main() -> None:
    from paceline.data.dataset import Dataset, TensorSamples
    from paceline.models import describe
    from paceline.strategies.hogbatch.config import Hogbatch
    from paceline.strategies.hogbatch.run import Run, train
    from paceline.strategies.hogbatch.worker import Learning
    from paceline.strategies.hogbatch.workers import WorkerSpec, parse_workers

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    case, policy, workers, epochs = sys.argv[1:]
    if case in ("kill", "nan", "stop"):
        Path(case).touch()
    numbers = torch.arange(float(NUM_SAMPLES))[:, None]
    classes = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    if case == "label":
        classes[7] = 2
    samples = TensorSamples(numbers, classes)
    specs = parse_workers(workers, 2)
    model = Counted()
    held = []

    def advance(size: int) -> None:
        if case == "join" and held and held[0].hands[0].updates > 3 and len(held) == 1:
            held.append(held[0].join(WorkerSpec("cpu")))

    def report(epoch) -> bool:
        made = {batch.worker for batch in held[0].history}
        return case == "join" and len(made) > len(specs)

    run = Run(
        learning=Learning(
            model="uneven:Counted",
            num_classes=None,
            optimizer="uneven:Count",
            learning_rate=0.1,
            momentum=0.0,
            seed=0,
        ),
        model=model,
        workload=describe(model, torch.zeros(32, 1), "counted"),
        data=Dataset("numbers", samples, samples, 2, (1,)),
        specs=specs,
        config=Hogbatch(workers=len(specs), policy=policy),
        batch_size=int(os.environ.get("BATCH_SIZE", "32")),
        epochs=int(epochs),
        deadline_s=5.0 if case == "stop" else 30.0,
        trial_s=0.01,
        begun=held.append,
        report=report,
        advance=advance,
    )
    report_of(partial(train, run), model)


if __name__ == "__main__":
    main()
