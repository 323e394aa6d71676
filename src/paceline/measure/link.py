"""Measure a worker's link to its hub, and the cores that its messages take."""

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from paceline.core.peer_records import PerSecond, Seconds
from paceline.core.settings import Record
from paceline.measure import timing
from paceline.measure.cores import CoreTime, lost_here

_NUM_PINGS = 20
_MIN_SECONDS = 1e-9
_THREADS = 2  # of a process, for messages: ZeroMQ's, which encrypts, and one that checks and copies


class HubLink(Record):
    """A link to a hub: the seconds of a small message, and bytes a second of a large one.

    One core of the worker sends or receives `core_bytes_per_s`. `lost_beside` is what computation
    loses beside messages, which the same cores send.
    """

    latency_s: Seconds
    bytes_per_s: PerSecond
    core_bytes_per_s: PerSecond
    lost_beside: Annotated[float, Field(ge=0, lt=1)] = 0.0


def hub_link(ask: Callable[[int, int], None], nbytes: int, *, on_cores: bool) -> HubLink:
    """Measure a link over which `ask` sends so many bytes, and then gets so many."""
    small_s = min(timing.median_s(lambda: ask(1, 1), num_rounds=1) for _ in range(_NUM_PINGS))
    large = CoreTime(lambda: ask(nbytes, nbytes))
    large_s = timing.median_s(large)
    return HubLink(
        latency_s=small_s / 2,
        bytes_per_s=2 * nbytes / max(large_s - small_s, _MIN_SECONDS),
        core_bytes_per_s=2 * nbytes / max(large.busy_s, _MIN_SECONDS),
        lost_beside=lost_here(large.num_cores, 1) if on_cores else 0.0,
    )


def message_speed(core_bytes_per_s: float, num_cores: int, num_processes: int) -> float:
    """Return the bytes a second that hubs and workers of a host send and receive together."""
    return core_bytes_per_s * min(num_cores, _THREADS * num_processes)
