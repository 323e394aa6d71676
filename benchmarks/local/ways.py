"""Time GPT steps on two hosts: without exchange, with gradients, and with local updates.

The case is a size of `steps_to_loss`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import sized_gpt
import torch
from steps_to_loss import CASES
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import paceline
from paceline.links.group import Group
from paceline.training.data.batch import Batch
from steps import Task, Trainee, alone, buckets, ddp, taken

ALONE = "alone"
SYNC_EVERY, DELAY = 5, 1  # steps per round, and steps during an exchange
_NUM_BLOCKS = 4
_NUM_STEPS = {"0.1m": 10 * SYNC_EVERY, "1m": 3 * SYNC_EVERY, "10m": SYNC_EVERY}
_CODECS = (None, "dynamic8", "dynamic4")


def measure(group: Group, quick: bool, case: str) -> dict[str, Any]:
    """Return each variant's mean seconds per step, for each of its alternating blocks."""
    task = _task(case)
    wraps = {ALONE: alone, **buckets((1, 25)), "DDP, fp16 hook": ddp(25, fp16_compress_hook)}
    wraps |= {f"allreduce, {codec}": ddp(25, codec) for codec in _CODECS[1:] if codec}
    num_steps = min(SYNC_EVERY, _NUM_STEPS[case]) if quick else _NUM_STEPS[case]
    num_blocks = 1 if quick else _NUM_BLOCKS
    found = taken(task, wraps, group, num_blocks, num_steps, others=_local_updates(task))
    return {name: [sum(block) / len(block) for block in own] for name, own in found.blocks.items()}


def _task(case: str) -> Task:
    known = CASES[case]
    recipe = getattr(sized_gpt, known.model)()
    inputs, targets = Batch.of(recipe.samples.__getitems__(range(known.batch_size)))
    rate = known.learning_rate
    return Task(
        recipe.model, lambda model: torch.optim.AdamW(model.parameters(), rate), inputs, targets
    )


def _local_updates(task: Task) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield name and step function of local updates: each codec, with and without delay."""
    for codec, delay in product(_CODECS, (0, DELAY)):
        trainee = Trainee(task, alone)
        model, optimizer = trainee.parallel, trainee.optimizer
        updates = paceline.LocalUpdates(model, optimizer, SYNC_EVERY, codec=codec, delay=delay)
        yield local_name(codec, is_delayed=delay > 0), partial(_step, trainee, updates)


def _step(trainee: Trainee, updates: paceline.LocalUpdates) -> None:
    """Take a step; `updates` exchange as long as they are referenced."""
    trainee.step()


def local_name(codec: str | None, *, is_delayed: bool) -> str:
    """Return the variant's name for local updates with this codec."""
    return f"local{', delay' if is_delayed else ''}, {codec or 'float32'}"
