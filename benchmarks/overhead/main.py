"""What Paceline's wrapper, step and recorder cost a single worker.

In every round each variant takes one step, in a new order each time, on the same weights and the
same batch, in one process: a loop as anybody writes it in PyTorch, the same loop around
`paceline.DataParallel`, Paceline's step with nothing traced, and with every layer traced.

    python benchmarks/overhead/main.py
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import DataParallel
from paceline.exchange.replica import SingleReplica
from paceline.exchange.step import SGD, Share, train_step
from paceline.links.clock import clock_for
from paceline.links.devices import device_of
from paceline.record.recorder import Recorder
from paceline.training.models import find

CASES = (("alexnet", 16, 20), ("lenet5", 32, 1000))
WARM_UP = 3


def variants(model: nn.Module, share: Share, device: torch.device) -> dict[str, Callable[[], None]]:
    """Return one step of each variant, all on the same model and optimizer."""
    optimizer = SGD().optimizer(model)
    source: Iterator[Share] = repeat(share)

    def bare() -> None:
        loss = cross_entropy(model(share.inputs), share.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    parallel = DataParallel(model)

    def wrapped() -> None:
        loss = cross_entropy(parallel(share.inputs), share.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    recorder = Recorder(clock_for(device), "device0", 0)
    alone = SingleReplica(model)

    def untraced() -> None:
        train_step(alone, optimizer, source, recorder)

    def traced() -> None:
        recorder.start_trace(model)
        train_step(alone, optimizer, source, recorder)
        recorder.stop_trace()

    return {"bare": bare, "wrapped": wrapped, "untraced": untraced, "traced": traced}


def measure(name: str, batch_size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step of each variant, round by round."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    architecture = find(name)
    model = architecture.build(None).to(device)
    inputs = torch.randn(batch_size, *architecture.input_shape or (), device=device)
    targets = torch.zeros(batch_size, dtype=torch.int64, device=device)
    steps = variants(model, Share(inputs, targets, 1.0), device)
    order = random.Random(0)  # noqa: S311 - no secret
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    for round_ in range(WARM_UP + rounds):
        for variant in order.sample(list(steps), len(steps)):
            started = time.perf_counter()
            steps[variant]()
            device_of(device).synchronize()
            if round_ >= WARM_UP:
                seconds[variant].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Measure all cases and print the table."""
    from figures import shown, spread, write

    torch.set_num_threads(1)
    figures = {}
    print("case                variant    ms a step [quartiles]         ratio to bare [quartiles]")
    for name, batch_size, rounds in CASES:
        seconds = measure(name, batch_size, rounds)
        for variant, values in seconds.items():
            ratios = [a / b for a, b in zip(values, seconds["bare"], strict=True)]
            case = f"{name} batch {batch_size}"
            row = {"seconds": spread(values), "ratio": spread(ratios)}
            row["ratio_of_medians"] = row["seconds"]["median"] / spread(seconds["bare"])["median"]
            figures[f"{case}, {variant}"] = row
            print(
                f"{case:19} {variant:10} {shown(row['seconds'], 1e3):29} "
                f"{shown(row['ratio'], digits=4)}"
            )
    write(Path(__file__).parent, figures)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
