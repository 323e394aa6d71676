"""Measure the overhead of Paceline's wrapper, step and recorder for a single worker.

In each round, each variant takes one step, in random order, in one process with the same weights
and batch. Variants: a plain PyTorch loop; the same loop with `paceline.DataParallel`; Paceline's
step without a trace; and with every layer traced.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from figures import Part, shown, spread, table
from paceline import DataParallel
from paceline.exchange.replica import SingleReplica
from paceline.exchange.step import Share, train_step
from paceline.links.clock import clock_for
from paceline.record.recorder import Recorder
from ranks import in_turns, timed
from steps import Task

_CASES = {"alexnet batch 16": ("alexnet", 16, 20), "lenet5 batch 32": ("lenet5", 32, 1000)}
_QUICK_ROUNDS, _WARM_UP = 2, 3


def variants(task: Task) -> dict[str, Callable[[], object]]:
    """Return a step function for each variant; all share a model and an optimizer."""
    model, share = task.build(), Share(task.inputs, task.targets, 1.0)
    optimizer = task.optimizer(model)
    source: Iterator[Share] = repeat(share)
    recorder = Recorder(clock_for(share.inputs.device), "device0", 0)
    alone = SingleReplica(model)

    def plain(parallel: Callable[..., Any]) -> None:
        cross_entropy(parallel(share.inputs), share.targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    def traced() -> None:
        recorder.start_trace(model)
        train_step(alone, optimizer, source, recorder)
        recorder.stop_trace()

    return {
        "bare": partial(plain, model),
        "wrapped": partial(plain, DataParallel(model)),
        "untraced": partial(train_step, alone, optimizer, source, recorder),
        "traced": traced,
    }


def measure(case: str, quick: bool) -> dict[str, Any]:
    """Return each variant's step time, and its ratio to the plain PyTorch step."""
    name, batch_size, rounds = _CASES[case]
    steps = variants(Task.synthetic(name, batch_size, torch.device("cpu")))
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    for variant in in_turns(steps, _WARM_UP + (_QUICK_ROUNDS if quick else rounds)):
        seconds[variant] += timed(steps[variant])(1)
    known = {variant: spread(own[_WARM_UP:]) for variant, own in seconds.items()}
    return {
        variant: {
            "seconds": known[variant],
            "ratio": spread([a / b for a, b in zip(own, seconds["bare"], strict=True)][_WARM_UP:]),
            "ratio_of_medians": known[variant]["median"] / known["bare"]["median"],
        }
        for variant, own in seconds.items()
    }


def text(case: str, figures: Mapping[str, Any]) -> str:
    """Return the table of a case."""
    lines = [
        (
            name,
            shown(row["seconds"], 1e3, 2),
            f"{row['ratio_of_medians']:.4f}",
            shown(row["ratio"], digits=4),
        )
        for name, row in figures.items()
    ]
    head = ("", "ms a step, median [quartiles]", "ratio of medians to bare", "step by step")
    return table(case, head, lines)


PARTS = {case: Part(partial(measure, case), partial(text, case)) for case in _CASES}
