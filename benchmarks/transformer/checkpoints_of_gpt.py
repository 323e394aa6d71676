"""Measure how long a checkpoint delays the steps of a GPT with 30 M parameters."""

import tempfile
import time
from pathlib import Path
from typing import Any

from figures import spread
from paceline import DataParallel
from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.state import module_state, optimizer_state
from paceline.checkpoints.writer import BackgroundWriter
from paceline.links.group import Group
from ranks import DEADLINE_S, timed
from steps import Task, Trainee

_BATCH_SIZE, _NUM_STEPS, _NUM_CHECKPOINTS = 4, 3, 6
_FIRST = 1  # not counted: the first checkpoint allocates memory for its copies


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the step time without a checkpoint, and the delay by a checkpoint."""
    task = Task.synthetic("gpt-30m", _BATCH_SIZE, group.device)
    trainee = Trainee(
        task, lambda model: DataParallel(model, exchange="host", deadline_s=DEADLINE_S)
    )
    trainee.step()
    steps = timed(trainee.step)(1 if quick else 2 * _NUM_STEPS)
    stalls = []
    with tempfile.TemporaryDirectory() as folder:
        writer = BackgroundWriter(CheckpointFolder(Path(folder)))
        for number in range(2 if quick else _FIRST + _NUM_CHECKPOINTS):
            started = time.perf_counter()
            if group.rank == 0:
                nbytes = _save(writer, trainee, number)
            group.barrier()
            stalls.append(time.perf_counter() - started)
            timed(trainee.step)(1 if quick else _NUM_STEPS)  # the writer works meanwhile
        writer.close()
    if group.rank:
        return {}
    held = stalls[_FIRST:] * (2 if quick else 1)
    share = sorted(held)[len(held) // 2] / sorted(steps)[len(steps) // 2]
    known = {"first_s": stalls[0], "nbytes": nbytes, "share_of_a_step": share}
    return {"step": spread(steps * (2 if quick else 1)), "stall": spread(held), **known}


def _save(writer: BackgroundWriter, trainee: Trainee, number: int) -> int:
    model = trainee.parallel.module
    tensors, values = optimizer_state(trainee.optimizer, model.named_parameters())
    found = {f"model/{name}": one for name, one in module_state(model).items()}
    found |= {f"optimizer/{name}": one for name, one in tensors.items()}
    writer.save(number, found, {"optimizer": values}, wait=False)
    return sum(one.nbytes for one in found.values())
