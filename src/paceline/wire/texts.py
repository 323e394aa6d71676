"""What others have sent, made fit to be shown; and complaints that do not flood the log."""

import time
from collections.abc import Callable

_MOST_TEXT = 300
_PAUSE_S = 5.0


def one_line(text: str) -> str:
    """Return a text on one line, of printable characters, and not too long."""
    clean = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * _MOST_TEXT]).split())
    return clean if len(clean) <= _MOST_TEXT else clean[:_MOST_TEXT] + " ..."


class Complaints:
    """Tells of what strangers send: the first at once, then how many there were, now and then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._latest = ""
        self._num_untold = 0
        self._told_s = -_PAUSE_S
        self.num_all = 0

    def add(self, text: str) -> None:
        """Tell of it, now or later."""
        self._latest = one_line(text)
        self._num_untold += 1
        self.num_all += 1
        self.tell()

    def tell(self) -> None:
        """Tell of what was not yet told, unless that was just done."""
        if not self._num_untold or time.monotonic() - self._told_s < _PAUSE_S:
            return
        more = f" ({self._num_untold} of such)" if self._num_untold > 1 else ""
        self._num_untold, self._told_s = 0, time.monotonic()
        self._say(self._latest + more)
