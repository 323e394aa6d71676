"""Who wants to work for which run."""

from dataclasses import dataclass
from hashlib import sha256

from paceline.core.errors import InvalidInput
from paceline.wire.frames import NONCE_NBYTES

_MOST_RUN_ID = 200
_LAYOUT = 2 * sha256().digest_size


@dataclass(frozen=True)
class Identity:
    """A worker of a run.

    `layout` is what both sides must agree on: a SHA-256 in lower-case hexadecimal. `worker` is a
    number that nobody else has.
    """

    run_id: str
    layout: str
    worker: int

    def __post_init__(self) -> None:
        check_run(self.run_id, self.layout)
        if not 0 <= self.worker < 2**32:
            raise InvalidInput(f"worker: {self.worker} is no number of a worker")

    @property
    def nonce(self) -> bytes:
        """What marks every frame of the run."""
        return nonce_of(self.run_id)


def nonce_of(run_id: str) -> bytes:
    """Return what marks every frame of a run."""
    return sha256(run_id.encode()).digest()[:NONCE_NBYTES]


def check_run(run_id: str, layout: str) -> None:
    """Raise InvalidInput for a run id or a layout that does not fit into a HELLO."""
    if not 0 < len(run_id) <= _MOST_RUN_ID or not (run_id.isascii() and run_id.isprintable()):
        raise InvalidInput(
            f"run id: {run_id!r} is not 1 to {_MOST_RUN_ID} printable ASCII characters"
        )
    if len(layout) != _LAYOUT or set(layout) - set("0123456789abcdef"):
        raise InvalidInput(f"layout: {layout!r} is no SHA-256 in lower-case hexadecimal")
