"""Two ranks fail alike; the first to fail takes its time to print why."""

import sys
import time

from paceline.core.errors import InvalidInput
from paceline.links.group import Group
from paceline.runs.launching import as_rank, leave


class SlowStream:
    """Standard error that is slow to take a line."""

    def write(self, text: str) -> None:
        time.sleep(1)
        sys.__stderr__.write(text)

    def flush(self) -> None:
        sys.__stderr__.flush()


def fail(group: Group) -> None:
    raise InvalidInput("the same on all ranks")


sys.stderr = SlowStream()
leave(as_rank(fail, 60.0, debug=False))
