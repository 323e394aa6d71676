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

_FAILED_KEY, _FAILURE_KEY = "paceline/failed", "paceline/failure"
_SPEAKER_KEY = "paceline/speaker"  # the rank that prints its own error
_REPORTED_KEY = "paceline/reported"
_LEFT_KEY = "paceline/left"  # the first signal that ended a rank
_SIGNALLED_KEY = "paceline/signalled"  # the signal that the launcher sends to all ranks
_STOPPED_KEY = "paceline/stopped"  # the line that rank 0 printed when the run stopped
_REPORT_S = 3.0  # deadline for the first failed rank's output; less than the launcher's _GRACE_S


def failure(store: Store) -> str | None:
    """Return the first failed rank's reason; None if no rank has failed."""
    return _found(store, _FAILURE_KEY)


def stopped(store: Store) -> str | None:
    """Return the line that rank 0 printed when the run stopped, or None."""
    return _found(store, _STOPPED_KEY)


def _found(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def announce_signal(store: Store, number: int) -> None:
    """Announce the launcher's signal to all ranks, which explains lost connections from then on."""
    _publish(store, _SIGNALLED_KEY, str(number))


def _publish(store: Store | None, key: str, value: str) -> None:
    if store is not None:
        with suppress(RuntimeError):  # the process that keeps the store may have ended
            store.set(key, value)


def tell_left(group: Group, number: int) -> bool:
    """Announce that this rank ends after a signal; return True on the first such rank."""
    if group.store is None:
        return True
    with suppress(RuntimeError):  # the process that keeps the store may have ended
        group.store.compare_set(_LEFT_KEY, "", str(number))
        return group.store.add(f"{_LEFT_KEY}/number", 1) == 1
    return False


def tell_stopped(group: Group, line: str) -> None:
    """Report to the launcher that this rank has printed why all ranks end."""
    _publish(group.store, _STOPPED_KEY, line)


def tell_reported(group: Group) -> None:
    """Report to the other ranks that the first failed rank has printed its error."""
    _publish(group.store, _REPORTED_KEY, "")


def error_to_raise(
    error: Exception | SystemExit, group: Group, store: Store
) -> WorkerLost | WorkersFailed | None:
    """Publish why this rank ends; return the error to raise instead of `error`.

    Returns None if `error` itself must be raised, because it is the run's first error. Returns
    WorkersFailed if another rank has printed the reason, or has ended after a signal.
    """
    # All error classes of torch.distributed are RuntimeErrors.
    lost_in_torch = isinstance(error, RuntimeError) and is_loss(error)
    try:
        return _told_by(store, error, group, lost_in_torch)
    except dist.DistNetworkError:
        if not lost_in_torch:
            return None
        # The launcher's process keeps the store. If the launcher is gone, the kernel is about to
        # end this rank.
        time.sleep(_REPORT_S)
        gone = group.dead() or "the process that keeps the run's store"
        return WorkerLost(f"worker {group.rank} stops: {gone} died in the middle of the run")


def _told_by(
    store: Store, error: Exception | SystemExit, group: Group, lost_in_torch: bool
) -> WorkerLost | WorkersFailed | None:
    number = _found(store, _LEFT_KEY) or (_found(store, _SIGNALLED_KEY) if lost_in_torch else None)
    if number is not None:
        return WorkersFailed(128 + int(number))
    is_lost, reason = isinstance(error, WorkerLost), str(error)
    if lost_in_torch:
        is_lost = True
        reason = group.died(lambda: failure(store) is not None) or unknown_peer(error)
    is_first = store.add(_FAILED_KEY, 1) == 1
    if is_first:
        if not is_lost:
            store.set(_SPEAKER_KEY, str(group.rank))
            reason = f"worker {group.rank} failed: {reason}"
        store.set(_FAILURE_KEY, reason)
    if is_lost and (is_first or not _is_said_here(group, store)):
        if lost_in_torch and not is_first:  # repeat the first failed rank's reason
            reason = store.get(_FAILURE_KEY).decode()
        return WorkerLost(f"worker {group.rank} stops: {reason}")
    if is_first:
        return None
    # torchrun kills all ranks once a rank has ended. So wait until the first failed rank has
    # printed its error. RuntimeError: the deadline has passed, or the store has ended.
    with suppress(RuntimeError):
        store.wait([_REPORTED_KEY], timedelta(seconds=_REPORT_S))
    return WorkersFailed(2 if isinstance(error, InvalidInput) else 1)


def _is_said_here(group: Group, store: Store) -> bool:
    """Return True if the first failed rank is on this machine and prints its error."""
    speaker = _found(store, _SPEAKER_KEY)
    here = group.members[group.rank].boot_id
    return speaker is not None and group.members[int(speaker)].boot_id == here
