"""A descriptor by which one thread wakes another that polls sockets."""

import os
from contextlib import suppress


class Wake:
    """Set by any thread, polled and cleared by one."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return what to poll for reading."""
        return self._fd

    def set(self) -> None:
        """Wake who polls; nothing after it was closed."""
        if self._fd >= 0:
            with suppress(BlockingIOError):  # it is set more often than it can count: awake
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget that it was set."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Give the descriptor back. Closing twice is fine."""
        if self._fd >= 0:
            descriptor, self._fd = self._fd, -1
            os.close(descriptor)
