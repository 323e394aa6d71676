"""Limits on the workers that may join a run, and on their messages."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from paceline.core.errors import InvalidInput, printable

WINDOW = 8  # maximum number of a worker's requests without an acknowledged reply
QUEUED_PIECES = 32  # maximum number of pieces queued in each direction of a connection: 8 MiB
HEARTBEAT_S = 1.0
SILENCE_S = 5.0  # a connection silent for five heartbeats counts as dead
RECONNECT_S = 5.0  # a worker without a connection for this time is lost
LOST_S = 60.0  # a connected worker without a message for this time is lost
CREDIT_MESSAGES = 2  # maximum unanswered requests of full size: one arrives while one executes

_MAX_SETTINGS_NBYTES = 64 * 1024
_MAX_RUN_ID = 200
RELEASE = f"paceline {version('paceline')}"  # hub and workers must run the same release

_LOG_PAUSE_S = 5.0
MOST_TEXT = 300  # maximum characters of a peer's text in a log line or an error


def check_run_name(run_id: str) -> None:
    """Raise InvalidInput for an invalid name of a run."""
    is_valid = run_id.isascii() and run_id.isprintable() and 0 < len(run_id) <= _MAX_RUN_ID
    if not is_valid:
        problem = f"must be 1 to {_MAX_RUN_ID} printable ASCII characters"
        raise InvalidInput("run_name", problem, got=run_id)


@dataclass(frozen=True)
class Limits:
    """The name of a server's run, and the limits on the run's workers and messages.

    `max_message_nbytes`: the largest size of a request or reply. All unanswered requests of a
    worker together may have twice this size. `settings`: bytes that every worker receives.
    """

    run_id: str
    num_workers: int
    max_message_nbytes: int
    settings: bytes = b""

    def __post_init__(self) -> None:
        check_run_name(self.run_id)
        if len(self.settings) > _MAX_SETTINGS_NBYTES:
            problem = f"must have at most {_MAX_SETTINGS_NBYTES} bytes"
            raise InvalidInput("settings", problem, got=len(self.settings))

    def mismatch(self, worker: int, run_id: str, release: str) -> str:
        """Return the reason to refuse a worker; an empty text if the worker may join."""
        if run_id != self.run_id:
            return f"--run-name is {run_id!r} at the worker and {self.run_id!r} at the hub"
        if release != RELEASE:
            return f"the worker runs {release}, the hub {RELEASE}; install the same release"
        if worker >= self.num_workers:
            return f"the worker's number is {worker}; must be 0 to {self.num_workers - 1}"
        return ""


class RateLimitedLog:
    """Logs the latest warning, at most once in five seconds, and how many there were."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._latest = ""
        self._num_unlogged = 0
        self._logged_s = -_LOG_PAUSE_S
        self.num_total = 0

    def warning(self, text: str) -> None:
        """Log a warning, or keep it for `flush` if one was logged within five seconds."""
        self._latest = printable(text, MOST_TEXT)
        self._num_unlogged += 1
        self.num_total += 1
        self.flush()

    def flush(self) -> None:
        """Log the latest kept warning, unless one was logged within five seconds."""
        if not self._num_unlogged or self._clock() - self._logged_s < _LOG_PAUSE_S:
            return
        more = f" ({self._num_unlogged} similar)" if self._num_unlogged > 1 else ""
        self._num_unlogged, self._logged_s = 0, self._clock()
        self._logger.warning("%s", self._latest + more)
