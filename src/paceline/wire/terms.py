"""On what terms a hub takes workers in."""

from dataclasses import dataclass

from paceline.core.errors import InvalidInput
from paceline.wire.frames import PROTOCOL, Buffer, Malformed
from paceline.wire.identity import check_run, nonce_of
from paceline.wire.messages import Message

MOST_SETTINGS_NBYTES = 64 * 1024
_SHOWN = 12  # of the 64 digits of a layout
_MOST_NBYTES = 1 << 40
_NUM_HELLO_PARTS = 3


@dataclass(frozen=True)
class Terms:
    """A hub's run, how many workers it has, and the bytes of the largest message of any of them.

    A worker that is silent for `lost_after_s`, or whose connection is closed for `gone_after_s`, is
    lost.
    """

    run_id: str
    layout: str
    num_workers: int
    largest_nbytes: int
    settings: bytes
    lost_after_s: float
    gone_after_s: float

    def __post_init__(self) -> None:
        check_run(self.run_id, self.layout)
        if self.num_workers < 1:
            raise InvalidInput(f"workers: {self.num_workers} is not at least 1")
        if not 0 < self.largest_nbytes <= _MOST_NBYTES:
            raise InvalidInput(f"largest message: {self.largest_nbytes} bytes")
        if len(self.settings) > MOST_SETTINGS_NBYTES:
            raise InvalidInput(
                f"settings: {len(self.settings)} bytes are more than {MOST_SETTINGS_NBYTES}"
            )

    @property
    def nonce(self) -> bytes:
        """What marks every frame of the run."""
        return nonce_of(self.run_id)

    def welcome(self, session: bytes) -> Message:
        """Return what a worker that may join is told."""
        largest = self.largest_nbytes.to_bytes(8, "little")
        return Message("", parts=(session, largest, self.settings))

    def difference(self, worker: int, run_id: str, layout: str) -> str:
        """Return why a worker does not belong here; nothing if it does."""
        if run_id != self.run_id:
            return f"run id: the hub's run is {self.run_id!r}, this worker's {run_id!r}"
        if layout != self.layout:
            return (
                f"layout: the hub's is {self.layout[:_SHOWN]}, this worker's {layout[:_SHOWN]}: "
                "they differ in the model, the head, the batch size, the codecs or the version"
            )
        if worker >= self.num_workers:
            return f"worker: {worker} is not one of 0 to {self.num_workers - 1}"
        return ""


def other_protocol(protocol: int) -> str:
    """Return what a worker of another version is told."""
    return (
        f"protocol: the hub speaks version {PROTOCOL}, this worker {protocol}; "
        "install the same paceline on both"
    )


def introduction(parts: tuple[Buffer, ...]) -> tuple[str, str, bytes]:
    """Return run id, layout and session of a HELLO's parts; Malformed if they are none."""
    if len(parts) != _NUM_HELLO_PARTS:
        raise Malformed(f"a HELLO of {len(parts)} parts")
    run_id, layout, session = map(bytes, parts)
    return run_id.decode(errors="replace"), layout.decode(errors="replace"), session
