"""Report in one line why the ranks of a run end.

When a rank fails, the other ranks see only a lost connection. So the first failed rank publishes
its reason in the run's store, and prints its error. Ranks on other machines print that reason.
"""

import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from paceline.core.errors import InvalidInput, WorkerLost, WorkersFailed
from paceline.links.group import Group, is_loss, unknown_peer

# Keys of the run's store
FAILURE = "paceline/failure"  # the first failed rank's reason
REPORTED = "paceline/reported"  # set once the first failed rank has printed its error
SIGNALLED = "paceline/signalled"  # the signal that the launcher sends to all ranks
STOPPED = "paceline/stopped"  # the line that rank 0 printed when the run stopped
_FAILED = "paceline/failed"  # the number of failed ranks
_LEFT = "paceline/left"  # the first signal that ended a rank
_SPEAKER = "paceline/speaker"  # the first failed rank, if it prints its own error
_REPORT_S = 3.0  # deadline for the first failed rank's output; less than the launcher's _GRACE_S


def published(store: Store, key: str) -> str | None:
    """Return the text that a rank or the launcher has published under `key`, or None."""
    return store.get(key).decode() if store.check([key]) else None


def publish(store: Store | None, key: str, value: object = "") -> None:
    """Publish a value under `key` to the launcher and all ranks; without a store, do nothing."""
    if store is not None:
        with suppress(RuntimeError):  # the process that keeps the store may have ended
            store.set(key, str(value))


def tell_left(group: Group, number: int) -> bool:
    """Announce that signal `number` ends this rank; return whether it is the first such rank."""
    if group.store is None:
        return True
    with suppress(RuntimeError):  # the process that keeps the store may have ended
        group.store.compare_set(_LEFT, "", str(number))
        return group.store.add(f"{_LEFT}/number", 1) == 1
    return False


def error_to_raise(
    error: Exception | SystemExit, group: Group
) -> WorkerLost | WorkersFailed | None:
    """Publish why this rank ends; return the error to raise instead of `error`.

    Returns None if `error` itself must be raised, because it is the run's first error. Returns
    WorkersFailed if another rank has printed the reason, or has ended after a signal. Returns
    WorkerLost if this rank must name a lost rank.
    """
    # All error classes of torch.distributed are RuntimeErrors.
    lost_in_torch = isinstance(error, RuntimeError) and is_loss(error)
    try:
        return _told_by(error, group, lost_in_torch)
    except dist.DistNetworkError:
        if not lost_in_torch:
            return None
        # The launcher's process keeps the store. If the launcher is gone, the kernel is about to
        # end this rank.
        time.sleep(_REPORT_S)
        gone = group.dead() or "the process that keeps the run's store"
        return WorkerLost(f"worker {group.rank} stops: {gone} died in the middle of the run")


def _told_by(
    error: Exception | SystemExit, group: Group, lost_in_torch: bool
) -> WorkerLost | WorkersFailed | None:
    store = group.store
    assert store is not None  # groups made by `rendezvous.process_group` have a store
    number = published(store, _LEFT) or (published(store, SIGNALLED) if lost_in_torch else None)
    if number is not None:
        return WorkersFailed(128 + int(number))
    is_lost, reason = isinstance(error, WorkerLost), str(error)
    if lost_in_torch:
        is_lost = True
        reason = group.died(lambda: store.check([FAILURE])) or unknown_peer(error)
    is_first = store.add(_FAILED, 1) == 1
    if is_first:
        if not is_lost:
            store.set(_SPEAKER, str(group.rank))
            reason = f"worker {group.rank} failed: {reason}"
        store.set(FAILURE, reason)
    if is_lost and (is_first or not _is_said_here(group, store)):
        if lost_in_torch and not is_first:  # repeat the first failed rank's reason
            reason = store.get(FAILURE).decode()
        return WorkerLost(f"worker {group.rank} stops: {reason}")
    if is_first:
        return None
    # torchrun kills all ranks once a rank has ended. So wait until the first failed rank has
    # printed its error. RuntimeError: the deadline has passed, or the store has ended.
    with suppress(RuntimeError):
        store.wait([REPORTED], timedelta(seconds=_REPORT_S))
    return WorkersFailed(2 if isinstance(error, InvalidInput) else 1)


def _is_said_here(group: Group, store: Store) -> bool:
    """Return True if the first failed rank is on this machine and prints its error."""
    speaker = published(store, _SPEAKER)
    here = group.members[group.rank].boot_id
    return speaker is not None and group.members[int(speaker)].boot_id == here
