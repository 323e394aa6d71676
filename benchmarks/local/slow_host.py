"""Steps of a training loop, with pauses on a host that is to be four times slower."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

SLOWER = 4
_Batch = TypeVar("_Batch")


def train(
    batches: Iterable[_Batch], step: Callable[[_Batch], None], num_steps: int, *, is_slow: bool
) -> None:
    """Take a step on each batch; a slow host then waits three times its processor time."""
    for _, batch in zip(range(num_steps), batches, strict=False):
        busy_s = time.process_time()
        step(batch)
        if is_slow:
            time.sleep((SLOWER - 1) * (time.process_time() - busy_s))
