"""Measure the test accuracy of DistributedDataParallel with each codec of `paceline.ddp_hook`.

One-bit codecs also train at a lower learning rate, because error feedback delays gradients.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from learning import FLOAT32, NUM_RANKS, Task, accuracies, fit, tasks
from paceline import ddp_hook
from paceline.codecs.codec import Codec
from paceline.codecs.feedback import OneBit
from paceline.codecs.quantization import FOUR_BIT_TABLES, TABLES
from paceline.core.wire_format import FEEDBACK
from paceline.links.group import Group
from ranks import on_ranks

_CODECS: Mapping[str, str | Codec | None] = {
    FLOAT32: None,
    **{name: name for name in TABLES},
    **{name: name for name in FOUR_BIT_TABLES},
    **{name + FEEDBACK: name + FEEDBACK for name in FOUR_BIT_TABLES},
    "onebit": "onebit",
    "onebit without error feedback": OneBit(),
}
_SLOWLY = "3x32x32, slowly"
_ONE_BIT = (FLOAT32, "onebit", "onebit without error feedback")


def part(quick: bool) -> dict[str, Any]:
    """Return the test accuracy of two ranks with each codec, and an F-test."""
    return on_ranks(Path(__file__).parent, "accuracy", NUM_RANKS, quick)


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the test accuracies of each task and codec, by seed."""
    known = tasks()
    known[_SLOWLY] = replace(known["3x32x32"], epochs=50, learning_rate=0.01)
    codecs = dict.fromkeys(known, tuple(_CODECS)) | {_SLOWLY: _ONE_BIT}
    return accuracies(known, codecs, quick, partial(_trained, group))


def _trained(group: Group, task: Task, epochs: int, name: str, seed: int) -> float:
    """Train from scratch with a codec, and return the test accuracy."""
    torch.manual_seed(seed)
    layers = [nn.Linear(*widths) for widths in pairwise(task.widths)]
    model = DistributedDataParallel(nn.Sequential(task.body(), *layers))
    codec, state = _CODECS[name], None
    if codec is not None:
        state, hook = ddp_hook(codec)
        model.register_comm_hook(state, hook)

    def backward(inputs: Tensor, targets: Tensor) -> None:
        cross_entropy(model(inputs), targets).backward()

    fit(task, epochs, seed, group, model.parameters(), backward)
    if state is not None:
        state.close()
    inputs, targets = task.test
    with torch.no_grad():
        found = model.module(inputs).argmax(1)
    return float((found == targets).double().mean())
