"""AlexNet on a rank of each of two hosts: what a step takes and sends, by subbatch and by DDP.

All run in the same processes, block by block in turn. A step of subbatch is the strategy's own.
"""

import sys
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "wheel"))  # after our own

from ddp import ALONE, Counted, plain

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
from ranks import Variant, alternate, compare, timed
from trainee import Task, Trainee

BATCH_SIZE, BUCKETS_MB = 16, (10, 25, 100)
_MODEL = "alexnet"
_CODECS: dict[str, dict[str, str]] = {
    "subbatch": {},
    "subbatch, 8-bit": {"activations": "dynamic8", "activation_gradients": "dynamic8"},
    "subbatch, 8-bit, gradients too": dict.fromkeys(
        ("activations", "activation_gradients", "gradients"), "dynamic8"
    ),
}
_NUM_WARM_UP = 2


def ddp(bucket_mb: int) -> str:
    """Return what DistributedDataParallel with such buckets is called."""
    return f"DDP float32, buckets of {bucket_mb} MB"


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return seconds and bytes of all variants, as the first rank saw them."""
    blocks, steps = (2, 1) if quick else (6, 2)
    task = Task.synthetic(_MODEL, BATCH_SIZE, group.device)
    runs = {ALONE: Trainee(task, lambda model: model)}
    runs |= {ddp(mb): Trainee(task, partial(plain, bucket_mb=mb)) for mb in BUCKETS_MB}
    ours = {name: _SubBatch(codecs, task, group) for name, codecs in _CODECS.items()}
    variants, counted = [], {}
    for name, run in (runs | ours).items():
        for _ in range(_NUM_WARM_UP):
            run.step()
        counted[name] = Counted(timed(run.step))
        variants.append(Variant(name, counted[name], group.world_size))
    rows = compare(alternate(variants, group, blocks, steps), ddp(BUCKETS_MB[0]))
    for name, row in rows.items():
        row["wire_nbytes"] = median(counted[name].nbytes) / 2  # in each direction
    for name, one in ours.items():
        rows[name] |= {"sent": one.sent, "planned": one.planned}
        one.close()
    return {"samples": BATCH_SIZE * group.world_size, "variants": rows}


class _SubBatch:
    """The strategy's own steps on the task's batch."""

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
        """Bytes sent in a step, by purpose."""
        return self._trainer.sent_nbytes

    def step(self) -> None:
        """Take a step."""
        self._trainer.step(self._source)

    def close(self) -> None:
        """End its threads."""
        self._trainer.close()
