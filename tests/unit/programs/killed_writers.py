"""Kill a process that writes checkpoints, again and again: the newest is whole, whenever it was.

All values of a checkpoint are its number. Each step is written twice, with two numbers, so that
checkpoints are replaced, too. One is kept, so that there is no other one to go back to. Prints the
steps that were found.
"""

import os
import random
import signal
import time
from pathlib import Path

import torch

from paceline.checkpoints.folder import CheckpointFolder

FOLDER = Path("checkpoints")
KILLS = 50
SIZES = (5, 300, 70_000)


def write_for_ever(number: int) -> None:
    folder = CheckpointFolder(FOLDER, keep=1)
    while True:
        number += 1
        tensors = {f"t{size}": torch.full((size,), float(number)) for size in SIZES}
        values = {"numbers": [number] * 100}
        folder.write(number // 2, {"model.safetensors": tensors, "values.json": values})


def newest() -> int:
    """Return the number of the newest checkpoint, all values of which must be that number."""
    loaded = CheckpointFolder(FOLDER).latest()
    if loaded is None:
        return 0
    assert loaded.skipped == ()
    number = loaded.json("values")["numbers"][0]
    assert loaded.step == number // 2
    assert loaded.json("values") == {"numbers": [number] * 100}
    tensors = loaded.tensors("model")
    assert {name: len(one) for name, one in tensors.items()} == {f"t{n}": n for n in SIZES}
    assert all((one == number).all() for one in tensors.values())
    return number


generator = random.Random(12)
number = 0
for _ in range(KILLS):
    child = os.fork()
    if not child:
        write_for_ever(number)
    deadline = time.monotonic() + 300
    try:
        # Until it has written one or two, and then at some moment of one more.
        while CheckpointFolder(FOLDER).steps[-1:] in ((), (number // 2,)):
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        time.sleep(generator.uniform(0, 0.03))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    before, number = number, newest()
    assert number > before
    print(number)
