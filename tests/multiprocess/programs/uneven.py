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
from math import nan
from pathlib import Path

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


def ran(case: str, policy: str, workers: str, epochs: int) -> dict:
    """Train, and return what came of it."""
    from paceline.core.errors import PacelineError
    from paceline.strategies.hogbatch.run import train

    if case in ("kill", "nan", "stop"):
        Path(case).touch()
    run = run_of(case, policy, workers, epochs)
    try:
        outcome = train(run)
    except PacelineError as error:
        hit = [int(path.suffix[1:]) for path in Path().glob(f"{case}.*")]
        return {"error": f"{type(error).__name__}: {error}", "hit": hit}
    return {
        "uses": run.model.uses[:, 0].tolist(),
        "epochs": len(outcome.epochs),
        "lost": outcome.lost,
        "faults": outcome.faults,
        "workers": sorted({batch.worker for batch in outcome.history}),
        "samples": sum(batch.size for batch in outcome.history),
        "peaks": list(outcome.peaks),
    }


def _num_memories() -> int:
    """How many descriptors of shared memory this process has."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link).startswith("/memfd:") for link in links)


def run_of(case: str, policy: str, workers: str, epochs: int):
    from paceline.models import describe
    from paceline.strategies.hogbatch.config import Hogbatch
    from paceline.strategies.hogbatch.run import Run
    from paceline.strategies.hogbatch.worker import Learning
    from paceline.strategies.hogbatch.workers import WorkerSpec, parse_workers

    specs = parse_workers(workers, 2)
    model = Counted()
    held = []

    def advance(size: int) -> None:
        if case == "join" and held and held[0].hands[0].updates > 3 and len(held) == 1:
            held.append(held[0].join(WorkerSpec("cpu")))

    def report(epoch) -> bool:
        made = {batch.worker for batch in held[0].history}
        return case == "join" and len(made) > len(specs)

    return Run(
        learning=Learning(
            model="uneven:Counted",
            num_classes=None,
            optimizer="uneven:Count",
            learning_rate=0.1,
            momentum=0.0,
            seed=0,
        ),
        model=model,
        workload=describe(model, torch.zeros(BATCH_SIZE, 1), "counted"),
        data=_data(case),
        specs=specs,
        config=Hogbatch(workers=len(specs), policy=policy),
        batch_size=NUM_SAMPLES + 1 if case == "large" else BATCH_SIZE,
        epochs=epochs,
        deadline_s=STOPPED_S if case == "stop" else 30.0,
        trial_s=0.01,
        begun=held.append,
        report=report,
        advance=advance,
    )


def _data(case: str):
    from paceline.data.dataset import Dataset, TensorSamples

    numbers = torch.arange(float(NUM_SAMPLES))[:, None]
    classes = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    if case == "label":
        classes[7] = 2
    samples = TensorSamples(numbers, classes)
    return Dataset("numbers", samples, samples, 2, (1,))


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    for asked in sys.argv[1:]:
        case, policy, workers, epochs = asked.split("/")
        before = _num_memories()
        found = ran(case, policy, workers, int(epochs))
        gc.collect()  # this file's run and coordinator refer to each other
        found["left"] = _num_memories() - before
        print(json.dumps([asked, found]), flush=True)


if __name__ == "__main__":
    main()
