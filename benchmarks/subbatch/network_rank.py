"""Measure seconds and bytes of AlexNet steps with `subbatch` and DDP on two hosts.

All variants run in the same two processes, in alternating blocks of steps.
"""

from itertools import repeat
from typing import Any

import steps
from paceline.exchange.step import SGD, Share
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.records.machine_file import find_machine
from paceline.strategies.subbatch.build import split
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.profile import planned_nbytes
from paceline.strategies.subbatch.trainer import SplitTrainer
from paceline.training.recipes.named import workload_of
from ranks import compare
from steps import alone, taken
from trainee import Task

ALONE = "alone, nothing exchanged"
BATCH_SIZE, BUCKETS_MB = 16, (10, 25, 100)
_MODEL = "alexnet"
_CODECS: dict[str, dict[str, str]] = {
    "subbatch": {},
    "subbatch, 8-bit": {"activations": "dynamic8", "activation_gradients": "dynamic8"},
    "subbatch, 8-bit, gradients too": dict.fromkeys(
        ("activations", "activation_gradients", "gradients"), "dynamic8"
    ),
}


def ddp(bucket_mb: int) -> str:
    """Return the name of the DDP variant with buckets of `bucket_mb` MB."""
    return f"DDP float32, buckets of {bucket_mb} MB"


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the seconds and bytes of all variants, as measured by this rank."""
    task = Task.synthetic(_MODEL, BATCH_SIZE, group.device)
    wraps = {ALONE: alone, **{ddp(mb): steps.ddp(mb) for mb in BUCKETS_MB}}
    ours = {name: _SubBatch(codecs, task, group) for name, codecs in _CODECS.items()}
    others = [(name, one.step) for name, one in ours.items()]
    found = taken(task, wraps, group, *((2, 1) if quick else (6, 2)), others=others)
    rows = compare(found.blocks, ddp(BUCKETS_MB[0]))
    for name, row in rows.items():
        row["wire_nbytes"] = (found.sent_nbytes[name] + found.received_nbytes[name]) / 2
    for name, one in ours.items():
        rows[name] |= {"sent": one.sent, "planned": one.planned}
        one.close()
    return {"samples": BATCH_SIZE * group.world_size, "variants": rows}


class _SubBatch:
    """Takes real steps of strategy subbatch on the task's batch."""

    def __init__(self, codecs: dict[str, str], task: Task, group: Group) -> None:
        config = SubBatch(workers=group.world_size, **codecs)
        workload = workload_of(_MODEL, BATCH_SIZE)
        model = split(task.build, workload, config, group, 0)
        recorder = Recorder(clock_for(group.device), f"cpu{group.rank}", group.rank)
        self._trainer = SplitTrainer(model, config, group, recorder, SGD(1e-4).optimizer)
        self._source = repeat(Share(task.inputs, task.targets, 1.0))
        self.planned = planned_nbytes(workload, find_machine("two-hosts-gigabit"), config)

    @property
    def sent(self) -> dict[str, float]:
        """Mean bytes sent per step, by purpose."""
        return self._trainer.sent_nbytes

    def step(self) -> None:
        """Take a step."""
        self._trainer.step(self._source)

    def close(self) -> None:
        """Close the trainer and its threads."""
        self._trainer.close()
