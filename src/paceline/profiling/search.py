"""The largest batch that fits, found by attempts in processes of their own, which may fail."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.memory import largest_batch
from paceline.links.group import device_of_rank
from paceline.links.launch import KEEPING_MEMORY
from paceline.models import describe
from paceline.profile_result import AttemptRow, LargestBatch
from paceline.profile_settings import ProfileSettings
from paceline.profiling.attempt import Attempt
from paceline.profiling.largest import GaveUp, largest
from paceline.profiling.residency import free_nbytes
from paceline.profiling.subject import fitted_to

_FEW, _MOST = 2, 2**24  # of one sample, batch norm has no variance
_SHARE_OF_FREE = 0.9  # the rest is for what else goes on


def find_largest(settings: ProfileSettings, say: Callable[[str], None]) -> LargestBatch:
    """Search for the largest batch of one worker; each attempt is told to `say`.

    An attempt that is ended for want of memory, or by its own fault, is one that does not fit.
    """
    device = device_of_rank()
    fitted = fitted_to(settings)
    limit = int(settings.memory or _SHARE_OF_FREE * free_nbytes(device))
    workload = describe(fitted.model, torch.zeros(_FEW, *fitted.data.sample_shape))
    order = Attempt(
        model=fitted.name,
        num_classes=fitted.num_classes,
        num_outputs=fitted.data.num_classes,
        several_labels=fitted.data.train[0][1].dtype == torch.bool,
        sample_shape=fitted.data.sample_shape,
        batch_size=_FEW,
        limit_nbytes=limit,
        parent=os.getpid(),
    )
    del fitted
    rows: list[AttemptRow] = []

    def tried(batch_size: int) -> AttemptRow:
        rows.append(attempted(order.model_copy(update={"batch_size": batch_size}), settings))
        say(f"batch of {batch_size}: {rows[-1].why}, after {rows[-1].seconds:.1f} s")
        return rows[-1]

    def fits(batch_size: int) -> bool:
        row = tried(batch_size)
        if row.seconds >= settings.attempt_s:
            raise GaveUp
        return row.fits

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


def attempted(order: Attempt, settings: ProfileSettings) -> AttemptRow:
    """Try a batch in a child process, of which nothing is left when this returns or raises."""
    command = [sys.executable, "-m", "paceline.profiling.attempt", order.model_dump_json()]
    started = time.monotonic()
    process = subprocess.Popen(  # noqa: S603 - a command of our own
        command,
        env=KEEPING_MEMORY | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    try:
        out, _ = process.communicate(timeout=settings.attempt_s)
        row = _outcome(process.returncode, out)
    except subprocess.TimeoutExpired:
        row = {"fits": False, "why": f"not done after {settings.attempt_s:g} s, the deadline"}
    finally:
        process.kill()
        process.communicate()
    seconds = time.monotonic() - started
    return AttemptRow(batch_size=order.batch_size, seconds=seconds, **row)


def _outcome(code: int, out: str) -> dict[str, Any]:
    """Return whether the child took its step, and what it said or how it ended."""
    if code < 0:
        why = f"ended by {signal.Signals(-code).name}, as for want of memory"
        return {"fits": False, "why": why}
    try:
        said = json.loads((out.strip().splitlines() or [""])[-1])
        return {key: said[key] for key in ("fits", "why", "base_nbytes")}
    except (ValueError, KeyError, TypeError):
        return {"fits": False, "why": f"ended with exit code {code}, as for want of memory"}
