"""Limits on a peer: which run it may join, and how much, how long and how often it may send."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version

from paceline.core.errors import InvalidInput, printable
from paceline.rpc.frames import NONCE_NBYTES

WINDOW = 8  # requests of a worker without a reply that it acknowledged
QUEUED_PIECES = 32  # in each direction of a connection; 8 MiB
HEARTBEAT_S = 1.0
SILENCE_S = 5.0  # after which a connection is taken for dead: five heartbeats
RECONNECT_S = 5.0  # after which a worker is lost whose connection, and so its process, has ended
LOST_S = 60.0  # after which a worker is lost that was silent
CREDIT_MESSAGES = 2  # unanswered ones of the largest size: one is executed, the next one travels

_MAX_SETTINGS_NBYTES = 64 * 1024
_MAX_RUN_ID = 200
RELEASE = f"paceline {version('paceline')}"  # which hub and workers must have alike

_LOG_PAUSE_S = 5.0
MOST_TEXT = 300  # characters of what a peer says


def nonce_of(run_id: str) -> bytes:
    """Return the nonce in every header of a run; InvalidInput for a name that cannot be sent."""
    printable = run_id.isascii() and run_id.isprintable()
    if not (printable and 0 < len(run_id) <= _MAX_RUN_ID):
        raise InvalidInput(
            "run id", f"{run_id!r} is not 1 to {_MAX_RUN_ID} printable ASCII characters"
        )
    return sha256(run_id.encode()).digest()[:NONCE_NBYTES]


@dataclass(frozen=True)
class Limits:
    """The run that a server serves, and what it takes from the run's workers.

    `max_message_nbytes` is the size of the largest request or reply; a worker may have sent twice
    as many bytes that have no reply. `settings`, at most 64 KiB, are sent to every worker. Raises
    InvalidInput if a field cannot be sent.
    """

    run_id: str
    num_workers: int
    max_message_nbytes: int
    settings: bytes = b""

    def __post_init__(self) -> None:
        nonce_of(self.run_id)  # or InvalidInput, before a thread needs it
        if len(self.settings) > _MAX_SETTINGS_NBYTES:
            raise InvalidInput(
                "settings", f"{len(self.settings)} bytes are more than {_MAX_SETTINGS_NBYTES}"
            )

    @cached_property
    def nonce(self) -> bytes:
        """The nonce in every header of the run."""
        return nonce_of(self.run_id)

    def mismatch(self, worker: int, run_id: str, release: str) -> str:
        """Return the reason why a worker may not join; the empty string if it may."""
        if run_id != self.run_id:
            return f"run id: the hub's run is {self.run_id!r}, this worker's {run_id!r}"
        if release != RELEASE:
            return f"version: the hub has {RELEASE}, this worker {release}; install the same"
        if worker >= self.num_workers:
            return f"worker: {worker} is not one of 0 to {self.num_workers - 1}"
        return ""


class RateLimitedLog:
    """Warnings about peers: the first at once, then a line with their number every five seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._latest = ""
        self._num_unlogged = 0
        self._logged_s = -_LOG_PAUSE_S
        self.num_total = 0

    def warning(self, text: str) -> None:
        """Log a warning, now or with later ones."""
        self._latest = printable(text, MOST_TEXT)
        self._num_unlogged += 1
        self.num_total += 1
        self.flush()

    def flush(self) -> None:
        """Log the warnings that were held back, unless the last line is too recent."""
        if not self._num_unlogged or self._clock() - self._logged_s < _LOG_PAUSE_S:
            return
        more = f" ({self._num_unlogged} of such)" if self._num_unlogged > 1 else ""
        self._num_unlogged, self._logged_s = 0, self._clock()
        self._logger.warning("%s", self._latest + more)
