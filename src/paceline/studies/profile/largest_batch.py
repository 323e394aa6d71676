"""Search for the largest batch that fits into memory.

For each batch size, a child process with limited memory tries a training step.
"""

import sys
import time
from collections.abc import Callable

from pydantic import TypeAdapter

from paceline.core.errors import InvalidInput
from paceline.core.reading import read_record
from paceline.core.settings import Record
from paceline.core.workload import largest_batch
from paceline.exchange.step import Learning, Share, train_step
from paceline.links.clock import Clock
from paceline.links.devices import device_of
from paceline.links.processes import module_command, output, reason
from paceline.links.rendezvous import device_of_rank
from paceline.record.recorder import Recorder
from paceline.records.profile import AttemptRow, LargestBatch, ProfileSettings
from paceline.studies.profile.memory_use import free_nbytes, held_nbytes, make_momentum
from paceline.studies.profile.profiled_steps import SEED, optimizer_of, profiled_recipe
from paceline.training.models import describe
from paceline.training.recipes.recipe import built, new_model

_FINENESS = 16  # the largest batch that fits exceeds the batch found by at most 1/16
_FEW, _MOST = 2, 2**24  # smallest and largest batch to try; batch norm needs two samples
_SHARE_OF_FREE = 0.9  # share of the free memory that may be used
_LONGEST_ATTEMPT_S = 120.0
_OUT_OF_MEMORY = ("memory", "bad_alloc", "bad allocation")


_ROW = TypeAdapter(AttemptRow)


class GaveUp(Exception):
    """The attempt with a batch reached its deadline, so it is unknown whether the batch fits."""


def largest(fits: Callable[[int], bool], first: int, most: int) -> tuple[int, bool]:
    """Return the largest batch up to `most` that fits, and whether the search was completed.

    `fits(size)` tries a batch. From `first`, the search doubles the size while it fits, or halves
    the size until it fits. Then it bisects. The true maximum exceeds the result by at most 1/16; a
    result of 0 means that no batch fits. If `fits` raises GaveUp, the search ends incomplete, and a
    larger batch may fit.
    """
    low, high = 0, most + 1
    size = min(max(1, first), most)
    try:
        while high - low > 1 + low // _FINENESS:
            if fits(size):
                low = size
            else:
                high = size
            if high > most:  # no upper bound found yet
                size = min(2 * low, most)
            else:
                size = high // 2 if low == 0 else (low + high) // 2
    except GaveUp:
        return low, False
    return low, True


class Attempt(Record):
    """A batch size to try in a child process, with limits of memory and time."""

    settings: ProfileSettings
    batch_size: int
    limit_nbytes: int
    deadline_s: float = _LONGEST_ATTEMPT_S


def find_largest(settings: ProfileSettings, report: Callable[[str], None]) -> LargestBatch:
    """Search for the largest batch with which one worker can train.

    `report(line)` is called after each attempt. A batch counts as too large if the process that
    tries it is killed or fails with any error.
    """
    device = device_of_rank()
    given = settings.largest_batch
    limit = int(given if isinstance(given, float) else _SHARE_OF_FREE * free_nbytes(device))
    recipe = profiled_recipe(settings)
    workload = describe(built(recipe, SEED), recipe.example(_FEW))
    attempt = Attempt(settings=settings, batch_size=_FEW, limit_nbytes=limit)
    del recipe
    rows: list[AttemptRow] = []

    def tried(batch_size: int) -> AttemptRow:
        rows.append(attempted(attempt.model_copy(update={"batch_size": batch_size})))
        report(f"batch of {batch_size}: {rows[-1].why}, after {rows[-1].seconds:.1f} s")
        return rows[-1]

    def fits(batch_size: int) -> bool:
        if tried(batch_size).seconds >= attempt.deadline_s:
            raise GaveUp
        return rows[-1].fits

    few = tried(_FEW)
    predicted = largest_batch(workload, limit - (few.base_nbytes or 0))
    found, complete = largest(fits, min(predicted, _MOST) if few.fits else 1, _MOST)
    return LargestBatch(
        batch_size=found,
        limit_nbytes=limit,
        predicted=predicted,
        complete=complete,
        attempts=tuple(rows),
    )


def attempted(attempt: Attempt) -> AttemptRow:
    """Try a batch in a child process; return the outcome after the process has ended."""
    command = module_command("paceline.studies.profile.largest_batch", attempt.model_dump_json())
    row = AttemptRow(batch_size=attempt.batch_size, fits=False, seconds=0.0, why="")
    started = time.monotonic()
    try:
        done = output(command, attempt.deadline_s, termination_s=0)
        # Read only the last line, because the model may print to stdout before the AttemptRow.
        lines = done.stdout.strip().splitlines() if done.returncode >= 0 else []
        row = read_record(_ROW, lines[-1].encode(), "the row")
    except (IndexError, InvalidInput):  # the process printed no AttemptRow
        why = f"{reason(done.returncode).removeprefix('was ')}, probably out of memory"
        row = row.model_copy(update={"why": why})
    except TimeoutError:
        row = row.model_copy(update={"why": f"deadline of {attempt.deadline_s:g} s exceeded"})
    return row.model_copy(update={"seconds": time.monotonic() - started})


def try_step(attempt: Attempt) -> AttemptRow:
    """Take a training step with limited memory; return whether it succeeded, or why it failed."""
    device, limit = device_of_rank(), attempt.limit_nbytes
    own = device_of(device)
    # Save memory: batch size 1 generates the fewest synthetic samples.
    recipe = profiled_recipe(attempt.settings.model_copy(update={"batch_size": 1}))
    base_nbytes = held_nbytes(device, limited=True)
    own.limit_memory(limit)
    try:
        model = new_model(recipe).train().to(device)
        optimizer = optimizer_of(recipe, model)
        # Allocate the momentum first, so that the step's peak includes it.
        make_momentum(model, optimizer)
        share = Share(*recipe.first(attempt.batch_size).to(device), 1.0)
        recorder, learning = Recorder(Clock(), "", 0), Learning(recipe.loss)
        train_step(model, optimizer, iter((share,)), recorder, learning)
        own.synchronize()  # GPU errors surface only on synchronisation
    except (MemoryError, RuntimeError, InvalidInput) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, MemoryError) or any(mark in why for mark in _OUT_OF_MEMORY):
            why = "out of memory"
        fits = False
    else:
        fits, why = True, "training step completed"
    return AttemptRow(
        batch_size=attempt.batch_size, fits=fits, seconds=0.0, why=why, base_nbytes=base_nbytes
    )


def main() -> None:
    """Try the attempt given as JSON in `sys.argv[1]`, and print the AttemptRow as JSON."""
    sys.stdout.write(try_step(Attempt.model_validate_json(sys.argv[1])).model_dump_json() + "\n")
    sys.stdout.flush()
