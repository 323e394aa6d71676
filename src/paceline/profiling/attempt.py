"""One training step of a batch in a process of its own, which may not have more than its memory.

`python -m paceline.profiling.attempt` prints one JSON object that says whether the batch fits.
"""

import json
import resource
import sys
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from paceline.links.group import device_of_rank
from paceline.models import find
from paceline.native import die_with_parent
from paceline.profiling.residency import limited_nbytes
from paceline.profiling.tracked import momentum_of
from paceline.record.clock import HostClock
from paceline.record.recorder import Recorder
from paceline.training.step import SGD, Share, train_step

_OUT_OF_MEMORY = ("memory", "bad_alloc", "bad allocation")


class Attempt(BaseModel):
    """A batch that is to be tried: `sample_shape` is that of one sample.

    With `several_labels` a sample may have several of the `num_outputs` classes. `parent` is the
    process with which this one ends.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    num_classes: int | None
    num_outputs: int
    several_labels: bool
    sample_shape: tuple[int, ...]
    batch_size: int
    limit_nbytes: int
    parent: int


def attempt(wanted: Attempt) -> dict[str, Any]:
    """Return whether a step of the batch fits, why not, and what the process held before it."""
    device = device_of_rank()
    base = {"base_nbytes": limited_nbytes(device)}
    _limit(wanted.limit_nbytes, device)
    try:
        _step(wanted, device)
    except (MemoryError, RuntimeError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        out_of_memory = isinstance(error, MemoryError) or _is_memory(first_line)
        return {"fits": False, "why": "out of memory" if out_of_memory else first_line} | base
    return {"fits": True, "why": "a training step was taken"} | base


def _is_memory(message: str) -> bool:
    return any(mark in message for mark in _OUT_OF_MEMORY)


def _limit(nbytes: int, device: torch.device) -> None:
    """Let this process have no more: of a GPU, or of private memory that it may write to."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)
        return
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what ends for want of memory leaves none


def _step(wanted: Attempt, device: torch.device) -> None:
    model = find(wanted.model).build(wanted.num_classes).train().to(device)
    optimizer = SGD().optimizer(model)
    momentum_of(model, optimizer)
    inputs = torch.randn(wanted.batch_size, *wanted.sample_shape, device=device)
    share = Share(inputs, _targets(wanted, device), 1.0)
    train_step(model, optimizer, iter((share,)), Recorder(HostClock(), "", 0))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what it could not do, a GPU says only then


def _targets(wanted: Attempt, device: torch.device) -> Tensor:
    size = wanted.batch_size
    if wanted.several_labels:
        return torch.rand(size, wanted.num_outputs, device=device) < 0.5
    return torch.randint(wanted.num_outputs, (size,), device=device)


def main() -> None:
    """Try what the only argument says."""
    wanted = Attempt.model_validate_json(sys.argv[1])
    die_with_parent(wanted.parent)
    sys.stdout.write(json.dumps(attempt(wanted)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
