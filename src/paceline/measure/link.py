"""Measure a worker's link to its hub, and the cores that its messages take."""

from collections.abc import Callable
from typing import NamedTuple

from paceline.measure import timing
from paceline.measure.cores import CoreTime

_NUM_PINGS = 20
_MIN_SECONDS = 1e-9
_THREADS = 2  # of a process, for messages: ZeroMQ's, which encrypts, and one that checks and copies


class LinkSpeed(NamedTuple):
    """The speed of a link: the seconds of a small message, and bytes a second of a large one.

    One core of the worker would send or receive `core_bytes_per_s`; its messages keep `num_cores`
    busy.
    """

    latency_s: float
    bytes_per_s: float
    core_bytes_per_s: float
    num_cores: float


def link_speed(ask: Callable[[int, int], None], nbytes: int) -> LinkSpeed:
    """Measure a link over which `ask` sends so many bytes, and then gets so many."""
    small_s = min(timing.median_s(lambda: ask(1, 1), num_rounds=1) for _ in range(_NUM_PINGS))
    large = CoreTime(lambda: ask(nbytes, nbytes))
    large_s = timing.median_s(large)
    return LinkSpeed(
        latency_s=small_s / 2,
        bytes_per_s=2 * nbytes / max(large_s - small_s, _MIN_SECONDS),
        core_bytes_per_s=2 * nbytes / max(large.busy_s, _MIN_SECONDS),
        num_cores=large.num_cores,
    )


def message_speed(core_bytes_per_s: float, num_cores: int, num_processes: int) -> float:
    """Return the bytes a second that hubs and workers of a host send and receive together."""
    return core_bytes_per_s * min(num_cores, _THREADS * num_processes)
